"""Hooks on gradients in compiled code: what they see, change and leave behind is eager's, and a whole step stays one graph."""

import pytest
import torch

import kiln
from kiln.testing import difference


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def scaled(m, x, seen):
    h = m[0](x)
    h.register_hook(lambda g: g * 2)
    m[2](m[1](h)).pow(2).sum().backward()


def seen_only(m, x, seen):
    h = m[0](x)
    h.register_hook(seen.append)
    m[2](m[1](h)).pow(2).sum().backward()


def two_on_one(m, x, seen):
    h = m[1](m[0](x))
    h.register_hook(lambda g: g + 1)
    h.register_hook(lambda g: seen.append(g.mean()))
    h.register_hook(lambda g: g.clamp(-0.5, 0.5))
    m[2](h).pow(2).sum().backward()


def on_several(m, x, seen):
    a = m[0](x)
    b = m[1](a)
    a.register_hook(lambda g: seen.append(g * 1) or g / 2)
    b.register_hook(lambda g: seen.append(g * 1) or g.sign())
    (m[2](b).exp().mean() + a.sum()).backward()


def removed(m, x, seen):
    h = m[0](x)
    handle = h.register_hook(lambda g: g * 100)
    with h.register_hook(lambda g: g * 3):
        m[2](m[1](h)).sum().backward(retain_graph=True)
    handle.remove()
    m[2](m[1](h)).sum().backward()


def by_autograd_grad(m, x, seen):
    h = m[1](m[0](x))
    h.register_hook(lambda g: g * 5)
    seen += torch.autograd.grad(m[2](h).pow(2).sum(), [*m.parameters()])


def gradient_of_a_view(m, x, seen):
    h = m[0](x)
    h[1:].register_hook(lambda g: g * 7)
    part = h[:, 2:5]
    part.register_hook(lambda g: g - 1)
    (m[2](m[1](h)).sum() + part.pow(2).sum()).backward()


def written_before(m, x, seen):
    h = m[0](x) * 1
    h.register_hook(lambda g: seen.append(g * 1))
    h.mul_(2)
    h.register_hook(lambda g: g * 3)
    m[2](h).sum().backward()


def written_after(m, x, seen):
    h = m[0](x) * 1
    handle = h.register_hook(lambda g: seen.append(g * 1) or g * 2)
    h.mul_(2)
    m[2](h).sum().backward(retain_graph=True)
    handle.remove()
    m[2](h).sum().backward()


def second_derivatives(m, x, seen):
    h = m[1](m[0](x))
    h.register_hook(lambda g: g * g)
    grads = torch.autograd.grad(m[2](h).pow(2).sum(), [*m.parameters()][:2], create_graph=True)
    sum(g.pow(2).sum() for g in grads).backward()


def random(m, x, seen):
    h = m[1](m[0](x))
    h.register_hook(lambda g: g + torch.rand_like(g))
    m[2](h * torch.rand(8)).sum().backward()


def of_an_attribute(m, x, seen):
    class Keeper:
        def keep(self, g):
            self.gradient = g
            return None

    keeper = Keeper()
    h = m[1](m[0](x))
    h.register_hook(keeper.keep)
    m[2](h).pow(2).sum().backward()
    seen.append(keeper.gradient.abs().sum())


PROGRAMS = [scaled, seen_only, two_on_one, on_several, removed, by_autograd_grad, gradient_of_a_view, written_before, written_after,
            second_derivatives, random, of_an_attribute]  # fmt: skip


def results(program, compile=lambda f: f, prepare=lambda m: None, steps=2):
    m = model()
    prepare(m)
    step = compile(program)
    out = []
    torch.manual_seed(3)
    for _ in range(steps):
        seen = []
        m.zero_grad()
        step(m, torch.randn(5, 4), seen)
        out.append([[p.grad if p.grad is None else p.grad.clone() for p in m.parameters()], [s.detach() for s in seen]])
        with torch.no_grad():
            for p in m.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad
    return out


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_one_graph(program):
    actual = results(program, lambda f: kiln.compile(f, fullgraph=True))
    assert not difference(actual, results(program), 1e-5, 1e-6)


