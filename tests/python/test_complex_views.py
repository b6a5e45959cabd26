"""Complex numbers seen as pairs of real ones, and numbers seen as those of another type: views of one memory, of which
the caller gets its own."""

import pytest
import torch

import kiln
from helpers import check
from kiln.testing import assert_same

X, Y = torch.linspace(-1, 1, 48).reshape(6, 4, 2), torch.linspace(2, -1, 48).reshape(6, 4, 2)
pairs, numbers = torch.view_as_real, torch.view_as_complex


def product_and_its_parts(x, y):
    z = numbers(x) * numbers(y)
    return z, pairs(z)


def two_views_of_a_result(x, y):
    z = numbers(x) * numbers(y)
    return pairs(z), pairs(z)[0], z.real, z.imag


def argument_changes_after_the_view(x, y):
    z = numbers(x)
    w = z * 2
    x.add_(1)
    return w, pairs(z), pairs(w) + pairs(z)


def argument_becomes_the_result(x, y):
    z = numbers(x + y)
    x.copy_(pairs(z * 1j))
    return pairs(z) * 2, z + 1


def view_of_a_view_of_the_argument(x, y):
    return pairs(numbers(x)), x * 2


def conjugates(x, y):
    z = numbers(x.relu())
    return pairs(z.conj().resolve_conj()).view(torch.int32) + 1, z.abs()


def view_that_is_written(x, y):
    z = numbers(x) * numbers(y)
    q = pairs(z)
    q.mul_(2)
    return z, q


def bits(x, y):
    z = x * 2
    return z.view(torch.int32), z.view(torch.int32) + 1, (z + 1).view(torch.int32)


def rotary_embedding(x, y):
    turned = numbers(x) * torch.polar(torch.ones(4), torch.arange(4.0) * 0.1)
    return pairs(turned).flatten(1)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        product_and_its_parts,
        two_views_of_a_result,
        argument_changes_after_the_view,
        argument_becomes_the_result,
        view_of_a_view_of_the_argument,
        conjugates,
        view_that_is_written,
        bits,
        rotary_embedding,
    ],
)
def test_aliasing(function, grad):
    check(function, X, Y, calls=3, grad=grad)


@pytest.mark.parametrize(
    "f",
    [
        lambda z: (z * 2).conj(),
        lambda z: (z * 2).mH,
        lambda z: ((z * 2).conj(), z * 2),
        lambda z: (z * 2).conj()[0],
        lambda z: (z * 2).conj().imag,
        lambda z: (z.imag * 2)._neg_view(),
        lambda z: torch.tensor([1 + 2j]).conj() + 0 * z[0, 0] if z.requires_grad else torch.tensor([1 + 2j]).conj(),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_lazy_conjugates_stay_lazy(f, grad):
    def bits(f):
        z = torch.complex(torch.arange(6.0), torch.ones(6)).reshape(3, 2).requires_grad_(grad)
        results = f(z)
        results = results if isinstance(results, tuple) else (results,)
        return [(r.is_conj(), r.is_neg(), r.requires_grad, r.resolve_conj().resolve_neg().detach()) for r in results]

    assert_same(bits(kiln.compile(f)), bits(f))


def test_a_lazy_conjugate_is_no_array():
    def f(z):
        return (z * 2).conj().numpy()

    z = torch.ones(2, dtype=torch.complex64)
    for function in (f, kiln.compile(f), kiln.compile(lambda z: (z * 2).conj().view(torch.float32))):
        with pytest.raises(RuntimeError, match="conj"):
            function(z)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.complex64])
def test_complex_numbers_of_half_precision(dtype):
    def f(t):
        product = torch.ones((), dtype=torch.complex32) * t
        return product.dtype, product.to(torch.complex64)

    t = torch.ones(3, dtype=dtype)
    assert_same(kiln.compile(f)(t), f(t))


def low_frequencies(x, w):
    f = torch.fft.rfft2(x)
    out = torch.zeros_like(f)
    out[:, :, :3, :4] = torch.einsum("bixy,ioxy->boxy", f[:, :, :3, :4], w)
    return torch.fft.irfft2(out, s=x.shape[-2:]), f[0].transpose(0, 1), f.copy_(out.conj())


def windows(z):
    first, *rest = z.unbind(0)
    return first.t() * 2, torch.stack(rest)[:, ::2].abs(), z.permute(2, 0, 1)[1:, :, :1].expand(-1, -1, 3) + z[0, 0, 0]


def test_views_between_calls():
    """They are windows on the memory of the complex numbers, which ATen reads."""
    check(
        low_frequencies, torch.randn(2, 3, 8, 8), torch.randn(3, 3, 3, 4, dtype=torch.complex64), rtol=1e-4, atol=1e-4
    )
    check(windows, torch.randn(3, 4, 5, dtype=torch.complex64))
    check(lambda x: torch.stft(x, 64, 16, window=torch.hann_window(64), return_complex=True).abs(), torch.randn(2, 400))
    check(lambda z: (z.view(-1)[3:9].view(2, 3), z.mul_(2)), torch.randn(3, 4, dtype=torch.complex128))
    check(
        lambda z, y: (z[1].copy_(y), z[1:].add_(y[0]), z), torch.randn(3, 4, dtype=torch.complex64), torch.randn(4) * 1j
    )


def test_as_strided_of_a_value_that_is_computed():
    check(lambda x: (x * 2).as_strided((3, 4), (2, 3)), torch.randn(4, 5))
    check(lambda n: torch.arange(40).as_strided((n.shape[0], 7), (3, 1), 2) * 2, torch.zeros(5))
