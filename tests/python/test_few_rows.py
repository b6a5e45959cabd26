"""Products of few rows, which stream the matrix as it lies; the parts that threads share, and those cut along the sum."""

import pytest
import torch

import kiln
from kiln.testing import assert_same


class Conv1D(torch.nn.Module):
    """A linear layer whose weight is [inputs, outputs], as GPT-2 has it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = torch.nn.Parameter(torch.randn(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x, self.weight)


def build(kind: str) -> torch.nn.Module:
    torch.manual_seed(3)
    layer = {"linear": torch.nn.Linear, "conv1d": Conv1D}[kind]
    return torch.nn.Sequential(layer(70, 133), torch.nn.GELU(), layer(133, 41))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 9])
@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_layers(kind: str, rows: int) -> None:
    ours, eager = build(kind), build(kind)
    compiled = kiln.compile(ours)
    x = torch.randn(rows, 70)
    with torch.no_grad():
        assert_same(compiled(x), eager(x), rtol=1e-5, atol=1e-5)
    for module in (compiled, eager):
        module(x).square().sum().backward()
    for p, q in zip(ours.parameters(), eager.parameters(), strict=True):
        assert_same(p.grad, q.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("transpose", [False, True])
def test_one_row_of_a_batch(transpose: bool) -> None:
    """Attention of one new word: a row with each matrix of a batch."""
    q = torch.randn(12, 1, 40)
    k = torch.randn(12, 90, 40).transpose(1, 2) if transpose else torch.randn(12, 40, 90)
    assert_same(kiln.compile(torch.bmm)(q, k), torch.bmm(q, k), rtol=1e-5, atol=1e-5)


MATRICES = [(8, 32), (300, 70), (64, 4096), (1, 50), (70, 1), (3, 0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("batch", [(), (2,), (40,)], ids=str)
def test_columns(batch: tuple[int, ...], transpose: bool, dtype: torch.dtype) -> None:
    """Matrices by one column, and by a vector: sums that fuse, or the transposed product."""

    def f(a: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        column, row = v.relu()[..., None], v.relu()[..., None, :]
        results = [(a @ column).add(1), row @ a.mT, a @ column * 2, (a @ column).sum(-2)]
        if not batch:
            results += [a @ v, torch.addmv(a[:, 0].clone() if a.shape[1] else v.new_ones(a.shape[0]), a, v, alpha=2)]
            results += [torch.addr(a, results[-1], v, beta=2), torch.addmm(v, results[-1][:, None], row)]
        return tuple(results)

    for m, k in MATRICES:
        a = torch.randn(*batch, k, m).mul(3).to(dtype).mT if transpose else torch.randn(*batch, m, k).mul(3).to(dtype)
        v = torch.randn(*batch, k).mul(3).to(dtype)
        rtol, atol = (1e-4, 1e-3) if dtype == torch.float32 else (0.03, 2) if dtype == torch.bfloat16 else (1e-9, 1e-9)
        for got, want in zip(kiln.compile(f)(a, v), f(a, v), strict=True):
            assert_same(got, want, rtol=rtol, atol=atol)


def test_gradients_of_columns() -> None:
    def f(a: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (a.tanh() @ v.sin()).sigmoid()

    for a, v in ((torch.randn(30, 20), torch.randn(20)), (torch.randn(5, 40, 33), torch.randn(5, 33, 1))):
        results = []
        for g in (f, kiln.compile(f)):
            x, y = a.clone().requires_grad_(), v.clone().requires_grad_()
            g(x, y).square().sum().backward()
            results.append((x.grad, y.grad))
        for want, got in zip(*results, strict=True):
            assert_same(got, want, rtol=1e-4, atol=1e-5)


def test_expanded_and_strided_operands() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        row = torch.ones(1, 1).expand(2, w.shape[0])
        return x[:, ::2] @ w, x.t()[::2].t()[:2] @ w, row @ w, x[:1, :32] @ w[:32, ::3]

    args = torch.randn(3, 128), torch.randn(64, 100)
    for got, want in zip(kiln.compile(f)(*args), f(*args), strict=True):
        assert_same(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(64, 64, 1024), (10, 128, 700), (128, 33, 2500), (300, 140, 600), (8, 5, 4000)])
def test_gradients_of_weights(sizes: tuple[int, int, int], threads: int) -> None:
    """A long sum with few results is cut along the sum; the parts are added up in one order, whoever computes them."""
    m, n, k = sizes
    g, x = torch.randn(k, m), torch.randn(k, n)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        compiled = kiln.compile(lambda g, x: g.t() @ x)
        first = compiled(g, x)
        assert_same(first, (g.double().t() @ x.double()).float(), rtol=1e-4, atol=1e-3)
        assert all(torch.equal(compiled(g, x), first) for _ in range(5))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("sizes", [(16, 8), (64, 48), (100, 37), (515, 257)], ids=str)
def test_half_types(sizes: tuple[int, int], rows: int, dtype: torch.dtype) -> None:
    """Sums in float32, rounded once: as near to the exact product as one rounding allows."""
    torch.manual_seed(0)
    inner, columns = sizes
    x, w, bias = (
        torch.randn(rows, inner).to(dtype),
        torch.randn(columns, inner).to(dtype),
        torch.randn(columns).to(dtype),
    )
    with kiln.config.patch(disable_passes="plan.measure_products"):
        f = kiln.compile(lambda x: (torch.nn.functional.linear(x, w, bias), x @ w.t()))
        explanation = kiln.explain(lambda x: x @ w.t())(x)
        with_bias, without = f(x)
    assert "matmul half rows" in explanation.entries[0].artifact
    exact = x.double() @ w.double().t()
    for found, expected in ((with_bias, exact + bias.double()), (without, exact)):
        assert found.dtype == dtype and found.is_contiguous()
        torch.testing.assert_close(found.double(), expected, rtol=torch.finfo(dtype).eps, atol=2e-3)


def test_half_types_at_their_limits() -> None:
    x = torch.zeros(4, 16, dtype=torch.float16)
    x[0, :3] = torch.tensor([torch.inf, 1, 2])
    x[1, 0] = torch.nan
    x[2], x[3] = 6e-8, 65504.0
    for dtype in (torch.float16, torch.bfloat16):
        w = torch.eye(16).to(dtype)
        with kiln.config.patch(disable_passes="plan.measure_products"):
            found = kiln.compile(torch.nn.functional.linear)(x.to(dtype), w)
        torch.testing.assert_close(found, torch.nn.functional.linear(x.to(dtype), w), rtol=0, atol=0, equal_nan=True)