def loss_only(m, x, seen):
    m(x).pow(2).sum().backward()


def double(m):
    m[0].weight.register_hook(lambda g: g * 2)
    m[0].weight.register_hook(lambda g: g + 1)
    m[2].bias.register_hook(torch.neg)


def clip(m):
    for p in m.parameters():
        p.register_hook(lambda g: g.clamp(-0.1, 0.1))


@pytest.mark.parametrize("prepare", [double, clip], ids=lambda f: f.__name__)
def test_hooks_of_parameters(prepare):
    actual = results(loss_only, lambda f: kiln.compile(f, fullgraph=True), prepare)
    assert not difference(actual, results(loss_only, prepare=prepare), 1e-5, 1e-6)


def hooked_modules(m):
    m.kept = []
    m[1].register_full_backward_hook(lambda module, before, after: m.kept.append((before[0].sum(), after[0].sum())))
    m[2].register_full_backward_hook(lambda module, before, after: (before[0] * 3,))
    m[2].register_full_backward_pre_hook(lambda module, after: (after[0] + 1,))


def keeps(m, x, seen):
    m.kept.clear()
    m(x * 1).pow(2).sum().backward()
    for pair in m.kept:
        seen += pair


def test_hooks_of_modules():
    actual = results(keeps, lambda f: kiln.compile(f, fullgraph=True), hooked_modules)
    assert not difference(actual, results(keeps, prepare=hooked_modules), 1e-5, 1e-6)


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Bilinear(4, 4, 3)
        self.inner.register_full_backward_hook(lambda module, before, after: tuple(b * 2 for b in before))

    def forward(self, x):
        return self.inner(x * 2, x.exp())


def relu_in_place(x):
    m = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(inplace=True))
    m[0].register_full_backward_hook(lambda module, before, after: None)
    return m(x)


def test_module_hooks_that_break_the_graph():
    torch.manual_seed(0)
    m, x = Two(), torch.randn(5, 4)

    def step(x):
        x = x.clone().requires_grad_()
        m.zero_grad()
        m(x).pow(2).sum().backward()
        return x.grad, m.inner.weight.grad.clone()

    assert not difference(kiln.compile(step)(x), step(x), 1e-5, 1e-6)
    for f in (relu_in_place, kiln.compile(relu_in_place)):
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            f(x.clone().requires_grad_())


def test_hooks_of_parameters_that_change():
    m, x = model(), torch.randn(5, 4)

    def step(m, x):
        m.zero_grad()
        m(x).sum().backward()

    compiled = kiln.compile(step, fullgraph=True)

    def gradient(f):
        f(m, x)
        return m[0].weight.grad.clone()

    def check():
        assert not difference(gradient(compiled), gradient(step), 1e-5, 1e-6)

    check()
    first = m[0].weight.register_hook(lambda g: g * 2)
    check()
    second = m[0].weight.register_hook(lambda g: g + 3)
    check()
    first.remove()
    check()
    second.remove()
    check()


def raises(m, x, seen):
    def hook(g):
        seen.append(g.sum())
        raise ValueError("hook")

    h = m[0](x)
    h.register_hook(hook)
    try:
        m[2](m[1](h)).sum().backward()
    except ValueError as error:
        seen.append(torch.tensor(len(str(error))))


def looks_at_data(m, x, seen):
    h = m[0](x)
    h.register_hook(lambda g: g * 2 if g.sum() > 0 else g * 3)
    m[2](m[1](h)).sum().backward()


def of_a_leaf(m, x, seen):
    handle = m[0].weight.register_hook(lambda g: g * 2)
    m(x).sum().backward()
    handle.remove()


def after_accumulation(m, x, seen):
    m[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum()))
    m(x).sum().backward()


