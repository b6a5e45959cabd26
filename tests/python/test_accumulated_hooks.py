"""Hooks of parameters that run when their gradient was added to .grad, optimizers most often, in a compiled step."""

import warnings

import pytest
import torch
import torch.nn.functional as F

import kiln
from kiln.testing import difference


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))


def descent(m, seen):
    def update(p):
        with torch.no_grad():
            p.add_(p.grad, alpha=-0.1)
        p.grad = None

    for p in m.parameters():
        p.register_post_accumulate_grad_hook(update)


def an_optimizer_each(optimizer, **options):
    def register(m, seen):
        optimizers = {p: optimizer([p], **options) for p in m.parameters()}

        def step(p):
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in m.parameters():
            p.register_post_accumulate_grad_hook(step)

    return register


def gradients_are_kept(m, seen):
    for p in m.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append((p.shape, p.grad.clone())))


def gradients_are_changed(m, seen):
    for p in m.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clamp_(-0.5, 0.5).sum()))


def several_in_order(m, seen):
    w = m[0].weight
    w.register_hook(lambda g: g * 3)
    w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum()))
    w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.mul_(2).sum()))
    w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum()))


def others_with_hooks_are_looked_at(m, seen):
    def note(p):
        seen.append([q.grad is not None and q.grad.sum() for q in m.parameters()])

    for p in m.parameters():
        p.register_post_accumulate_grad_hook(note)


def others_without_hooks_are_looked_at(m, seen):
    m[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(m[2].bias.grad.sum()))


def others_are_written(m, seen):
    def swap(p):
        with torch.no_grad():
            m[0].bias.add_(p.grad.mean())

    m[2].bias.register_post_accumulate_grad_hook(swap)


HOOKS = {
    "descent": descent,
    "adam": an_optimizer_each(torch.optim.Adam, lr=0.01),
    "adam_one_by_one": an_optimizer_each(torch.optim.Adam, lr=0.01, foreach=False),
    "momentum": an_optimizer_each(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "gradients_are_kept": gradients_are_kept,
    "gradients_are_changed": gradients_are_changed,
    "several_in_order": several_in_order,
    "others_with_hooks_are_looked_at": others_with_hooks_are_looked_at,
    "others_without_hooks_are_looked_at": others_without_hooks_are_looked_at,
    "others_are_written": others_are_written,
}


def step(m, x):
    loss = m(x).pow(2).mean()
    loss.backward()
    return loss.detach()


def twice(m, x):
    loss = m(x).pow(2).mean()
    loss.backward(retain_graph=True)
    (loss * 2).backward()
    return loss.detach()


def in_parts(m, x):
    for part in x.split(2):
        m(part).pow(2).mean().backward()
    return torch.stack([p.detach().norm() for p in m.parameters()])


def for_some(m, x):
    m(x).pow(2).mean().backward(inputs=[m[0].weight, m[2].bias])


STEPS = {"step": step, "in_parts": in_parts, "for_some": for_some}


def run(f, register, calls=4):
    m, seen, results = model(), [], []
    register(m, seen)
    torch.manual_seed(1)
    for _ in range(calls):
        results.append(f(m, torch.randn(6, 4)))
    return results, seen, [*m.parameters()], [p.grad for p in m.parameters()]


@pytest.mark.parametrize("program", STEPS)
@pytest.mark.parametrize("hooks", HOOKS)
def test_as_in_eager(program, hooks):
    f, register = STEPS[program], HOOKS[hooks]
    assert not difference(run(kiln.compile(f), register), run(f, register), 1e-5, 1e-6)


@pytest.mark.parametrize("hooks", HOOKS)
def test_one_graph(hooks):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(kiln.compile(step, fullgraph=True), HOOKS[hooks])


def test_a_weight_that_is_written_before_its_last_use_is_no_graph():
    def register(m, seen):
        def early(p):
            with torch.no_grad():
                m[0].weight.mul_(2)

        m[2].bias.register_post_accumulate_grad_hook(early)

    def f(m, x):
        y = m[0](x)
        return step(lambda _: m[2](m[1](F.linear(y, m[0].weight @ m[0].weight.t()))), x)

    for g in (f, kiln.compile(f, fullgraph=True)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run(g, register, calls=1)


@pytest.mark.parametrize("wrong", ["raises", "returns"])
def test_what_eager_refuses(wrong):
    def hook(p):
        if wrong == "raises":
            raise ValueError("enough")
        return p.grad

    for f in (step, kiln.compile(step)):
        m = model()
        m[0].weight.register_post_accumulate_grad_hook(hook)
        with pytest.raises((ValueError, RuntimeError), match="enough|should return None"):
            f(m, torch.ones(2, 4))


@pytest.mark.parametrize("first", ["none", "tensor", "accumulated"])
def test_hooks_that_come_and_go(first):
    def program(f):
        m, seen = model(), []
        w = m[0].weight
        if first == "tensor":
            w.register_hook(lambda g: g * 2)
        if first == "accumulated":
            w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum()))
        x = torch.ones(2, 4)
        f(m, x)
        handle = w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.mean()))
        f(m, x)
        f(m, x)
        handle.remove()
        f(m, x)
        other = w.register_hook(lambda g: g + 1)
        f(m, x)
        other.remove()
        f(m, x)
        return seen, w.grad

    assert not difference(program(kiln.compile(step)), program(step), 1e-5, 1e-6)


def test_a_hook_of_the_node_that_accumulates():
    def program(f):
        m, seen = model(), []
        w = m[0].weight
        node = w.view_as(w).grad_fn.next_functions[0][0]
        node.register_hook(lambda outputs, inputs: seen.append(w.grad.sum()))
        f(m, torch.ones(2, 4))
        f(m, torch.ones(2, 4))
        return seen, w.grad

    assert not difference(program(kiln.compile(step)), program(step), 1e-5, 1e-6)
