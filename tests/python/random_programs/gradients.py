"""Autograd as programs use it: gradients within the program and of it, of the second order too, hooks, custom functions,
checkpoints, modes, and torch.func's transformations."""

import random
import re
import textwrap

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import kiln
from helpers import tensors
from kiln.testing import difference

from .grammar import Grammar, function_of

FUNCTIONS = """
class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        ctx.save_for_backward(x)
        return x * factor
    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor * ctx.saved_tensors[0].cos(), None
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y
    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return (g * y if ctx.needs_input_grad[0] else None), (g * x * 2 if ctx.needs_input_grad[1] else None)
class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        s = x.sign()
        ctx.mark_non_differentiable(s)
        ctx.save_for_backward(s)
        return s, x * s
    @staticmethod
    def backward(ctx, gs, gx):
        return gx * ctx.saved_tensors[0]
class Inner(torch.autograd.Function):
    @staticmethod
    def forward(x, y):
        return (x @ y.mT).relu()
    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output)
    @staticmethod
    def backward(ctx, g):
        x, y, out = ctx.saved_tensors
        g = g * (out > 0)
        return g @ y, g.mT @ x
@torch.no_grad()
def frozen(x):
    return x * 2 + x.sum()
def block(x, y=None):
    x = x.tanh() * x
    return x if y is None else x + y.cos()
"""

STATEMENTS = Grammar(
    statement=[
        *["<v> = <value>"] * 10,
        *["<v>.register_hook(lambda g: g * 0.5)", "<v>.register_hook(lambda g: log.append(g.sum()))", "<v>.register_hook(lambda g: g.clamp(-1, 1))"],
        *["z = <value>\nz.retain_grad()\nkept.append(z)", "handle = <v>.register_hook(lambda g: g * 3)\n<v> = <value>\nhandle.remove()"],
        *["g, = torch.autograd.grad(<loss>, <leaf>, create_graph=<flag>, allow_unused=True)\nx = x if g is None else x + g"] * 3,
        "$v = <value>\nz = $v.sin()\ng, = torch.autograd.grad(z.sum(), $v, create_graph=<flag>)\ny = g * y",
        "gs = torch.autograd.grad(<loss>, [a, b], retain_graph=True, allow_unused=True)\nlog.append([g is None for g in gs])",
        "g, = torch.autograd.grad(<value>, <leaf>, torch.ones(3, 3, dtype=a.dtype), allow_unused=True, create_graph=<flag>)\nlog.append(g)",
        "g, = torch.autograd.grad(<loss>, a, create_graph=True, allow_unused=True)\nif g is not None and g.requires_grad:\n    x = x + torch.autograd.grad(g.pow(2).sum(), a, create_graph=<flag>, allow_unused=True)[0]",
        "<loss>.backward(retain_graph=True)",
        "<loss>.backward()",
        "with torch.no_grad():\n    <v> = <value>",
        "with torch.no_grad():\n    log.append(<value>)",
        "with torch.no_grad():\n    with torch.enable_grad():\n        <v> = <value>",
        "with torch.set_grad_enabled(len(kept) % 2 == 0):\n    <v> = <value>",
        "p = <value>.detach().clone().requires_grad_()\n(p * <value>.detach()).sin().sum().backward()\nx = x + p.grad",
        "p = <value>.detach().requires_grad_()\nfor _ in range(2):\n    g, = torch.autograd.grad((p.cos() * y.detach()).sum(), p)\n    p = (p - 0.1 * g).detach().requires_grad_()\nx = x * p",
        "<leaf>.grad = None",
        "log.append(<v>.requires_grad)\nlog.append(<v>.grad_fn is None)",
        "with torch.no_grad():\n    <leaf>.mul_(0.9)",
        "<v> = <v>.clone()\n<v>.add_(<value>)",
        "x = x.clone()\nx[0] = y[1]\nx[:, 1] *= 2",
        "if x.requires_grad:\n    x.register_hook(lambda g: log.append('x'))",
        "try:\n    <loss>.backward()\nexcept RuntimeError as e:\n    log.append(str(e)[:20])",
        "kiln.graph_break()",
        "x = x * 1\nkiln.graph_break()\nx.add_(<value>)\nt = <loss>\nkiln.graph_break()\ng, = torch.autograd.grad(t, x, retain_graph=True, allow_unused=True)\nlog.append(g)",
        "x = x * 1\nkiln.graph_break()\nx[0] *= 2\nt = x[0]\ny = y + x.sin() * t\nkiln.graph_break()\nif t.requires_grad:\n    t.retain_grad()\n    y.sum().backward(retain_graph=True)\n    log.append(t.grad)",
        "t = (x * 1)[1]\nkiln.graph_break()\nt.mul_(y[0])\ny = y + t.sin()\nkiln.graph_break()\nif t.requires_grad:\n    t.retain_grad()\n    y.sum().backward(retain_graph=True)\n    log.append(t.grad)",
    ],
    v=["x", "y"],
    leaf=["a", "b", "a", "b", "x", "w"],
    flag=["True", "True", "False"],
    loss=["<value>.sum()", "(<value> * <value>).mean()", "<value>.norm()", "<value>.logsumexp((0, 1))"],
    leaf_value=["x", "y", "a", "b", "w"],
    value=[
        *["<leaf_value>"] * 8,
        *["(<value> + <value>)", "(<value> * <value>)", "<value>.sin()", "(<value> @ <value>)", "<value>.tanh()", "F.softplus(<value>)", "<value>.mT", "<value>.exp().clamp(max=3)"],
        *["<value>.detach()", "<value>.softmax(-1)", "F.layer_norm(<value>, (3,))", "<value>.pow(3)", "F.linear(<value>, w)", "<value>.abs()"],
        *["Scale.apply(<value>, 2.0)", "Product.apply(<value>, <value>)", "Sign.apply(<value>)[1]", "Inner.apply(<value>, <value>)"],
        *["frozen(<value>)", "block(<value>)", "block(<value>, <value>)"],
        *["checkpoint(block, <value>, use_reentrant=False)", "checkpoint(block, <value>, <value>, use_reentrant=False)", "checkpoint(lambda t: block(t) * w, <value>, use_reentrant=False)"],
        *["torch.func.vmap(lambda r: r.softmax(0) * r.sum())(<value>)", "torch.func.grad(lambda t: (t.sin() * <leaf_value>).sum())(<value>)", "torch.func.jvp(block, (<value>,), (<value>,))[1]"],
        *["torch.func.vmap(torch.func.grad(lambda r, s: (r * s).cos().sum()), (0, None))(<value>, w[0])", "torch.func.jacrev(lambda t: t.sum(0).sin())(<value>).sum(0)", "torch.func.vjp(block, <value>)[1](<value>)[0]"],
        *["torch.func.hessian(lambda t: t.exp().sum())(<value>[0])", "torch.autograd.functional.jacobian(lambda t: t.cos().sum(0), <value>, create_graph=True).sum(0)"],
    ],
)  # fmt: skip