def reads_other_gradients(m, x, seen):
    h = m[0](x)
    h.register_hook(lambda g: seen.append(m[2].weight.grad.sum()))
    m[2](m[1](h)).sum().backward()


def runs_a_backward(m, x, seen):
    def hook(g):
        w = torch.ones(3, requires_grad=True)
        with torch.enable_grad():
            (w * 2).sum().backward()
        return g * w.grad.sum()

    h = m[0](x)
    h.register_hook(hook)
    m[2](m[1](h)).sum().backward()


def registers_a_hook(m, x, seen):
    a, b = m[0](x), m[0](x * 2)
    a.register_hook(lambda g: seen.append(b.register_hook(lambda g: g * 2)) if not seen else None)
    a.sum().backward(retain_graph=True)
    m[2](b).sum().backward()
    seen.clear()


@pytest.mark.parametrize(
    "program",
    [runs_a_backward, registers_a_hook, raises, looks_at_data, of_a_leaf, after_accumulation, reads_other_gradients],
    ids=lambda f: f.__name__,
)
def test_what_breaks_the_graph(program):
    assert not difference(results(program, kiln.compile), results(program), 1e-5, 1e-6)


def test_hooks_that_run_after_the_captured_part():
    def forward(m, x, seen):
        h = m[0](x)
        h.register_hook(lambda g: seen.append(g.sum()) or g * 2)
        return m[2](m[1](h)).sum()

    for keep in (False, True):

        def program(f):
            m, seen = model(), []
            x = torch.ones(5, 4)
            for _ in range(2):
                loss = f(m, x, seen)
                loss.backward(retain_graph=keep)
                if keep:
                    loss.backward()
            return [p.grad for p in m.parameters()], seen

        assert not difference(program(kiln.compile(forward)), program(forward), 1e-5, 1e-6)


def test_a_loss_that_is_returned():
    def step(m, x):
        h = m[0](x)
        h.register_hook(lambda g: g * 2)
        loss = m[2](m[1](h)).sum()
        loss.backward()
        return loss

    a, b = model(), model()
    x = torch.randn(5, 4)
    loss = kiln.compile(step, fullgraph=True)(a, x)
    assert not difference(loss.detach(), step(b, x).detach(), 1e-5, 1e-6)
    assert not difference([p.grad for p in a.parameters()], [p.grad for p in b.parameters()], 1e-5, 1e-6)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_backward_that_can_run_again_runs_the_hook_again():
    def step(m, x, seen):
        h = m[0](x)
        h.register_hook(lambda g: seen.append(g.sum()) or g * 2)
        loss = m[2](m[1](h)).sum()
        loss.backward(retain_graph=True)
        return loss

    def program(f):
        m, seen = model(), []
        f(m, torch.ones(5, 4), seen).backward()
        return [p.grad for p in m.parameters()], seen

    assert not difference(program(kiln.compile(step)), program(step), 1e-5, 1e-6)


def test_a_handle_that_outlives_the_captured_part():
    handles = []

    def step(m, x):
        h = m[0](x)
        handles.append(h.register_hook(lambda g: g * 2))
        m[2](m[1](h)).sum().backward()

    compiled = kiln.compile(step)
    a, b = model(), model()
    for _ in range(2):
        compiled(a, torch.ones(5, 4))
        step(b, torch.ones(5, 4))
        for handle in handles:
            assert isinstance(handle, torch.utils.hooks.RemovableHandle)
            handle.remove()
    assert not difference([p.grad for p in a.parameters()], [p.grad for p in b.parameters()], 1e-5, 1e-6)


def test_the_table_of_hooks_is_the_tensors_own():
    def f(x):
        y = x * 2
        y._backward_hooks = {}
        return y, y._backward_hooks, x._backward_hooks

    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda g: g * 2)
    y, own, of_input = kiln.compile(f)(x)
    assert own == {} and len(of_input) == 1
    y.sum().backward()
    assert x.grad.tolist() == [4, 4]
