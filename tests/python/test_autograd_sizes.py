"""Sizes that are left open where autograd runs what the program gave it: custom functions, hooks, checkpoints. Such
programs cannot be run operator by operator; they are compiled for sizes that come, or wait in eager."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import kiln
from kiln.testing import assert_same

SIZES = (8, 7, 12, 4, 3, 9, 5, 7, 12, 4)


class Rows(torch.autograd.Function):
    """Asks for sizes in both directions."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.rows, ctx.scale = x.shape[0], scale
        return x / x.shape[0]

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        padded = torch.cat([grad, grad.new_zeros(ctx.rows, 1)], 1).reshape(-1)[: grad.numel()].reshape(-1, x.shape[1])
        return padded * ctx.scale / ctx.rows + 0.1 * x.sign(), None


class Rounded(torch.autograd.Function):
    """The straight-through estimator."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Net(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Dropout(0.2), nn.Linear(12, 6)) for _ in range(3)
        )

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + self.call(layer, x)
        return x


def plain(layer, x):
    return layer(x)


def custom(layer, x):
    return Rows.apply(layer(x), 0.5) + Rounded.apply(3 * x)


def hooked(layer, x):
    y = layer(x)
    y.register_hook(lambda g: g * 2 / g.shape[0] if g.shape[1] > 2 else None)
    return y


def expanded(layer, x):
    """The hook's gradient is one number, seen as many."""
    y = layer(x)
    s = y.sum(0)
    y.register_hook(lambda g: g + torch.arange(g.shape[0]).reshape(-1, 1) * g.numel())
    return s.expand(x.shape[0], -1)


def checkpointed(layer, x):
    return checkpoint(layer, x, use_reentrant=False)


def reentrant(layer, x):
    return checkpoint(layer, x, use_reentrant=True)


CALLS = [custom, hooked, expanded, checkpointed, reentrant]