def program(seed):
    r = random.Random(seed)
    body = "\n".join(STATEMENTS.text(r, "statement") for _ in range(r.randrange(1, 7)))
    result = r.choice(
        ["x", "x, y", "x * y", "[x.sum(), y]", "u, x, u * y[0]", "u, v, u.sin() * v", "p, y, p[0], (p * y).sum()"]
    )
    views = {"u": "u, v = x[0], x[1:2]", "p": "p = a.view(3, 3)"}.get(result[0], "pass")
    lines = f"x, y = a * 1, b + w\n{body}\n{views}\nreturn {result}\n"
    return FUNCTIONS + "def f(a, b, w, log, kept):\n" + textwrap.indent(lines, "    ")


# What kiln refuses by its own words, and eager where an operator saves what kiln does not.
REFUSED = re.compile("cannot be differentiated twice|modified by an inplace operation")
REFUSED_IN_EAGER = re.compile("modified by an inplace operation|a second time")


def outcome(function, seed, refused, partial):
    """What the call, and what is differentiated afterwards, did; None if that cannot be compared. `partial`: the program
    asks for gradients of some inputs alone."""
    r, g = random.Random(seed), torch.Generator().manual_seed(seed)
    a, b, w = (torch.randn(3, 3, generator=g, dtype=torch.float64) for _ in range(3))
    a.requires_grad_()
    b.requires_grad_(r.random() < 0.6)
    w.requires_grad_(r.random() < 0.4)
    log, kept = [], []
    seen, after = [], None
    try:
        result = function(a, b, w, log, kept)
        seen.append(result)
        loss = sum(t.sin().sum() for t in tensors(result))
        after = r.choice(["backward", "backward", "twice", "second", "nothing", "result", "hook"])
        if after == "backward":
            loss.backward()
        elif after == "twice":
            loss.backward(retain_graph=True)
            loss.backward()
        elif after == "result":
            results = tensors(result)
            seen.append(torch.autograd.grad(results[-1].sin().sum(), results[0], retain_graph=True, allow_unused=True))
            results[0].backward(torch.ones_like(results[0]))
        elif after == "hook":
            if tensors(result)[0].requires_grad:
                tensors(result)[0].register_hook(lambda g: seen.append(g.clone()))
            loss.backward()
        elif after == "second":
            first = torch.autograd.grad(loss, a, create_graph=True, allow_unused=True)[0]
            seen.append(first)
            if first is not None and first.requires_grad:
                first.pow(2).sum().backward()
    except Exception as e:
        # A gradient by some inputs frees, in eager, what lies on the way to them alone.
        if refused.search(str(e)) or ((partial or after == "result") and "a second time" in str(e)):
            return None
        # The words about views name autograd's nodes.
        text = "about views" if "modified inplace" in str(e) else str(e).split("\n")[0]
        seen.append((type(e).__name__, text))
    requires = [t.requires_grad for t in tensors(seen)]
    if seen and isinstance(seen[-1], tuple) and isinstance(seen[-1][0], str):
        return seen  # how far an error lets the rest come is the order of nodes
    if "Trying to backward" in str(log):
        return None
    if (
        partial or after == "second"
    ):  # one node has the edges of all results: hooks of some that lead elsewhere run, too
        log = kept = []
    return seen, requires, log, [t.grad for t in (a, b, w, *kept)], [a.detach(), b.detach(), w.detach()]


def run(seed):
    name, found = f"<gradients {seed}>", []
    calls = [random.Random(seed).randrange(10**6) + k for k in range(4)]
    partial = "torch.autograd.grad(" in program(seed)
    for wrap, refused in ((lambda f: f, REFUSED_IN_EAGER), (kiln.compile, REFUSED)):
        scope = {"torch": torch, "F": F, "checkpoint": checkpoint, "kiln": kiln}
        function = wrap(function_of(program(seed), name, scope))
        found.append([outcome(function, call, refused, partial) for call in [*calls, calls[0]]])
    for number, (expected, actual) in enumerate(zip(*found)):
        if expected is None or actual is None:
            return
        text = difference(expected, actual, rtol=1e-6, atol=1e-8, path=f"call {number}")
        assert text is None, text
