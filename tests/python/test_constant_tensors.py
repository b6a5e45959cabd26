"""Tensors that the program makes of numbers, and what depends on them alone: known during the capture."""

import pytest
import torch
import torch.nn.functional as F

import kiln
from helpers import check


def test_new_tensor():
    check(
        lambda x: (x * x.new_tensor(2.5) + x.new_tensor([1, 2, 3]), x.new_tensor([1], dtype=torch.int64)),
        torch.ones(2, 3),
    )
    check(lambda x: x.long().new_tensor(3.7) + torch.Tensor.new_tensor(x, [[1.0, 2.0, 3.0]]), torch.ones(2, 3))
    check(lambda x: (x.new_tensor([1.0, 2.0, 3.0], requires_grad=True) * x).sum().backward(), torch.ones(2, 3))
    with pytest.raises(TypeError):
        kiln.compile(lambda x: x.new_tensor())(torch.ones(1))


def test_classes_of_tensors():
    def f(x):
        sized = torch.FloatTensor(2, 3)
        return (
            x + torch.Tensor([1, 2, 3]),
            torch.IntTensor([x.shape[0]])[0] + 1,
            torch.LongTensor([[1.7, 2], [3, 4]]),
            torch.Tensor((1, 2)),
            torch.BoolTensor([0, 2]),
            sized.shape,
            torch.zeros_like(torch.Tensor(x.shape)),
            torch.Tensor(),
            torch.DoubleTensor([]),
        )

    check(f, torch.ones(2, 3), fullgraph=True)
    try:
        torch.set_default_dtype(torch.float64)
        check(f, torch.ones(2, 3), fullgraph=True)
    finally:
        torch.set_default_dtype(torch.float32)
    check(lambda x: torch.Tensor(x) * 2, torch.ones(2, 3))
    check(lambda x: torch.Tensor([x.sum(), 2.0]), torch.ones(2, 3))
    for bad in (lambda: torch.Tensor(3.0), lambda: torch.Tensor(["a"]), lambda: torch.IntTensor([[1], [2, 3]])):
        with pytest.raises((TypeError, ValueError)) as expected:
            bad()
        with pytest.raises(expected.type) as actual:
            kiln.compile(bad)()
        assert str(actual.value) == str(expected.value)


def sizes_of_constants(x):
    n = torch.div(torch.tensor(5), 2, rounding_mode="trunc")
    k = torch.tensor([1, 2]).sum()
    y = F.pad(x, (0, torch.tensor(2)))
    if torch.tensor(3) > n:
        y = y + 1
    return y.repeat(int(k), 1), x.reshape(-1)[:n], torch.arange(10).max().item(), y * float(torch.full((), 0.5))


def written_constants(x):
    t = torch.zeros(3, dtype=torch.int64)
    t[1] = 4
    t.add_(1)
    view = t[:2]
    view += 1
    return x[: t[1] - 5], t, int(view[0])


@pytest.mark.parametrize("f", [sizes_of_constants, written_constants])
def test_what_depends_on_constants_alone_is_known(f):
    check(f, torch.ones(3, 2), fullgraph=True)


def test_what_depends_on_more_than_constants_is_not_known():
    def f(x):
        n = torch.zeros((), dtype=torch.int64)
        n += x
        return torch.ones(n)

    compiled = kiln.compile(f)
    for n in (2, 3, 2):
        assert compiled(torch.tensor(n)).shape == (n,)
    compiled = kiln.compile(lambda: torch.ones(int(torch.randint(1, 9, ()))))
    torch.manual_seed(0)
    expected = [int(torch.randint(1, 9, ())) for _ in range(5)]
    torch.manual_seed(0)
    assert [compiled().shape[0] for _ in range(5)] == expected
