"""torch.utils.checkpoint, called in eager, around compiled functions: both of its runs are compiled."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import kiln
from kiln.aot import aot_function, aot_module_simplified
from kiln.testing import assert_same

X = torch.linspace(-1, 1, 24).reshape(4, 6)


def entries(compiled):
    return getattr(compiled, "_kiln_entry", compiled)._entries


def hits(compiled):
    return sum(e["hits"] for e in entries(compiled))


def block(seed=0, dropout=0.0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Dropout(dropout), nn.Linear(12, 6), nn.LayerNorm(6))


def train(blocks, calls, steps=3, **options):
    """Losses, parameters, buffers and the generator's next numbers after training with a checkpoint around each call."""
    opt = torch.optim.SGD(blocks.parameters(), lr=0.1)
    torch.manual_seed(1)
    losses = []
    for step in range(steps):
        x = X + step
        for call in calls:
            x = checkpoint(call, x, use_reentrant=False, **options)
        loss = x.square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.detach())
    return losses, dict(blocks.named_parameters()), dict(blocks.named_buffers()), torch.rand(2)


def check_training(blocks, **options):
    """Trains a copy in eager and one compiled block by block; returns the compiled ones."""
    theirs, ours = copy.deepcopy(blocks), copy.deepcopy(blocks)
    expected = train(theirs, theirs, **options)
    compiled = [kiln.compile(b) for b in ours]
    assert_same(train(ours, compiled, **options), expected, rtol=1e-4, atol=1e-5)
    assert all(hits(c) > 0 for c in compiled)
    return compiled


@pytest.mark.parametrize(
    ("dropout", "options"),
    [(0.0, {}), (0.4, {}), (0.0, {"preserve_rng_state": False}), (0.4, {"early_stop": False})],
    ids=str,
)
def test_training(dropout, options):
    compiled = check_training(nn.ModuleList([block(i, dropout) for i in range(3)]), **options)
    for c in compiled:
        assert len(entries(c)) == 1  # of both runs
        assert hits(c) == 5  # the first call compiles


def test_the_checkpoint_holds_all_that_is_saved(monkeypatch):
    net = block()
    compiled = kiln.compile(net)
    taken = []

    class Holder(torch.utils.checkpoint._Holder):
        def __init__(self):
            super().__init__()
            taken.append(self)

    monkeypatch.setattr(torch.utils.checkpoint, "_Holder", Holder)
    for _ in range(2):
        taken.clear()
        y = checkpoint(compiled, X, use_reentrant=False)
        assert len(taken) > 5
        assert all(not holder.handles for holder in taken)  # given to the second run alone
        y.sum().backward()
        assert all(p.grad is not None for p in net.parameters())


def test_batch_statistics_are_updated_twice_as_in_eager():
    torch.manual_seed(0)
    check_training(nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()) for _ in range(2)]))


class Counts(nn.Module):
    """Counts its calls behind the last tensor that is saved, which the second run does not reach."""

    def __init__(self, in_python):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.in_python = in_python
        self.calls = 0
        self.register_buffer("number", torch.zeros(()))

    def forward(self, x):
        x = self.linear(x)
        if self.in_python:
            self.calls += 1
        else:
            self.number += 1
        return x


@pytest.mark.parametrize("in_python", [False, True])
def test_effects_that_the_second_run_does_not_reach(in_python):
    torch.manual_seed(0)
    theirs = nn.ModuleList([Counts(in_python)])
    ours = copy.deepcopy(theirs)
    expected = train(theirs, theirs)
    compiled = [kiln.compile(b) for b in ours]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_same(train(ours, compiled), expected)
    assert (ours[0].calls, ours[0].number) == (theirs[0].calls, theirs[0].number)
    assert any("side effects inside of a checkpoint" in str(w.message) for w in caught)
    # Without a checkpoint it is compiled.
    before = hits(compiled[0])
    for _ in range(3):
        compiled[0](X)
    assert hits(compiled[0]) > before


