"""Operands that a kernel reads again and again, in steps: they are copied first, in the order of the reads."""

import pytest
import torch
import torch.nn.functional as F

import kiln
from helpers import check, logged_loops

N = 160


def boxes(a, b):
    low, high = torch.max(a[:, None, :2], b[:, :2]), torch.min(a[:, None, 2:], b[:, 2:])
    inner = (high - low).clamp(min=0).prod(-1)
    area = lambda x: (x[:, 2] - x[:, 0]) * (x[:, 3] - x[:, 1])  # noqa: E731
    return inner / (area(a)[:, None] + area(b) - inner)


def rows(x, v):
    return (x * v[:, 3]).sum(1), (x - v[:, 4]).abs().amax(1)


def squares(x, v):
    return (x[:, None] - v.t()[:40]).square().sum(-1)


def norm(x, v):
    return F.layer_norm(x, (N,), v[:, 0], v[:, 1])


def columns(x, v):
    return (x.t() * v[:, 5]).sum(0), (x + v[:, 2]).t().cumsum(0)


def turned(x, v):
    return (x.view(10, 16, N) + v.t()[16:32]).tanh()


CASES = {  # with the columns of the operand
    "boxes": (boxes, 4),
    "rows": (rows, 7),
    "squares": (squares, 60),
    "norm": (norm, 3),
    "columns": (columns, 6),
    "turned": (turned, 50),
}


def arguments(name, dtype=torch.float32):
    x, v = torch.rand(N, 4 if name == "boxes" else N), torch.rand(N, CASES[name][1])
    return x.to(dtype), v.to(dtype)


def kernels(capfd, function, *args):
    return logged_loops(capfd, function, *args)[1].count("_operands")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_results_are_as_in_eager(name, dtype):
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    check(CASES[name][0], *arguments(name, dtype), **tolerance)


@pytest.mark.parametrize("name", ["boxes", "rows", "norm", "turned"])
def test_the_switch(name, capfd):
    args = arguments(name)
    assert kernels(capfd, CASES[name][0], *args) > 0
    with kiln.config.patch(disable_passes="schedule.pack_operands"):
        assert kernels(capfd, CASES[name][0], *args) == 0
        check(CASES[name][0], *args)


@pytest.mark.parametrize("name", ["boxes", "rows", "norm"])
def test_open_sizes(name):
    compiled = kiln.compile(CASES[name][0], dynamic=True)
    for n in (N, 1, 200, 33):
        x, v = arguments(name)
        x, v = (x[:n], v) if name != "boxes" else (torch.rand(n, 4), torch.rand(n + 7, 4))
        torch.testing.assert_close(compiled(x, v), CASES[name][0](x, v))


def test_what_is_written_in_between_is_read_again():
    def function(x, v):
        first = (x * v[:, 0]).sum(1)
        v[:, 0] += 1
        return first, (x * v[:, 0]).sum(1), x.mul_(v[:, 1])

    check(function, torch.rand(N, N), torch.rand(N, 2))


def test_a_square_matrix_by_its_own_column():
    check(lambda x: x.mul_(x[:, 1].clone()), torch.rand(N, N))
    check(lambda x: (x * x[:, 1], x.sub_(x[:, 0])), torch.rand(N, N))


def test_few_reads_are_not_worth_a_kernel(capfd):
    assert kernels(capfd, lambda x, v: x[:4] * v[:, 0], torch.rand(8, 8192), torch.rand(8192, 3)) == 0
    assert kernels(capfd, lambda x, v: x * v[:, 0], torch.rand(50, 50), torch.rand(50, 3)) == 0
