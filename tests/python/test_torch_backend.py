"""kiln behind PyTorch's own front end: torch.compile(f, backend="kiln")."""

import importlib
import os
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import kiln
from kiln.testing import assert_same

ROOT = Path(__file__).resolve().parent.parent.parent


def entry_point():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["torch_dynamo_backends"]["kiln"].partition(":")
    return getattr(importlib.import_module(module), name)


def test_training_under_torch_compile():
    def f(x, w):
        return torch.tanh(x @ w).sum(), x * 2

    x, w = torch.linspace(-1, 1, 12).reshape(3, 4), torch.linspace(0, 1, 8).reshape(4, 2)

    def run(function):
        a, b = x.clone().requires_grad_(True), w.clone().requires_grad_(True)
        loss, other = function(a, b)
        loss.backward()
        return loss, other, a.grad, b.grad

    compiled = torch.compile(f, backend=entry_point())
    assert_same(run(f), run(compiled))
    assert_same(run(f), run(compiled))


@pytest.mark.parametrize("policy", ["all", "nested", "some"])
def test_checkpoints_with_random_numbers_under_torch_compile(policy):
    # PyTorch's operator for them does not keep the generator's state: what is computed again was of other numbers.
    weight = torch.nn.Parameter(torch.ones(8))
    options = {"use_reentrant": False}
    if policy == "some":
        keep = [torch.ops.aten.sin.default]
        options["context_fn"] = partial(create_selective_checkpoint_contexts, keep)

    def inner(x):
        return torch.nn.functional.dropout(x * weight, 0.5).sin()

    def outer(x):
        return checkpoint(inner, x, **options) * torch.rand_like(x)

    def f(x):
        return checkpoint(outer if policy == "nested" else inner, x, **options).sum()

    def run(function):
        torch.manual_seed(0)
        weight.grad = None
        loss = function(torch.arange(8.0))
        loss.backward()
        return loss, weight.grad, torch.rand(2)

    assert_same(run(torch.compile(f, backend=entry_point())), run(f))


def test_custom_function_under_torch_compile(recwarn):
    class Gate(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * torch.sigmoid(x)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * torch.sigmoid(x)

    def f(x):
        return Gate.apply(x * 2).sum()

    def run(function):
        x = torch.linspace(-1, 1, 5).requires_grad_(True)
        out = function(x)
        out.backward()
        return out, x.grad

    assert_same(run(f), run(torch.compile(f, backend=entry_point())))
    assert not [w for w in recwarn if "recompile limit" in str(w.message)]


def test_modules_made_in_captured_code_after_torch_compile():
    class Scale(torch.nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.factor = factor

        def forward(self, x):
            return x * self.factor

    def f(x):
        return Scale(factor=3)(x) + torch.nn.Identity()(x)

    x = torch.ones(3)
    torch.compile(f, backend="eager")(x)  # from here on, its wrapper of Module.__init__ is there
    assert torch.nn.Module.__init__.__name__ == "patched_init"
    assert_same(kiln.compile(f, fullgraph=True)(x), f(x))


@pytest.mark.parametrize("captured", [True, False])
def test_torch_compiled_code_below_a_compiled_function(captured):
    """It is captured through, or runs behind a break: its evaluator and kiln's stand above each other there."""

    @torch.compile(backend="eager")
    def inside(x):
        if not captured:
            kiln.graph_break()
        return x.sin() + 1

    class Model(torch.nn.Module):
        def forward(self, x):
            return inside(x) * 3

    model = torch.compile(Model(), backend="eager")
    for f in (
        lambda x: inside(x * 2) - 1,
        lambda x: model(x) + x,
        *([] if captured else [lambda x: torch.compile(Model(), backend="eager")(x)]),
    ):
        compiled = kiln.compile(f, fullgraph=captured)
        for n in (3, 3, 4, 3):
            x = torch.linspace(-1, 1, n)
            assert_same(f(x), compiled(x))
            assert_same(torch.relu(x) * 2, kiln.compile(lambda x: torch.relu(x) * 2)(x))


def test_a_training_step_after_torch_compile():
    """PyTorch's compiler wraps functions of optimizers once it runs; capture knows them all the same."""
    program = """
import torch
import kiln
torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
net = torch.nn.Linear(2, 2)
optimizer = torch.optim.Adam(net.parameters())

@kiln.compile(fullgraph=True)
def step(x):
    optimizer.zero_grad()
    loss = net(x).sum()
    loss.backward()
    optimizer.step()
    return loss

print([step(torch.ones(1, 2)).item() for _ in range(3)])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | {"KILN_STRICT": "1"}
    )
    assert done.returncode == 0 and done.stdout.startswith("["), done.stderr


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.masked_fill_(x > 0, 0),
        lambda x: x.bernoulli_(0.5),
        lambda x: x.tril_(),
        lambda x: x.t().cumsum_(0),
        lambda x: x.scatter_add_(0, torch.zeros_like(x, dtype=torch.int64), x.clone()),
        lambda x: torch.nn.functional.batch_norm(x.clone(), x[0].clone(), x[0].exp(), training=True),
    ],
)
def test_sizes_of_others_may_be_symbols(write):
    """Functionalization is PyTorch's and serves others, too, on whose tensors kiln's kernels for it know no sizes."""

    def f(x):
        y = x * 2
        return write(y), y

    def run(f, n):
        torch.manual_seed(0)
        return f(torch.linspace(-1, 1, n * 3).reshape(n, 3))

    torch.compiler.reset()
    compiled = torch.compile(f, backend="aot_eager", dynamic=True, fullgraph=True)
    for n in (3, 4, 7):
        assert_same(run(compiled, n), run(f, n), rtol=1e-5, atol=1e-6, strides=False)


AFTER_AN_ERROR = """
import torch, kiln

x = torch.ones(3)


def bad(x):
    torch._dynamo.graph_break()
    return x


try:
    torch.compile(bad, backend="eager", fullgraph=True)(x)
except Exception:
    pass
inner = torch.compile(lambda x: x + 1, backend="eager")
outside = kiln.disable(lambda x: inner(x))
print(kiln.compile(inner)(x).sum().item(), kiln.compile(lambda x: outside(x * 2))(x).sum().item())
"""


def test_frames_are_handed_on_once():
    """After an error torch.compile stays the evaluator of frames, and puts itself above kiln's a second time."""
    done = subprocess.run([sys.executable, "-c", AFTER_AN_ERROR], capture_output=True, text=True, timeout=120)
    assert done.stdout == "6.0 9.0\n", done


def test_compiling_what_torch_compile_compiled():
    def f(x):
        return x.sin() + 1

    class Methods:
        def double(self, x):
            return x * 2

    class Parent(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.child = torch.compile(torch.nn.Linear(3, 3), backend="eager")

        def forward(self, x):
            return self.child(x).relu()

    parent = Parent()
    x = torch.linspace(-1, 1, 3)
    for compiled, expected in (
        (kiln.compile(torch.compile(f), fullgraph=True), f(x)),
        (kiln.compile(torch.compile(Methods().double), fullgraph=True), x * 2),
        (kiln.compile(parent, fullgraph=True), parent.child._orig_mod(x).relu()),
        (kiln.compile(parent.child), parent.child._orig_mod(x)),
    ):
        for _ in range(4):
            assert_same(compiled(x), expected)