def train(call, compiled, sizes=SIZES, prepare=lambda net: None, **options):
    torch.manual_seed(0)
    net = Net(call)
    prepare(net)
    opt = torch.optim.SGD(net.parameters(), lr=0.01)

    def step(x):
        loss = net(x).pow(2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    run = kiln.compile(step, **options) if compiled else step
    losses = [run(torch.randn(n, 6)) for n in sizes]
    return [losses, [p.detach() for p in net.parameters()], torch.rand(2)], run


def check_training(call, entries=2, **arguments):
    expected, _ = train(call, False, **{k: v for k, v in arguments.items() if k in ("sizes", "prepare")})
    actual, compiled = train(call, True, **arguments)
    assert_same(actual, expected, rtol=1e-4, atol=1e-5)
    assert len(compiled._entries) <= entries
    return compiled


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("call", CALLS)
def test_whole_training_steps(call, dynamic):
    """Without `dynamic` the first sizes have an entry of their own."""
    check_training(call, entries=1 if dynamic else 2, dynamic=dynamic)


@pytest.mark.parametrize("call", [plain, custom, checkpointed])
def test_hooks_of_parameters(call):
    def halve(p):
        p.grad.mul_(0.5)

    def prepare(net):
        for p in net.parameters():
            p.register_hook(lambda g: g * 0.5 + g.shape[0])
            p.register_post_accumulate_grad_hook(halve)

    check_training(call, entries=1, prepare=prepare, dynamic=True)


@pytest.mark.parametrize("call", [plain, custom])
def test_hooks_of_modules(call):
    def prepare(net):
        for layer in net.layers:
            layer.register_full_backward_hook(
                lambda m, given, out: tuple(g if g is None else g * 2 / g.shape[0] for g in given)
            )

    check_training(call, entries=1, prepare=prepare, dynamic=True)


@pytest.mark.parametrize("call", [custom, checkpointed])
def test_backward_outside(call):
    """The compiled function's results are differentiated in eager."""
    net = Net(call)
    compiled = kiln.compile(lambda x: net(x), dynamic=True)
    for n in SIZES:
        x = torch.randn(n, 6)
        results = []
        for run in (net, compiled):
            net.zero_grad()
            a = x.clone().requires_grad_()
            torch.manual_seed(n)
            y = run(a)
            y.sin().sum().backward()
            results.append([y.detach(), a.grad, [p.grad.clone() for p in net.parameters()]])
        assert_same(results[1], results[0], rtol=1e-4, atol=1e-5)
    assert len(compiled._entries) == 1


def test_a_hook_looks_at_other_gradients():
    def step(x, w):
        y = x @ w
        z = y.tanh()
        y.register_hook(lambda g: g * z.shape[0] + w.shape[1])
        z.pow(2).sum().backward()
        grad, w.grad = w.grad, None
        return grad

    compiled = kiln.compile(step, dynamic=True)
    w = torch.randn(6, 4, requires_grad=True)
    for n in SIZES:
        x = torch.randn(n, 6)
        assert_same(compiled(x, w), step(x, w), rtol=1e-5, atol=1e-5)
    assert len(compiled._entries) == 1


def test_inputs_that_want_gradients():
    """The gradient that the hook is given has the sizes of an input."""

    def step(x):
        y = x * 2
        y.register_hook(lambda g: g.flip(0)[: g.shape[0] // 2].repeat(2, 1).new_full(g.shape, g.shape[0]))
        (y.sin().sum(0) * 3).sum().backward()
        return x.grad

    compiled = kiln.compile(step, dynamic=True)
    for n in SIZES:
        x = torch.randn(n, 6)
        assert_same(compiled(x.clone().requires_grad_()), step(x.clone().requires_grad_()))
    assert len(compiled._entries) == 1


def test_sizes_that_the_backward_decides_by():
    class Halves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 3 if grad.shape[0] > 6 else grad - 1

    def step(x):
        x = x.clone().requires_grad_()
        Halves.apply(x).sin().sum().backward()
        return x.grad

    compiled = kiln.compile(step, dynamic=True)
    for n in SIZES:
        x = torch.randn(n, 6)
        assert_same(compiled(x), step(x))
    assert len(compiled._entries) == 2


@pytest.mark.parametrize("call", [custom, checkpointed])
def test_beyond_the_limit_sizes_wait_in_eager(call, monkeypatch):
    """Nothing is captured for them, and those that keep coming are compiled."""
    with kiln.config.patch(recompile_limit=2):
        compiled = check_training(call, entries=1, sizes=range(2, 12), dynamic=True)
        assert compiled._entries[0]["compiled_sizes"] == 2
        x = torch.randn(11, 6)
        for _ in range(2000):
            compiled(x)
            if compiled._entries[0]["compiled_sizes"] > 2:
                break
        assert compiled._entries[0]["compiled_sizes"] == 3
    with kiln.config.patch(size_limit=0):
        check_training(call, entries=1, dynamic=True)


def test_run_mode_compiles_no_sizes():
    net = Net(custom)
    compiled = kiln.compile(lambda x: net(x), dynamic=True)
    net.eval()
    x = torch.randn(5, 6)
    compiled(x)
    assert_same(kiln.run(compiled)(x[:4]), net(x[:4]), rtol=1e-5, atol=1e-5)
    assert compiled._entries[0]["compiled_sizes"] == 1


def test_checkpoints_of_other_sizes_keep_little(capfd):
    net = Net(checkpointed)
    compiled = kiln.compile(lambda x: net(x), dynamic=True)
    compiled(torch.randn(5, 6))
    kiln.set_logs("aot")
    compiled(torch.randn(9, 6))
    kiln.set_logs("")
    text = capfd.readouterr().err
    backward = text[text.index("graph backward {") :]
    kept = [line for line in backward.splitlines() if "  input " in line and "primals" not in line]
    # What is inside of a layer has twelve columns.
    assert kept and not any(": f32[9, 12]" in line for line in kept)
    assert backward.count("aten::gelu(") == len(net.layers)


def test_copies_keep_sizes_open():
    step = kiln.compile(lambda x: Rounded.apply(x * x.shape[0]), dynamic=True)
    twin = copy.deepcopy(step)
    for n in SIZES:
        x = torch.randn(n, 6, requires_grad=True)
        assert_same(twin(x), step(x))
