"""Products of float32 matrices as sums of products of bfloat16, on processors with a unit for these."""

import pathlib

import pytest
import torch
from torch import nn

import kiln


def has_unit():
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    return cpuinfo.exists() and {"amx_tile", "amx_bf16", "avx512bw"} <= set(cpuinfo.read_text().split())


needs_unit = pytest.mark.skipif(not has_unit(), reason="the processor has no unit that multiplies bfloat16")


def distance(a, exact):
    return ((a.double() - exact).abs().max() / exact.abs().max()).item()


@pytest.fixture
def always_ours():
    with kiln.config.patch(disable_passes="plan.measure_products"):
        yield


def linear(x, w, bias):
    return torch.nn.functional.linear(x, w, bias)


PRODUCTS = {
    "mm": (lambda a, b: a @ b, (200, 300), (300, 180)),
    "left transposed": (lambda a, b: a.t() @ b, (300, 200), (300, 180)),
    "right transposed": (lambda a, b: a @ b.t(), (200, 300), (180, 300)),
    "sliced": (lambda a, b: a[:, 3:303] @ b[:, :170], (200, 310), (300, 180)),
    "every other": (lambda a, b: a[:, ::2] @ b[::2, ::2], (200, 600), (600, 360)),
    "expanded": (lambda a, b: a[:1].expand(200, 300) @ b, (4, 300), (300, 180)),
    "batches": (lambda a, b: a @ b, (9, 140, 150), (9, 150, 160)),
    "linear": (linear, (4, 100, 300), (180, 300), (180,)),
    "epilogue": (lambda a, b, c: torch.nn.functional.gelu(a @ b + c), (200, 300), (300, 180), (180,)),
    "long": (lambda a, b: a @ b, (100, 5000), (5000, 120)),
    "wide": (lambda a, b: a @ b, (100, 200), (200, 12000)),
}


@needs_unit
@pytest.mark.parametrize("name", PRODUCTS)
def test_as_exact_as_eager(name, always_ours):
    torch.manual_seed(0)
    fn, *shapes = PRODUCTS[name]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]

    def results(fn, inputs):
        y = fn(*inputs)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), inputs)]

    got = results(kiln.compile(fn, fullgraph=True), inputs)
    kiln.reset()
    with kiln.config.patch(disable_passes="plan.measure_products,plan.split_products"):
        plain = results(kiln.compile(fn, fullgraph=True), inputs)
    exact = results(fn, [x.detach().double().requires_grad_() for x in inputs])
    assert not all(map(torch.equal, got, plain))  # the switch switches
    for g, e, p, x in zip(got, results(fn, inputs), plain, exact, strict=True):
        assert g.stride() == e.stride()
        assert distance(g, x) < 2 * max(distance(e, x), distance(p, x), 1e-7)


@needs_unit
@pytest.mark.parametrize("special", [float("inf"), float("-inf"), float("nan"), 3e38, 1e-42])
def test_numbers_that_do_not_split(special, always_ours):
    torch.manual_seed(0)
    a, b = torch.randn(150, 200), torch.randn(200, 170)
    a[7, 11] = special
    for x, y in ((a, b), (b.t(), a.t())):
        got, exact = kiln.compile(torch.mm)(x, y), x.double() @ y.double()
        want = exact.float()  # overflows where float32 does
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4, equal_nan=True)


@needs_unit
@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e-12, 1e18, 1e35])
def test_numbers_of_another_scale(scale, always_ours):
    torch.manual_seed(0)
    a, b = torch.randn(150, 200) * scale, torch.randn(200, 170)
    exact = a.double() @ b.double()
    for got in (kiln.compile(torch.mm)(a, b), kiln.compile(torch.mm)(b.t(), a.t()).t()):
        assert distance(got, exact) < 1e-6


@needs_unit
@pytest.mark.parametrize("frozen", [False, True])
def test_pointwise_convolutions(frozen, always_ours):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(90, 130, 1), nn.ReLU(), nn.Conv2d(130, 100, 1, bias=False))
    module = module.to(memory_format=torch.channels_last)
    x = torch.randn(3, 90, 19, 17).to(memory_format=torch.channels_last)
    compiled = kiln.compile(module)
    exact = nn.Sequential(nn.Conv2d(90, 130, 1), nn.ReLU(), nn.Conv2d(130, 100, 1, bias=False)).double()
    exact.load_state_dict(module.state_dict())
    if frozen:
        with torch.no_grad():
            for _ in range(2):
                assert distance(compiled(x), exact(x.double())) < 1e-6
        return
    for m in (compiled, exact):
        m(x.to(next(m.parameters()).dtype)).square().sum().backward()
    for got, want in zip(module.parameters(), exact.parameters(), strict=True):
        assert distance(got.grad, want.grad) < 1e-6
