"""Complex numbers seen as pairs of real ones, and numbers seen as those of another type: views of one memory, of which
the caller gets its own."""

import pytest
import torch

from helpers import check

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
