"""torch.utils.checkpoint inside compiled functions."""

import functools
import warnings
from collections import defaultdict
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import kiln
from helpers import breaks, check, training_step
from kiln.testing import CompileCounter, assert_same

X = torch.linspace(-1, 1, 24).reshape(4, 6)
both_kinds = pytest.mark.parametrize("reentrant", [False, True])


def block(seed=0, **options):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Dropout(**options), nn.Linear(12, 6), nn.LayerNorm(6))


def train(make, step_of, compiled):
    """Losses and parameters of a few steps, and the generator's next numbers."""
    net = make()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    step = step_of(net, opt)
    if compiled:
        step = kiln.compile(step)
    torch.manual_seed(1)
    losses = [step(X) for _ in range(3)]
    return losses, list(net.parameters()), torch.rand(2)


@both_kinds
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_forward_and_backward(reentrant, dropout):
    net = block(p=dropout)

    def f(x):
        return checkpoint(net, x * 2, use_reentrant=reentrant).sin()

    x = X.clone().requires_grad_()
    assert breaks(f, x) == 0
    check(f, x, rtol=1e-5, atol=1e-5)


@both_kinds
def test_whole_training_steps(reentrant):
    def make():
        return nn.ModuleList([block(0, p=0.2), block(1, p=0.2), block(2, p=0.2)])

    def step_of(net, opt):
        def step(x):
            opt.zero_grad()
            h = net[0](x)
            for layer in net[1:]:
                h = checkpoint(layer, h, use_reentrant=reentrant)
            loss = h.pow(2).mean()
            loss.backward()
            opt.step()
            return loss.detach()

        return step

    assert_same(train(make, step_of, False), train(make, step_of, True), rtol=1e-5, atol=1e-5)
    net = make()
    assert breaks(step_of(net, torch.optim.SGD(net.parameters(), lr=0.1)), X) == 0


def test_arguments_and_results_of_other_kinds():
    def inner(a, pair, *, scale, shift=1.0):
        return a * pair[0] * scale, {"sum": (a + pair[1] + shift).tanh()}, 3

    def f(x, y):
        product, others, three = checkpoint(inner, x, (y, x), use_reentrant=False, scale=2.0)
        return product * three + others["sum"]

    x, y = X.clone().requires_grad_(), (X + 1).requires_grad_()
    assert breaks(f, x, y) == 0
    check(f, x, y)


def test_calls_within_calls_and_one_after_another():
    first, second = block(1, p=0.3), block(2, p=0.3)

    def inner(x):
        return checkpoint(first, x, use_reentrant=False).tanh()

    def f(x):
        y = checkpoint(inner, x, use_reentrant=False)
        y = checkpoint(second, y + x, use_reentrant=False)
        return checkpoint_sequential(first, 2, y, use_reentrant=False)

    x = X.clone().requires_grad_()
    assert breaks(f, x) == 0
    check(f, x, rtol=1e-5, atol=1e-5)


def test_the_backward_computes_again_and_keeps_little(capfd):
    layers = [block(i, p=0.2) for i in range(3)]

    def inputs_of_backward(apply):
        """The inputs of the backward graph that are no weights."""

        def f(x):
            for layer in layers:
                x = apply(layer, x)
            return x.sum()

        kiln.reset()
        kiln.set_logs("aot")
        kiln.compile(f)(X.clone().requires_grad_()).backward()
        kiln.set_logs("")
        text = capfd.readouterr().err
        backward = text[text.index("graph backward {") :]
        return [line for line in backward.splitlines() if "  input " in line and "primals" not in line], backward

    kept, _ = inputs_of_backward(lambda layer, x: layer(x))
    fewer, backward = inputs_of_backward(lambda layer, x: checkpoint(layer, x, use_reentrant=False))
    # What is inside of a layer has twelve columns.
    assert any(": f32[4, 12]" in line for line in kept)
    assert not any(": f32[4, 12]" in line for line in fewer)
    assert len([line for line in fewer if ": b8[4, 12]" in line]) == 3  # masks
    assert backward.count("aten::gelu(") == 3


def test_what_a_checkpointed_call_changes_changes_twice():
    """Once in the forward and once in the backward, so it stays in eager."""

    def run(compiled):
        calls, norm = [], nn.BatchNorm1d(6)

        def inner(x):
            calls.append(1)
            return norm(x)

        def f(x):
            return checkpoint(inner, x, use_reentrant=False).pow(2).sum()

        function = kiln.compile(f) if compiled else f
        for _ in range(2):
            function(X.clone().requires_grad_()).backward()
        return len(calls), list(norm.buffers())

    assert_same(run(False), run(True))


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["t"].add_(1),
        lambda state: state["list"].append(1),
        lambda state: state.__setitem__("n", state["n"] + 1),
        lambda state: state["norm"](X),
    ],
)
def test_each_side_effect_breaks_the_graph(change):
    def f(x, state):
        def inner(x):
            change(state)
            return x.exp()

        return checkpoint(inner, x, use_reentrant=False)

    def state():
        return {"t": torch.zeros(2), "list": [], "n": 0, "norm": nn.BatchNorm1d(6)}

    assert breaks(f, X.clone().requires_grad_(), state()) > 0
    states = []
    for function in (f, kiln.compile(f)):
        s = state()
        function(X.clone().requires_grad_(), s).sum().backward()
        states.append([s["t"], s["list"], s["n"], list(s["norm"].buffers())])
    assert_same(*states)


