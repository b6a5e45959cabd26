"""Leaves that the function makes itself: as results, and behind a graph break."""

import pytest
import torch

import kiln

MAKERS = {
    "detach": lambda x: x.detach().requires_grad_(),
    "detached part": lambda x: x[1:].detach().requires_grad_(),
    "clone": lambda x: x.detach().clone().requires_grad_(),
    "view": lambda x: x.view(-1).requires_grad_(),
    "part": lambda x: x[1:].requires_grad_(),
    "attribute": lambda x: setattr(z := x.detach(), "requires_grad", True) or z,
    "factory": lambda x: torch.zeros(3, requires_grad=True),
    "number": lambda x: torch.tensor([1.0, 2.0], requires_grad=True),
    "parameter": lambda x: torch.nn.Parameter(x.detach() * 2),
    "view of a leaf": lambda x: x.detach().clone().requires_grad_().view(-1),
    "detached result": lambda x: (x * 2).detach().requires_grad_(),
}


def state(t):
    return t.requires_grad, t.is_leaf, type(t), t._is_view(), t._base is None


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("maker", MAKERS)
def test_results(maker, needs_grad):
    make = MAKERS[maker]

    def after_a_break(x):
        z = make(x)
        kiln.graph_break()
        return z

    for f in (make, after_a_break):
        x = torch.randn(4, 6, requires_grad=needs_grad)
        expected, result = f(x), kiln.compile(f)(x)
        assert state(result) == state(expected)
        torch.testing.assert_close(result, expected)
        assert (result.data_ptr() == x.data_ptr()) == (expected.data_ptr() == x.data_ptr())


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("maker", ["detach", "detached part", "clone", "attribute", "parameter", "detached result"])
def test_gradients_behind_a_break(maker, needs_grad):
    make = MAKERS[maker]

    def f(x):
        z = make(x)
        kiln.graph_break()
        (z * 3).sin().sum().backward()
        return z.grad

    x = torch.randn(4, 6, requires_grad=needs_grad)
    torch.testing.assert_close(kiln.compile(f)(x), f(x))
    assert x.grad is None


def beside_its_tensor(x):
    y = x * 2
    return y, y.detach().requires_grad_()


def before_its_tensor(x):
    y = x * 2
    z = y.detach().requires_grad_()
    return z, y[1:], y


def two_of_a_tensor(x):
    y = x * 2
    return y.detach().requires_grad_(), y.detach(), y.detach().requires_grad_(), y


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("function", [beside_its_tensor, before_its_tensor, two_of_a_tensor])
def test_leaves_that_share_memory_with_other_results(function, needs_grad):
    x = torch.randn(4, 6, requires_grad=needs_grad)
    expected, results = function(x), kiln.compile(function)(x)
    places = [(t.requires_grad, t.is_leaf, t.storage_offset()) for t in results]
    assert places == [(t.requires_grad, t.is_leaf, t.storage_offset()) for t in expected]
    assert len({t.untyped_storage().data_ptr() for t in results}) == 1


def test_an_operator_that_needs_data_in_between():
    def f(x):
        z = x.detach().requires_grad_()
        z.quantile(0.5, dim=1).sum().backward()  # compares with the ranks that it computed
        return z.grad

    x = torch.randn(4, 7)
    torch.testing.assert_close(kiln.compile(f)(x), f(x))
