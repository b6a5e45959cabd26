"""Versions, layouts and views of tensors that compiled code writes to or passes on."""

import pytest
import torch

import kiln
from helpers import check
from kiln.testing import assert_same

X = torch.arange(1.0, 10.0).reshape(3, 3)


def with_gaps():
    return torch.arange(36.0).reshape(6, 6)[::2, ::2]


def test_every_written_input_has_a_new_version():
    def f(a, b, c):
        a.transpose(0, 1).mul_(3)
        b.relu_()
        c.copy_(b)
        return a + 1

    compiled = kiln.compile(f)
    for _ in range(2):
        tensors = [X.clone(), with_gaps(), X.clone()]
        compiled(*tensors)
        assert [t._version > 0 for t in tensors] == [True] * 3


def test_a_backward_of_what_was_overwritten_is_an_error():
    def f(a, b):
        a.mul_(2)
        b.zero_()
        return a + b

    weight, a, b = X.clone().requires_grad_(), X.clone(), X.clone()
    losses = [(weight * a).sum(), (weight * b).sum()]
    kiln.compile(f)(a, b)
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize(
    "alias",
    [
        lambda a: a.reshape(-1),
        lambda a: a.contiguous().view(-1),
        lambda a: a.flatten(),
        lambda a: a.t().reshape(-1),
        lambda a: a.reshape(3, 3, 1).squeeze(-1).reshape(-1),
        lambda a: a.to(torch.float32).reshape(-1),
        lambda a: a[0].reshape(-1),
        lambda a: a.ravel(),
    ],
)
@pytest.mark.parametrize("make", [with_gaps, lambda: with_gaps().t(), lambda: X, X.t])
@pytest.mark.parametrize("write", [lambda a: a.sub_(a.mean()), lambda a: a.relu_(), lambda a: a.copy_(X * 2)])
def test_views_of_a_written_tensor_are_where_eager_has_them(alias, make, write):
    def f(a):
        write(a)
        part = alias(a)
        part[0] = 77
        return a + 0, part

    left, right = [torch.as_strided(torch.arange(50.0), a.shape, a.stride()) for a in (make(), make())]
    expected, actual = f(left), kiln.compile(f)(right)
    assert_same(expected, actual)
    assert_same(left, right)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.sum().flip(0),
        lambda x: x.sum().flip(-1) * 2,
        lambda x: x.sum().flip(()),
        lambda x: x.sum().roll(1),
        lambda x: x.sum().roll(1, 0),
        lambda x: x.sum().argmax(0),
        lambda x: x.sum().cumsum(-1),
        lambda x: x.sum().softmax(0),
    ],
)
def test_dims_of_numbers(f):
    check(f, X)
    check(f, X.clone().requires_grad_())


@pytest.mark.parametrize("leaf", [True, False])
def test_views_that_were_made_without_gradients(leaf):
    """They require gradients, and have no history: what is computed of them does not reach their base."""

    def f(a):
        b = a * 2
        with torch.no_grad():
            return a[::2], b.view(-1), b, a.detach()[0]

    def run(function):
        source = X.clone().requires_grad_()
        a = source if leaf else source * 1
        views = function(a)
        sum((v * 3).sum() for v in views).backward()
        return [(v.requires_grad, v.is_leaf, v._is_view()) for v in views], source.grad, [v.grad for v in views[:2]]

    assert_same(run(f), run(kiln.compile(f)))