class Scaled(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scale = scale

    def forward(self, x):
        return (self.linear(x) * self.scale).tanh()


def test_numbers_that_differ_by_layer():
    torch.manual_seed(0)
    theirs = nn.ModuleList([Scaled(s) for s in (0.1, 0.2, 0.1, 0.3, 0.2)])
    ours = copy.deepcopy(theirs)
    expected = train(theirs, theirs)
    forward = kiln.compile(Scaled.forward)  # one function for all: its entries grow between the two runs
    calls = [lambda x, b=b: forward(b, x) for b in ours]
    assert_same(train(ours, calls), expected, rtol=1e-4, atol=1e-5)
    assert hits(forward) > 10


def test_sizes_that_change_between_the_two_runs():
    net = block()
    compiled = kiln.compile(net)
    xs = [torch.linspace(-1, 1, n * 6).reshape(n, 6).requires_grad_() for n in range(2, 16)]
    for _ in range(2):  # the recompile limit is among them
        ys = [checkpoint(compiled, x, use_reentrant=False) for x in xs]
        for x, y in zip(xs, ys, strict=True):
            (ours,) = torch.autograd.grad(y.square().sum(), x)
            (theirs,) = torch.autograd.grad(net(x).square().sum(), x)
            assert_same(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_break_inside():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            x = self.first(x).sin()
            kiln.graph_break()
            return self.second(x).tanh()

    torch.manual_seed(0)
    check_training(nn.ModuleList([Net(), Net()]))


def test_a_checkpoint_in_the_eager_part_of_a_compiled_function():
    """Its second run is started by a backward outside of compiled code, which compiles nothing."""
    net = block()

    def f(x):
        y = x.sin()
        kiln.graph_break()
        for _ in range(2):
            y = checkpoint(net, y, use_reentrant=False)
            kiln.graph_break()
        return y * 2

    compiled = kiln.compile(f)
    for _ in range(3):
        x, z = X.clone().requires_grad_(), X.clone().requires_grad_()
        compiled(x).sum().backward()
        f(z).sum().backward()
        assert_same(x.grad, z.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("retain", [False, True])
def test_backward_twice(retain):
    net = block()
    compiled = kiln.compile(net)
    x = X.clone().requires_grad_()
    loss = checkpoint(compiled, x, use_reentrant=False).square().sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=retain)
    if not retain:
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        return
    assert_same(torch.autograd.grad(loss, x)[0], first)


def test_second_derivatives():
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    compiled = kiln.compile(net)

    def penalty(module):
        x = X.clone().requires_grad_()
        (g,) = torch.autograd.grad(checkpoint(module, x, use_reentrant=False).square().sum(), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), list(net.parameters()), allow_unused=True)

    expected = penalty(net)
    for _ in range(2):
        assert_same(penalty(compiled), expected, rtol=1e-4, atol=1e-5)


def test_an_early_stop_is_undone_by_a_setting():
    with set_checkpoint_early_stop(False):
        check_training(nn.ModuleList([block(i, 0.3) for i in range(2)]))


def test_nested_checkpoints():
    torch.manual_seed(0)
    net = nn.ModuleList([block(i) for i in range(4)])

    def grads(blocks):
        def pair(i, x):
            for b in blocks[2 * i : 2 * i + 2]:
                x = checkpoint(b, x, use_reentrant=False)
            return x

        x = X.clone().requires_grad_()
        for i in range(2):
            x = checkpoint(pair, i, x, use_reentrant=False)
        x.square().sum().backward()
        found = [p.grad for p in net.parameters()]
        net.zero_grad()
        return found

    expected = grads(list(net))
    compiled = [kiln.compile(b) for b in net]
    for _ in range(2):
        assert_same(grads(compiled), expected, rtol=1e-4, atol=1e-5)
    assert all(hits(c) > 0 for c in compiled)


def test_save_on_cpu():
    net = block()
    compiled = kiln.compile(net)
    for _ in range(2):
        x, z = X.clone().requires_grad_(), X.clone().requires_grad_()
        with save_on_cpu():
            y = compiled(x)
        y.square().sum().backward()
        net(z).square().sum().backward()
        assert_same(x.grad, z.grad, rtol=1e-4, atol=1e-5)
    assert hits(compiled) == 1


def test_other_hooks_see_what_eager_saves():
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    compiled = kiln.compile(module)

    def saved_by(f):
        seen = []
        with saved_tensors_hooks(lambda t: seen.append(t.shape) or t, lambda t: t):
            f(torch.ones(2, 4, requires_grad=True)).sum().backward()
        return seen

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert saved_by(compiled) == saved_by(module)
    told = [str(w.message) for w in caught if "checkpointing) are active. Hint: compile the function" in str(w.message)]
    assert len(told) == 1


def test_an_error_of_a_hook():
    compiled = kiln.compile(nn.Linear(6, 6))
    x = X.clone().requires_grad_()
    y = checkpoint(compiled, x, use_reentrant=False)
    compiled.weight.data = torch.randn(6, 6, dtype=torch.float64)  # the second run is another
    with pytest.raises(RuntimeError):
        y.sum().backward()


def test_a_backend_and_a_function_on_aten_graphs():
    """The error with which a checkpoint stops its second run passes through their compiled functions, too."""

    def backend(gm, inputs):
        return aot_module_simplified(gm, inputs, fw_compiler=lambda g, i: g.forward, bw_compiler=lambda g, i: g.forward)

    def f(x, w):
        return (x @ w).tanh().exp()

    x, w = X.clone().requires_grad_(), torch.linspace(-1, 1, 36).reshape(6, 6).requires_grad_()
    expected = torch.autograd.grad(f(x, w).sum(), (x, w))
    for compiled in (kiln.compile(f, backend=backend), aot_function(f, lambda g, i: g.forward, lambda g, i: g.forward)):
        for _ in range(3):
            y = checkpoint(compiled, x, w, use_reentrant=False)
            assert_same(torch.autograd.grad(y.sum(), (x, w)), expected, rtol=1e-5, atol=1e-6)
