"""Branches on tensors that always went one way: assertions from then on, and breaks again where they vary."""

import copy
import types

import pytest
import torch
from torch import nn

import kiln
from kiln.testing import assert_same


def whole(compiled):
    """Whether the entry that was made last leaves no branch to eager code."""
    return not max(compiled._entries, key=lambda e: e["id"])["breaks"]


def _clipped(x):
    y = x * 2
    if y.sum() > 1000:
        y = y / 10
    return y + 1


@pytest.fixture
def clipped():
    """What branches did is remembered of their code: each test has its own."""
    return types.FunctionType(_clipped.__code__.replace(), globals())


def test_a_branch_that_always_goes_one_way(clipped):
    compiled = kiln.compile(clipped)
    for i in range(12):
        assert_same(compiled(torch.ones(4) * i), clipped(torch.ones(4) * i))
    assert whole(compiled)
    for i in (1, 4000, 2, 3):
        assert_same(compiled(torch.ones(4) * i), clipped(torch.ones(4) * i))
    assert whole(compiled) and len(compiled._entries) == 1


def test_one_that_varies_breaks(clipped):
    compiled = kiln.compile(clipped)
    for i in range(20):
        assert_same(compiled(torch.ones(4) * (i % 3) * 400), clipped(torch.ones(4) * (i % 3) * 400))
    assert not whole(compiled)


def test_one_that_varies_from_some_time_on(clipped):
    compiled = kiln.compile(clipped)
    for i in [*[1] * 12, *[4000, 1] * 6]:
        assert_same(compiled(torch.ones(4) * i), clipped(torch.ones(4) * i))
    assert not whole(compiled)
    entries = len(compiled._entries)
    for i in [1] * 30:
        assert_same(compiled(torch.ones(4) * i), clipped(torch.ones(4) * i))
    assert not whole(compiled) and len(compiled._entries) == entries


def test_rare_exceptions_are_run_in_eager(clipped):
    compiled = kiln.compile(clipped)
    for i in range(200):
        x = torch.ones(4) * (4000 if i % 40 == 39 else 1)
        assert_same(compiled(x), clipped(x))
    assert whole(compiled)


def test_off_switch(clipped):
    with kiln.config.patch(disable_passes="capture.expected_jumps"):
        compiled = kiln.compile(clipped)
        for i in range(12):
            assert_same(compiled(torch.ones(4) * i), clipped(torch.ones(4) * i))
        assert not whole(compiled)


def test_custom_backends_keep_their_graphs(clipped):
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward

    compiled = kiln.compile(clipped, backend=backend)
    for i in range(30):
        compiled(torch.ones(4) * i)
    assert len(graphs) == 2


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x):
        y = self.linear(x)
        self.calls += 1
        if (y.abs() > 100).any():
            y = y.clamp(-100, 100)
            self.calls += 100
        if y.isnan().any() and x.shape[0] > 1:
            return torch.zeros_like(y)
        return y.relu()


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Inner() for _ in range(3)])
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        for layer in self.layers:
            x = self.dropout(layer(x)) + x
        return x


def test_in_modules_with_effects_gradients_and_random_numbers():
    torch.manual_seed(0)
    model = Outer()
    other = copy.deepcopy(model)
    compiled = kiln.compile(other)
    inputs = [torch.randn(3, 4) * (1e4 if i in (9, 14) else 1) for i in range(20)]
    inputs[16] = torch.full((3, 4), float("nan"))
    results = []
    for m in (model, compiled):
        torch.manual_seed(1)
        results.append([])
        for x in inputs:
            x = x.clone().requires_grad_()
            y = m(x)
            y.square().mean().backward()
            results[-1].append((y.detach(), x.grad))
    for (y, g), (y_other, g_other) in zip(*results, strict=True):
        assert_same(y_other, y, rtol=1e-4, atol=1e-5)
        assert_same(g_other, g, rtol=1e-3, atol=1e-4)
    assert [layer.calls for layer in model.layers] == [layer.calls for layer in other.layers]
    assert [p.grad.isnan().all() for p in model.parameters()] == [p.grad.isnan().all() for p in other.parameters()]


class Lamb(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p)
                state["average"].mul_(0.9).add_(p.grad, alpha=0.1)
                weight, update = p.norm(), state["average"].norm()
                ratio = 1.0 if weight == 0 or update == 0 else weight / update
                state["ratio"] = ratio
                p.add_(state["average"] * ratio, alpha=-group["lr"])


@pytest.mark.filterwarnings("ignore:kiln. .*the recompile limit")
def test_in_a_loop_over_parameters_of_a_training_step():
    def train(compiler):
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])
        optimizer = Lamb(net.parameters())

        def step(x):
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            if torch.isfinite(loss):
                optimizer.step()
            return loss.detach()

        step = compiler(step)
        data = [torch.randn(5, 6) for _ in range(24)]
        data[20] = torch.full((5, 6), float("inf"))
        return [step(x) for x in data], list(net.parameters()), step

    losses, parameters, _ = train(lambda f: f)
    other_losses, other_parameters, step = train(kiln.compile)
    for a, b in zip([*losses, *parameters], [*other_losses, *other_parameters], strict=True):
        assert_same(b.detach(), a.detach(), rtol=1e-4, atol=1e-5)
    assert whole(step)


def test_loops_that_data_ends():
    def root(x):
        guess = x.clone()
        while (guess * guess - x).abs().max() > 1e-4:
            guess = (guess + x / guess) / 2
        return guess

    def halved(x):
        while True:
            x = x / 1.5
            if x.sum() < 1:
                break
        return x * 2

    for f, largest in ((root, 10), (halved, 1e9)):
        compiled = kiln.compile(f)
        for i in range(14):
            x = torch.rand(4) * largest ** (i % 5 / 4) + 1
            assert_same(compiled(x), f(x))


def test_what_a_failing_call_lets_go_of():
    """A loop's generator is closed where the loop ends, also when a resume function is run again in eager."""

    def pieces(t, log):
        try:
            for row in t:
                yield row * 2
                log.append(len(log))
        finally:
            log.append("closed")

    def f(x):
        log = []
        for _, t in enumerate(pieces(torch.relu(x), log)):
            if x.sin().sum() > 0:
                break
            x = x + t
        log.append("behind")
        return x, log

    compiled = kiln.compile(f)
    for i in range(30):
        x = torch.full((3, 3), -1.0 if i % 12 < 9 else 1.0)
        assert_same(compiled(x), f(x))


def test_between_what_must_happen_at_once(capsys):
    def f(x):
        y = x * 2
        print("before")
        if y.sum() > 1000:
            y = y + 1
        print("behind")
        return y * 2

    compiled = kiln.compile(f)
    for i in [*range(12), 4000]:
        assert_same(compiled(torch.ones(4) * i), f(torch.ones(4) * i))
    assert capsys.readouterr().out == "before\nbehind\n" * 26


def test_numbers_as_conditions():
    def f(x, n):
        y = x * 2
        if n:
            y = y + n
        return y

    for value in (torch.tensor(3), torch.tensor([[2.5]]), torch.tensor(0)):
        compiled = kiln.compile(f)
        for i in range(12):
            assert_same(compiled(torch.ones(4) * i, value.sin()), f(torch.ones(4) * i, value.sin()))
        for n in (torch.zeros_like(value), torch.ones_like(value)):
            assert_same(compiled(torch.ones(4), n.sin()), f(torch.ones(4), n.sin()))
