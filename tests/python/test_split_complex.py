"""Complex numbers in kernels: arithmetic on them is done with their real and imaginary parts."""

import math

import pytest
import torch

import kiln
from helpers import check
from kiln.testing import assert_same

R = torch.randn


def arithmetic(z, w, x):
    return z + w, z - w, z * w, z / w, -z, torch.add(z, w, alpha=2), torch.sub(z, w, alpha=0.5), 1 - z, z / 2, 3 / z


def with_real_numbers(z, w, x):
    return z * x, x * z, z + x, x - z, z / (x + 3), x / w, (z * 2.5 + 1j) * (1 - 2j), z * x.double().mean()


def functions(z, w, x):
    return z.abs(), z.angle(), z.sgn(), z.exp(), z.reciprocal(), z**2, z.square(), torch.polar(x.abs(), x), z.conj() * w


def parts(z, w, x):
    both = torch.view_as_real(z * w)
    return both, both[..., 0] * 2, (z * w).real + 1, (z + w).imag.exp(), torch.complex(x, z.real).conj().imag


def comparisons(z, w, x):
    return z == w, z != z, (z * w).isnan(), z.isfinite(), torch.where(x > 0, z, w), z.masked_fill(x > 0, 2 + 1j), z == 1


def reductions(z, w, x):
    return (
        z.sum(),
        (z * w).sum(0),
        z.mean(),
        (z - w).mean(-1, keepdim=True),
        z.cumsum(1),
        torch.einsum("ij,ij->i", z, w),
    )


def moved(z, w, x):
    y = z * w
    return (
        y.t() + 1,
        y.flatten()[::2] * 2,
        y[1:, :3].reshape(-1),
        torch.cat([y, z], 1) * 1j,
        torch.stack([y, w], -1),
        torch.nn.functional.pad(y, (1, 2), value=1.0),
        y.flip(0).roll(1, 1),
        y.unsqueeze(0).expand(2, -1, -1) * x,
        y.tril() + y.diagonal()[0],
        y.repeat(2, 1),
        y.unfold(1, 2, 1) * 2,
        [part + 1 for part in y.split(2, 1)],
        torch.cat([x, y], 0),
    )


def indexed(z, w, x):
    i = torch.tensor([2, 0, 1])
    y = z + w
    out = torch.zeros_like(y)
    out[:, 1:3] = w[:, :2] * 2
    out[0] = 1j
    return (
        y[i],
        y.index_select(1, i),
        out,
        y.clone().index_put_((i,), w[:3]),
        out.index_add(0, i, z[:3]),
        y.gather(1, i[:, None]),
    )


def made(z, w, x):
    dtype = z.dtype
    return (
        torch.zeros(5, 6, dtype=dtype) + z,
        torch.ones_like(z) * w,
        torch.full((2, 3), 1 + 2j, dtype=dtype) * 2,
        x.to(dtype) * 1j,
        z.to(torch.complex128) * w,
        torch.tensor(2 - 1j) * z,
    )


def products(z, w, x):
    a, b = z[:, :4] * 1j, w[:4]
    linear = torch.nn.functional.linear
    return (
        a @ b, z @ w.t(), z.t() @ w, z.conj() @ w.t(), torch.einsum("ij,kj->ik", z, w.conj()), linear(z, w, w[0, :5]),
        torch.bmm(torch.stack([z, w]), torch.stack([w.t(), z.mH])), torch.einsum("bi,ij,bj->b", a, w[:4, :4], z[:, 2:]),
        (z @ w.mT).real, torch.addmm(z[:, :5], z, w.t()), torch.matmul(z.expand(3, 5, 6), w.t()), z @ torch.zeros(6, 0, dtype=z.dtype),
        z @ w[0],
    )  # fmt: skip


def libraries(z, w, x):
    f = torch.fft.fft(z * w)
    g = (f.conj() * f.abs()) @ w.t()
    return g * 2, torch.fft.irfft(torch.fft.rfft(x) * (1 + 2j)), (f.t() * 2) @ z, torch.linalg.norm(f - z)


def written(z, w, x):
    z = z * 1
    z[1] *= w[1]
    z.real.add_(1)
    z.imag[0] = x[0]
    z.mul_(2j)
    return z, z.clone().copy_(x), z.t().conj().resolve_conj()


CASES = [
    arithmetic, with_real_numbers, functions, parts, comparisons, reductions, moved, indexed, made, products, libraries, written,
]  # fmt: skip


def operands(dtype, layout):
    real = torch.float32 if dtype == torch.complex64 else torch.float64
    z, w, x = R(5, 6, dtype=dtype), R(5, 6, dtype=dtype), R(5, 6, dtype=real)
    if layout == "transposed":
        z, x = z.t().contiguous().t(), x.t().contiguous().t()
    elif layout == "sliced":
        z, w = R(5, 14, dtype=dtype)[:, 1:13:2], R(6, 6, dtype=dtype)[1:]
    elif layout == "conjugate":
        z = z.conj()
    return z, w, x


@pytest.mark.parametrize("layout", ["dense", "transposed", "sliced"])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("function", CASES)
def test_is_as_in_eager(function, dtype, layout):
    tolerance = 1e-4 if dtype == torch.complex64 else 1e-9
    for grad in (False, True):
        check(function, *operands(dtype, layout), rtol=tolerance, atol=tolerance, grad=grad)