def test_new_random_numbers_for_the_backward():
    """preserve_rng_state=False: eager draws another mask there."""
    layer = nn.Dropout(0.5)

    def f(x):
        return checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)

    check(f, X.clone().requires_grad_())


@pytest.mark.parametrize(
    "options",
    [
        {"use_reentrant": False, "debug": True},
        {"use_reentrant": False, "context_fn": lambda: (nullcontext(), nullcontext())},
    ],
    ids=["debug", "context_fn"],
)
def test_what_eager_does_in_another_way(options):
    """It stays eager's: its messages and contexts."""

    def inner(x, scale=1.0):
        return x.exp() * scale

    def f(x):
        return checkpoint(inner, x.sin(), **options).cos()

    x = X.clone().requires_grad_()
    assert breaks(f, x) > 0
    check(f, x)


def test_which_kind_is_left_unsaid():
    """It is a reentrant one, with a warning."""
    net = block(p=0.3)

    def f(x):
        return checkpoint(net, x.sin()).cos()

    x = X.clone().requires_grad_()
    with pytest.warns(UserWarning, match="the use_reentrant parameter should be passed explicitly"):
        kiln.compile(f, fullgraph=True)(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert breaks(f, x) == 0
        check(f, x, rtol=1e-5, atol=1e-5)


def test_a_reentrant_one_takes_no_keywords():
    def f(x):
        return checkpoint(lambda x, scale: x * scale, x.sin(), scale=2.0, use_reentrant=True)

    with pytest.raises(ValueError, match="Unexpected keyword arguments: scale"):
        kiln.compile(f)(X.clone().requires_grad_())


def test_without_gradients():
    net = block(p=0.3)

    def f(x):
        return checkpoint(net, x, use_reentrant=False)

    with torch.no_grad():
        assert breaks(f, X) == 0
        check(f, X)
    check(f, X)


def test_a_reentrant_one_of_inputs_without_gradients():
    net = block(p=0.0)

    def f(x):
        return checkpoint(net, x, use_reentrant=True)

    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        expected = f(X)
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        actual = kiln.compile(f, fullgraph=True)(X)
    assert not expected.requires_grad and not actual.requires_grad
    assert_same(expected, actual)


def test_exceptions_pass_through():
    def inner(x):
        if x.shape[0] == 4:
            raise ValueError("four rows")
        return x.exp()

    def f(x):
        try:
            y = checkpoint(inner, x, use_reentrant=False)
        except ValueError:
            y = x * 2
        return y.tanh()

    check(f, X.clone().requires_grad_())
    check(f, X[:3].clone().requires_grad_())


def test_a_break_inside():
    def inner(x):
        kiln.graph_break()
        return x.exp()

    def f(x):
        return checkpoint(inner, x * 2, use_reentrant=False) + 1

    check(f, X.clone().requires_grad_())


def test_a_custom_backend_gets_the_parts_around_it():
    counter = CompileCounter()

    def f(x):
        return checkpoint(lambda t: t.exp(), x * 2, use_reentrant=False) + 1

    kiln.compile(f, backend=counter)(X.clone().requires_grad_())
    assert counter.frame_count == 2


def test_off_switch():
    net = block(p=0.2)

    def f(x):
        return checkpoint(net, x, use_reentrant=False)

    with kiln.config.patch(disable_passes="joint.rematerialize"):
        check(f, X.clone().requires_grad_(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operands_of_products_are_computed_again_in_whole_steps(dtype):
    """Activations large enough that the backward's products read copies of them (graph.recompute_operands)."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(128)
            self.up, self.gate, self.down = nn.Linear(128, 512), nn.Linear(128, 512), nn.Linear(512, 128)

        def forward(self, x):
            h = self.norm(x)
            h = nn.functional.dropout(nn.functional.silu(self.gate(h)) * self.up(h), 0.2)
            return x + self.down(nn.functional.gelu(h))

    def make():
        torch.manual_seed(0)
        return nn.Sequential(Layer(), Layer(), nn.Linear(128, 16)).to(dtype)

    x = torch.randn(2, 256, 128, generator=torch.Generator().manual_seed(3)).to(dtype)

    def step_of(net, opt):
        trained = training_step(net, opt)

        def step(_):
            loss = trained(x)
            x.mul_(1.01)  # read by what is computed again
            return loss

        return step

    start = x.clone()
    expected = train(make, step_of, False)
    changed = x.clone()
    x.copy_(start)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    assert_same(expected, train(make, step_of, True), rtol=tolerance, atol=tolerance)
    assert torch.equal(x, changed)


def saving(*saved):
    def policy(ctx, op, *args, **kwargs):
        assert not ctx.is_recompute and ctx.op_output is not None
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def every_second_product():
    """Contexts whose policy counts."""
    counts = defaultdict(int)

    def policy(ctx, op, *args, **kwargs):
        if op == torch.ops.aten.addmm.default:
            assert args[1].shape == (4, 6 if counts["addmm"] % 2 == 0 else 12)
            counts["addmm"] += 1
        return op == torch.ops.aten.addmm.default and counts["addmm"] % 2 == 1

    return create_selective_checkpoint_contexts(policy)


ADDMM, GELU = torch.ops.aten.addmm.default, torch.ops.aten.gelu.default
SELECTIONS = {
    "a policy": (functools.partial(create_selective_checkpoint_contexts, saving(ADDMM)), 0, 1),
    "a list": (functools.partial(create_selective_checkpoint_contexts, [GELU]), 2, 0),
    "both": (functools.partial(create_selective_checkpoint_contexts, saving(ADDMM, GELU)), 0, 0),
    "nothing": (functools.partial(create_selective_checkpoint_contexts, saving()), 2, 1),
    "every second product": (every_second_product, 1, 1),
}


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("whole", [False, True])
def test_a_policy_says_what_is_kept(selection, whole, capfd):
    context_fn, products, gelus = SELECTIONS[selection]
    net = block(p=0.3)

    def f(x):
        y = checkpoint(net, x, use_reentrant=False, context_fn=context_fn).square().sum()
        return torch.autograd.grad(y, (x, *net.parameters())) if whole else y

    x = X.clone().requires_grad_()
    check(f, x, fullgraph=True, rtol=1e-5, atol=1e-5)
    kiln.reset()
    kiln.set_logs("aot")
    kiln.compile(f)(x.clone().detach().requires_grad_())
    kiln.set_logs("")
    text = capfd.readouterr().err
    joint = text[text.index("graph joint {") :]
    joint = joint[: joint.index("\n}\n")]
    again = [line for line in joint.splitlines() if "recomputed" in line]
    assert sum("aten::addmm(" in line for line in again) == products
    assert sum("aten::gelu(" in line for line in again) == gelus


def test_a_policy_with_side_effects_is_asked_as_in_eager():
    def run(compiled):
        asked = []

        def policy(ctx, op, *args, **kwargs):
            asked.append(op)
            return CheckpointPolicy.PREFER_SAVE if op == ADDMM else CheckpointPolicy.MUST_RECOMPUTE

        net = block(p=0.3)
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)

        def f(x):
            return checkpoint(net, x, use_reentrant=False, context_fn=contexts).square().sum()

        torch.manual_seed(0)
        (kiln.compile(f) if compiled else f)(X.clone().requires_grad_()).backward()
        return asked, [p.grad for p in net.parameters()]

    assert_same(run(False), run(True), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_random_numbers_that_are_not_preserved(dropout):
    """The backward draws other ones, so a call that draws breaks the graph."""
    net = block(p=0.4)
    net[2].p = dropout
    if not dropout:
        net[2] = nn.Identity()

    def f(x):
        return checkpoint(net, x, use_reentrant=False, preserve_rng_state=False).sin()

    x = X.clone().requires_grad_()
    assert breaks(f, x) == (1 if dropout else 0)
    check(f, x, rtol=1e-5, atol=1e-5)


class Tells(torch.autograd.Function):
    """Runs in eager, as its backward has an effect."""

    seen = None

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(y)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        (Tells.seen,) = ctx.saved_tensors
        return grad, None


def test_a_guard_does_not_unpack_what_a_checkpoint_saved():
    def f(x, y):
        Tells.apply(x, y).backward()
        first = Tells.seen is y
        Tells.seen = None
        checkpoint(Tells.apply, x, y, use_reentrant=False).backward()
        return first, Tells.seen is y

    compiled = kiln.compile(f)
    for _ in range(3):
        x, y = torch.tensor(1.0, requires_grad=True), torch.tensor(2.0)
        assert compiled(x, y) == (True, True)
        assert x.grad == 2


def test_a_dict_that_makes_modules_is_no_side_effect():
    class Makes(dict):
        def __getitem__(self, key):
            return super().__getitem__(key)()

    activations = Makes(silu=nn.SiLU)

    def f(x):
        return checkpoint(lambda y: activations["silu"](y) * 2, x, use_reentrant=False)

    x = X.clone().requires_grad_()
    assert breaks(f, x) == 0
    check(f, x)

    def counts(x):
        def inside(y):
            activations.used = getattr(activations, "used", 0) + 1
            return activations["silu"](y)

        return checkpoint(inside, x, use_reentrant=False)

    assert breaks(counts, x) > 0
