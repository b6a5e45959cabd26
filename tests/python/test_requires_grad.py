"""Writes of .requires_grad of tensors that existed before the call: networks frozen for a part of a step, or for good."""

import pytest
import torch
from torch import nn

import kiln
from kiln.testing import assert_same

X = torch.linspace(-1, 1, 6).reshape(2, 3)


def set_all(module, flag):
    for p in module.parameters():
        p.requires_grad = flag


def adversarial(a, b):
    """A step of a GAN: the second network is frozen while the first one learns."""
    of_a, of_b = torch.optim.Adam(a.parameters(), 1e-2), torch.optim.Adam(b.parameters(), 1e-2)

    def step(x):
        fake = a(x)
        set_all(b, True)
        of_b.zero_grad()
        loss_b = (b(fake.detach()).tanh() - b(x).tanh()).pow(2).mean()
        loss_b.backward()
        of_b.step()
        set_all(b, False)
        of_a.zero_grad()
        loss_a = -b(fake).mean()
        loss_a.backward()
        of_a.step()
        return loss_a.detach(), loss_b.detach()

    return step


def frozen_inside(a, b):
    def step(x):
        a.requires_grad_(False)
        y = b(a(x)).sum()
        y.backward()
        a.requires_grad_(True)
        return y.detach()

    return step


def stays_frozen(a, b):
    return lambda x: b(a.requires_grad_(False)(x)).sum()


def frozen_behind_its_use(a, b):
    def step(x):
        y = a(x)
        a.weight.requires_grad = False
        z = a(y)
        flags = y.requires_grad, z.requires_grad, a.weight.requires_grad
        z.sum().backward()
        a.weight.requires_grad = True
        return z.detach(), flags

    return step


def two_results(a, b):
    def step(x):
        y = a(x).sum()
        a.weight.requires_grad_(False)
        z = a(x).tanh().sum()
        a.weight.requires_grad_(True)
        return y + z, z

    return step


def frozen_behind_a_result(a, b):
    def step(x):
        y = a(x).sum()
        set_all(a, False)
        return y

    return step


def input_for_a_while(a, b):
    def step(x):
        x.requires_grad_(True)
        (g,) = torch.autograd.grad(x.pow(2).sum(), x)
        x.requires_grad_(False)
        return g

    return step


def input_for_good(a, b):
    def step(x):
        x.requires_grad_(True)
        y = x.pow(2).sum()
        y.backward()
        return y.detach()

    return step


def not_a_leaf(a, b):
    def step(x):
        y = a(x)
        try:
            y.requires_grad = False
        except RuntimeError as error:
            return y + len(str(error))
        return y

    return step


def made_of_data(a, b):
    def step(x):
        loss = torch.tensor(0.0, requires_grad=True)
        weights = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        (g,) = torch.autograd.grad((x * weights).sum(), weights)
        return loss + a(x).sum(), loss * 2, weights.is_leaf, g

    return step


WHOLE = [adversarial, frozen_inside, stays_frozen, frozen_behind_its_use, two_results, frozen_behind_a_result]
WHOLE += [input_for_a_while, input_for_good, made_of_data]


def unfrozen_for_a_result(a, b):
    set_all(a, False)
    return lambda x: a.requires_grad_(True)(x).sum()


def compiled_step(make, compile):
    """A step over two networks, and their parameters."""
    torch.manual_seed(0)
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    return compile(make(a, b)), [*a.parameters(), *b.parameters()]


def run(make, compile):
    step, parameters = compiled_step(make, compile)
    seen = []
    for n in range(3):
        x = X + n
        results = step(x)
        for y in results if isinstance(results, tuple) else (results,):
            if isinstance(y, torch.Tensor) and y.requires_grad:
                y.sum().backward(retain_graph=True)
        tensors = [x, *parameters]
        seen.append((results, [(t.requires_grad, t.detach().clone(), t.grad) for t in tensors]))
    return seen


@pytest.mark.parametrize("make", [*WHOLE, unfrozen_for_a_result, not_a_leaf], ids=lambda f: f.__name__)
def test_as_in_eager(make):
    assert_same(run(make, lambda f: f), run(make, kiln.compile), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", WHOLE, ids=lambda f: f.__name__)
def test_in_one_graph(make):
    kiln.reset()
    assert kiln.explain(make(nn.Linear(3, 3), nn.Linear(3, 3)))(X.clone()).graph_break_count == 0


def kept_inside(a, b):
    def step(x):
        h = a(x)
        h.retain_grad()
        k = h.tanh()
        k.retain_grad()
        b(k).sum().backward()
        return h.grad, k.grad, (h.grad * h.detach()).sum()

    return step


def kept_of_a_leaf(a, b):
    def step(x):
        a.weight.retain_grad()
        a(x).sum().backward()
        return a.weight.grad.clone()

    return step


def kept_for_later(a, b):
    def step(x):
        h = a(x)
        h.retain_grad()
        return h, b(h).sum()

    return step


def kept_without_gradients(a, b):
    def step(x):
        try:
            x.retain_grad()
        except RuntimeError as error:
            return x + len(str(error))
        return x

    return step


def run_and_read(make, compile):
    step, parameters = compiled_step(make, compile)
    seen = []
    for n in range(3):
        results = step(X + n)
        if make is kept_for_later:
            h, y = results
            y.backward()
            results = h.grad, h.retains_grad, y
        seen.append((results, [p.grad for p in parameters]))
    return seen


@pytest.mark.parametrize("make", [kept_inside, kept_of_a_leaf, kept_for_later, kept_without_gradients])
def test_retained_gradients(make):
    assert_same(run_and_read(make, lambda f: f), run_and_read(make, kiln.compile), rtol=1e-5, atol=1e-6)
    if make in (kept_inside, kept_of_a_leaf):
        kiln.reset()
        assert kiln.explain(make(nn.Linear(3, 3), nn.Linear(3, 3)))(X.clone()).graph_break_count == 0


def cleared(p):
    p.grad = None
    return p * 2, p.grad is None


def cleared_and_shared(p, q):
    q.grad = None
    p.grad = q.grad
    return p * 2, p.grad is None, q.grad is None


def deleted(p):
    del p.grad
    return p * 2, p.grad


@pytest.mark.parametrize("function", [cleared, cleared_and_shared, deleted])
def test_a_gradient_that_is_cleared_and_read(function):
    """First without one, then with one: the first call tells nothing about the others."""
    compiled = kiln.compile(function)
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(function.__code__.co_argcount)]
    for grad in (None, torch.ones(2), torch.ones(2), None):
        for p in parameters:
            p.grad = None if grad is None else grad.clone()
        assert_same(compiled(*parameters)[1:], function(*parameters)[1:])
        for p in parameters:
            p.grad = None if grad is None else grad.clone()
        compiled(*parameters)[0].sum().backward()
        assert_same(parameters[0].grad, torch.full((2,), 2.0))