@pytest.mark.parametrize("function", CASES)
def test_sizes_that_fill_no_vector(function):
    z, w, x = R(37, 41, dtype=torch.complex64), R(37, 41, dtype=torch.complex64), R(37, 41)
    if function is indexed:
        z, w, x = z[:, :6], w[:, :6], x[:, :6]
    if function in (libraries, products):
        z, w, x = z[:36, :36].contiguous(), w[:36, :36].contiguous(), x[:36, :36].contiguous()
    check(function, z, w, x, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("function", CASES)
@pytest.mark.parametrize("options", [{"codegen": False}, {"disable_passes": "joint.split_complex"}], ids=str)
def test_without_kernels_or_the_pass(function, options):
    with kiln.config.patch(**options):
        check(function, *operands(torch.complex64, "transposed"), rtol=1e-4, atol=1e-4)


def written_argument(z, w, x):
    z.mul_(w)
    w[1:3] += 1j
    torch.view_as_real(z)[0].zero_()
    return z * 2


def written_transposed(z, w, x):
    z.t().add_(1j)
    w.real.mul_(x)


@pytest.mark.parametrize("layout", ["dense", "transposed", "sliced", "conjugate"])
@pytest.mark.parametrize("function", [written_argument, written_transposed])
def test_arguments_that_are_written(function, layout):
    check(function, *operands(torch.complex64, layout), grad=False, rtol=1e-5, atol=1e-5)


def test_infinities_and_zeros_are_those_of_eager():
    values = [0.0, -0.0, 1.0, -2.5, math.inf, -math.inf, math.nan]
    z = torch.tensor([complex(a, b) for a in values for b in values for _ in values for _ in values])
    w = torch.tensor([complex(a, b) for _ in values for _ in values for a in values for b in values])
    x = w.real.contiguous()
    cases = [
        lambda: z + w, lambda: z - w, lambda: z * w, lambda: torch.add(z, w, alpha=2), lambda: 1 - z, lambda: z * 2,
        lambda: z * x, lambda: x + z, lambda: z / 2, lambda: z / w, lambda: z / x, lambda: z / 0, lambda: z.reciprocal(),
        lambda: 1 / z, lambda: -z, lambda: z.conj() * 1, lambda: z * (1 + 0j), lambda: z + 0j, lambda: z == w,
        lambda: z != w, lambda: z.isnan(), lambda: z.abs(), lambda: z.sgn(), lambda: z**2, lambda: z - 1j, lambda: z / 1j,
    ]  # fmt: skip
    for i, case in enumerate(cases):
        expected, actual = case(), kiln.compile(case, fullgraph=True)()
        assert_same(actual, expected, rtol=1e-6, atol=1e-7)
        if expected.is_complex():
            expected, actual = torch.view_as_real(expected.resolve_conj()), torch.view_as_real(actual.resolve_conj())
        if expected.dtype != torch.bool:
            number = (expected == 0) | (expected.abs() > 1e-6)
            assert torch.equal(torch.signbit(actual)[number], torch.signbit(expected)[number]), i
    large = torch.tensor([100.0, -100.0, -math.inf, 3.0]).to(torch.complex64)
    assert_same(kiln.compile(torch.exp)(large), torch.exp(large))


def calls(capfd, function, *args):
    """The operators that run as ATen's calls."""
    kiln.reset()
    capfd.readouterr()
    kiln.set_logs("fallback")
    kiln.compile(function, fullgraph=True)(*args)
    kiln.set_logs("")
    return [line.split()[-2] for line in capfd.readouterr().err.splitlines() if "aten::" in line and "(" in line]


def rotary(q, k, table):
    def turn(t):
        pairs = torch.view_as_complex(t.float().reshape(*t.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * table).flatten(3).type_as(t)

    return turn(q), turn(k)


def test_no_calls_for_arithmetic(capfd):
    z, w, x = operands(torch.complex64, "dense")
    for function in (arithmetic, with_real_numbers, functions, parts, comparisons, made):
        assert calls(capfd, function, z, w, x) == [], function.__name__
    table = torch.polar(torch.ones(8, 4), R(8, 4))[None, :, None]
    q = R(2, 8, 3, 8)
    assert calls(capfd, rotary, q, q.clone(), table) == []
    check(rotary, q, R(2, 8, 3, 8), table)


def test_transforms_read_and_write_complex_memory(capfd):
    def spectral(x, w):
        f = torch.fft.rfft2(x)
        out = torch.zeros_like(f)
        out[..., :4, :4] = torch.einsum("bixy,ioxy->boxy", f[..., :4, :4], w)
        return torch.fft.irfft2(out * 2, s=x.shape[-2:])

    x, w = R(2, 3, 12, 12), R(3, 3, 4, 4, dtype=torch.complex64)
    check(spectral, x, w, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        assert {c for c in calls(capfd, spectral, x, w) if "fft" in c} == {"aten::_fft_r2c", "aten::_fft_c2r"}


def test_parameters_of_complex_numbers_train():
    class Filter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(R(6, 5, dtype=torch.complex64))

        def forward(self, x):
            return torch.fft.irfft(torch.fft.rfft(x, 8) * self.weight, 8).tanh()

    def losses(wrap):
        torch.manual_seed(0)
        module, x = Filter(), R(6, 8)
        optimizer = torch.optim.Adam(module.parameters(), lr=0.1)

        def step():
            optimizer.zero_grad()
            loss = (module(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = wrap(step)
        return torch.stack([step() for _ in range(8)]), module.weight.detach()

    assert_same(losses(kiln.compile), losses(lambda f: f), rtol=1e-4, atol=1e-5)
