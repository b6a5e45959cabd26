"""Writes of .data of tensors that existed before the call: targets that follow another network, parameters that are
replaced. The tensor gets other memory; who holds the old one keeps what was there."""

import copy

import pytest
import torch
from torch import nn

import kiln
from kiln.testing import assert_same

X = torch.linspace(-1, 1, 3)


def run(make, compile):
    torch.manual_seed(0)
    step, tensors = make()
    step = compile(step)
    seen = []
    for n in range(3):
        before = [t.data for t in tensors]
        result = step(X + n)
        seen.append(
            (result, [t.detach().clone() for t in tensors], [t.grad for t in tensors], [b.clone() for b in before])
        )
        seen.append([[a.data_ptr() == b.data_ptr() for a in tensors] for b in (*tensors, *before)])
    return seen


def followed():
    q = nn.Linear(3, 3)
    k = copy.deepcopy(q).requires_grad_(False)
    optimizer = torch.optim.SGD(q.parameters(), 0.1)

    def step(x):
        loss = (q(x) - k(x)).pow(2).mean() + q(x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for a, b in zip(q.parameters(), k.parameters()):
            b.data = b.data * 0.9 + a.data * 0.1
        return loss.detach()

    return step, [*q.parameters(), *k.parameters()]


def written_in_place_afterwards():
    p = nn.Parameter(torch.ones(3), requires_grad=False)

    def step(x):
        old = p.data
        p.data = x * 2
        p.mul_(3)
        return old + p

    return step, [p]


def shared_with_a_result():
    p = torch.ones(3)

    def step(x):
        y = x * 2
        p.data = y
        y.add_(1)
        return p + 0

    return step, [p]


def given_an_argument():
    p = torch.ones(3)

    def step(x):
        p.data = x
        return p * 2

    return step, [p]


def many_times():
    p = torch.ones(3)

    def step(x):
        for _ in range(3):
            p.data = p.data * 2 + x
        return p.sum()

    return step, [p]


def exchanged():
    a, b = torch.ones(3), torch.zeros(3)

    def step(x):
        t = a.data
        a.data = b.data
        b.data = t
        return a + x, b + x

    return step, [a, b]


def steps_by_hand():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def step(x):
        loss = net(x).pow(2).sum()
        loss.backward()
        for p in net.parameters():
            p.data = p.data - 0.1 * p.grad.data
            p.grad.data.zero_()
        return loss.detach(), sum(p.data.abs().sum() for p in net.parameters())

    return step, list(net.parameters())


def clipped_and_forgotten():
    p = nn.Parameter(torch.ones(3))

    def step(x):
        y = (p * p * x).sum()
        y.backward()
        p.data = (p.data - p.grad).clamp(-0.5, 0.5)
        p.data = p.data * 2
        p.grad = None
        with torch.no_grad():
            return y, p * x

    return step, [p]


WHOLE = [
    steps_by_hand,
    clipped_and_forgotten,
    followed,
    written_in_place_afterwards,
    shared_with_a_result,
    given_an_argument,
    many_times,
    exchanged,
]


def kept_for_the_backward():
    p, w = torch.ones(3), nn.Parameter(torch.ones(3))

    def step(x):
        y = (p * w).sum()
        p.data = x * 5
        y.backward()
        return y.detach()

    return step, [p, w]


def with_gradients():
    p = nn.Parameter(torch.ones(3))

    def step(x):
        (p * x).sum().backward()
        p.data = p.data - 0.1 * p.grad
        return (p * x).sum()

    return step, [p]


def saved_for_another_backward():
    p = nn.Parameter(torch.ones(3))

    def step(x):
        first, second = (p * p * x).sum(), (p * p).sum()
        first.backward()
        p.data = p.data + 1
        second.backward()
        return first.detach(), second.detach()

    return step, [p]


def kept_by_retain_graph():
    p = nn.Parameter(torch.ones(3))

    def step(x):
        y = (p * p * x).sum()
        y.backward(retain_graph=True)
        p.data = p.data + 1
        y.backward()
        return y.detach()

    return step, [p]


def used_again_with_gradients():
    p = nn.Parameter(torch.ones(3))

    def step(x):
        for _ in range(2):
            (p * p * x).sum().backward()
            p.data = p.data - 0.1 * p.grad
            p.grad = None
        y = p.detach() * 2
        return y, p.clone()

    return step, [p]


def needs_gradients_afterwards():
    p = nn.Parameter(torch.ones(3), requires_grad=False)

    def step(x):
        p.data = x + 1
        y = p * x
        p.requires_grad_(True)
        z = (p * x).sum()
        z.backward()
        p.requires_grad_(False)
        return y, z.detach()

    return step, [p]


def of_another_shape_or_dtype():
    p = torch.ones(3)

    def step(x):
        p.data = x[:2] if p.numel() == 3 else x.double()
        return p * 2

    return step, [p]


BREAKING = [kept_for_the_backward, with_gradients, saved_for_another_backward, kept_by_retain_graph]
BREAKING += [used_again_with_gradients, needs_gradients_afterwards, of_another_shape_or_dtype]


@pytest.mark.parametrize("make", [*WHOLE, *BREAKING], ids=lambda f: f.__name__)
def test_as_in_eager(make):
    assert_same(run(make, lambda f: f), run(make, kiln.compile), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", WHOLE, ids=lambda f: f.__name__)
def test_in_one_graph(make):
    kiln.reset()
    step, _ = make()
    assert kiln.explain(step)(X.clone()).graph_break_count == 0
