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
