"""Modules that change between calls: hooks, flags, parameters and children that come and go, modes and shapes of the caller."""

import copy
import functools
import random
import textwrap
import types

import torch
import torch.nn.functional as F
from torch import nn

import kiln
from kiln.testing import difference

from .grammar import Grammar, function_of

# How a part is made, and what it does to x (batch n, 6 channels); both name it `$name`.
PARTS = [
    ("nn.Linear(6, 6)", "x = self.$name(x)"),
    ("nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))", "x = x + self.$name(x)"),
    ("nn.ModuleList([nn.Linear(6, 6), nn.Sigmoid(), nn.LayerNorm(6)])", "for layer in self.$name:\n    x = layer(x)"),
    ("nn.ModuleDict({'a': nn.Linear(6, 6), 'b': nn.Softplus()})", "x = self.$name['b'](self.$name['a'](x))"),
    ("nn.ModuleDict({'a': nn.Linear(6, 6), 'b': nn.ELU()})", "for key, layer in self.$name.items():\n    x = layer(x) + len(key)"),
    ("nn.ParameterList([torch.ones(6), torch.zeros(6)])", "x = x * self.$name[0] + self.$name[1]"),
    ("nn.ParameterDict({'w': torch.ones(6) * 0.5})", "x = x * self.$name['w']"),
    ("nn.BatchNorm1d(6)", "x = self.$name(x)"),
    ("nn.Dropout(0.4)", "x = self.$name(x)"),
    ("Counting()", "x = self.$name(x)"),
    ("Scaled(6, 6)", "x = self.$name(x)"),
    ("Scaled(6, 6)", "x = self.$name(x, shift=1.0)"),
    ("Residual(nn.Linear(6, 6))", "x = self.$name(x)"),
    ("Residual(Scaled(6, 6), Counting())", "x, *rest = self.$name(x), x"),
    ("functools.partial(F.leaky_relu, negative_slope=0.2)", "x = self.$name(x)"),
    ("0.5", "x = x * self.$name"),
    ("'relu'", "x = getattr(F, self.$name)(x)"),
    ("[]", "self.$name.append(x.shape[0])\nx = x + len(self.$name)"),
    ("None", "if self.training:\n    x = x * 1.5"),
    ("None", "if self.flag:\n    x = x.flip(-1)\nelse:\n    x = x.roll(1, -1)"),
    ("None", "with torch.no_grad():\n    x = x + self.total\n    self.total = x.mean(0).detach()"),
    ("None", "with torch.autocast('cpu', dtype=torch.bfloat16):\n    x = F.linear(x, self.head.weight)\nx = x.to(self.head.weight.dtype)"),
    ("None", "with torch.autocast('cpu', enabled=False):\n    x = F.linear(x.to(self.head.weight.dtype), self.head.weight)"),
    ("None", "x = self.mix(x, self.scale)"),
    ("None", "self.note(x=x, scale=self.scale)"),
    ("None", "x = sum((m(x) for m in self.children() if isinstance(m, nn.Linear)), x)"),
    ("None", "x = x + sum(p.sum() for p in self.parameters()) * 0.01"),
    ("None", "x = x * dict(self.named_buffers())['total'].numel() / 6"),
]  # fmt: skip

CLASSES = """
class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
    def forward(self, x):
        self.calls += 1
        self.seen += x.shape[0]
        return x / self.calls + self.seen
class Scaled(nn.Linear):
    @property
    def size(self):
        return self.weight.shape[0]
    def forward(self, x, shift=0.0, **rest):
        return super().forward(x) / self.size + shift
class Residual(nn.Module):
    def __init__(self, *inner):
        super().__init__()
        self.inner = nn.ModuleList(inner)
    def forward(self, x):
        for layer in self.inner:
            x = x + layer(x)
        return x
class Base(nn.Module):
    @staticmethod
    def mix(x, scale):
        return x * scale + 1
    def note(self, **what):
        self.last = {k: v for k, v in what.items() if k != "x"}
"""

SCENARIO = Grammar(
    call=[
        *["seen.append(model(x))"] * 3,
        "with torch.no_grad():\n    seen.append(model(x))",
        "with torch.inference_mode():\n    seen.append(model(x).sum().item())",
        "with torch.autocast('cpu', dtype=torch.bfloat16):\n    seen.append(model(x))",
        *["model(x).square().sum().backward()\nseen.append([p.grad if p.grad is None else p.grad.clone() for p in net.parameters()])"] * 2,
        "y = x.detach().clone().requires_grad_()\nseen.append(torch.autograd.grad(model(y).cos().sum(), y))",
        "y = x.detach().clone().requires_grad_()\nmodel(model(y)).sum().backward()\nseen.append(y.grad)",
        "out = model(x)\nout.retain_grad()\nout.sum().backward()\nseen.append(out.grad)",
        "try:\n    model(x[0, :5])\nexcept (RuntimeError, ValueError) as e:\n    seen.append(type(e).__name__)",
    ],
    hook=[
        "lambda m, a, out: log.append(float(out.detach().sum()))",
        "lambda m, a, out: out * 1.1",
        "lambda m, a, out: log.append(type(m).__name__)",
        "lambda m, a, out: setattr(m, 'last_shape', tuple(out.shape))",
    ],
    pre=["lambda m, a: (a[0] * 0.9, *a[1:])", "lambda m, a: log.append(len(a))", "lambda m, a: a[0] + 1"],
    back=["lambda m, gi, go: log.append([None if g is None else tuple(g.shape) for g in gi])", "lambda m, gi, go: tuple(g * 2 for g in gi if g is not None)"],
    part=["net.head", "net.head", "list(net.children())[-1]", "net", "list(net.modules())[len(log) % 3 - 1]"],
    change=[
        *["net.eval()", "net.train()", "<part>.eval()"],
        *["handles.append(<part>.register_forward_hook(<hook>))"] * 2,
        *["handles.append(<part>.register_forward_pre_hook(<pre>))"] * 2,
        "handles.append(net.head.register_full_backward_hook(<back>))",
        "handles.append(net.head.register_forward_hook(lambda m, a, k, out: log.append(sorted(k)), with_kwargs=True))",
        "handles.append(net.head.weight.register_hook(lambda g: g * 0.5))",
        *["if handles:\n    handles.pop().remove()"] * 2,
        *["<part>.requires_grad_(False)", "net.requires_grad_(True)", "net.head.weight.requires_grad = not net.head.weight.requires_grad"],
        *["net.head.weight.data.mul_(1.1)", "with torch.no_grad():\n    net.head.bias.add_(0.1)", "net.head.weight.data = net.head.weight.data * 2"],
        *["net.load_state_dict({k: v * 1 for k, v in net.state_dict().items()})", "net.head = nn.Linear(6, 6)", "net.head = Scaled(6, 6)"],
        *["net.scale = net.scale * 2", "net.scale = 3", "net.flag = not net.flag", "net.total = torch.ones(6)", "net.extra = nn.Tanh()"],
        *["net.double()\nx = x.double()", "net.float()\nx = x.float()", "net.zero_grad()", "net.zero_grad(set_to_none=False)"],
        "[p.grad is None or p.data.sub_(p.grad, alpha=0.01) for p in net.parameters()]",
        "torch.optim.SGD(net.parameters(), lr=0.01).step()",
        *["x = torch.randn(3, 6, dtype=x.dtype)", "x = torch.randn(5, 6, dtype=x.dtype).requires_grad_()", "x = torch.randn(6, 4, dtype=x.dtype).t()"],
        *["net = copy.deepcopy(net)\nmodel = wrap(net)", "torch.manual_seed(3)", "net.register_buffer('late', torch.ones(6))"],
        "net.head.forward = types.MethodType(lambda self, x: x * 2, net.head)",
        "net.head.__dict__.pop('forward', None)",
        "net.head.weight = nn.Parameter(torch.eye(6, dtype=x.dtype))",
        "net.head.bias = None",
        "net.apply(lambda m: setattr(m, 'visited', True))",
        "nn.init.ones_(net.head.weight)",
        "type(net).mix = staticmethod(lambda x, scale: x - scale)",
    ],
)  # fmt: skip


def program(seed):
    r = random.Random(seed)
    made, used = [], []
    for number, (make, use) in enumerate(r.choices(PARTS, k=r.randrange(1, 5))):
        name = f"part{number}"
        if make != "None":
            made.append(f"self.{name} = {make}")
        used += use.replace("$name", name).splitlines()
    lines = [*CLASSES.strip().splitlines(), "class Net(Base):", "    def __init__(self):", "        super().__init__()"]
    made += [
        "self.head = nn.Linear(6, 6)",
        "self.scale = 0.5",
        "self.flag = True",
        "self.register_buffer('total', torch.zeros(6))",
    ]
    lines += ["        " + line for line in made]
    lines += ["    def forward(self, x):", *("        " + line for line in used), "        return self.head(x)", ""]
    body = ["torch.manual_seed(0)", "seen, log, handles = [], [], []", "net, x = Net(), torch.randn(4, 6)"]
    if r.random() < 0.6:
        body.append("net, x = net.double(), x.double()")
    body.append("model = wrap(net)")
    for _ in range(r.randrange(3, 8)):
        if r.random() < 0.7:
            body.append(SCENARIO.text(r, "change"))
        body.append(SCENARIO.text(r, "call"))
    body.append(
        "return seen, log, dict(net.state_dict()), {k: v for k, v in vars(net).items() if not k.startswith('_')}"
    )
    return "\n".join(lines) + "\ndef f(wrap):\n" + textwrap.indent("\n".join(body), "    ") + "\n"


def as_function(net):
    return kiln.compile(lambda x: net(x))


WAYS = {"module": kiln.compile, "function": as_function, "backend": functools.partial(kiln.compile, backend="eager")}


def outcome(source, name, wrap):
    scope = {"torch": torch, "nn": nn, "F": F, "copy": copy, "functools": functools, "types": types}
    try:
        return function_of(source, name, scope)(wrap), torch.get_rng_state()
    except Exception as e:
        return type(e).__name__, str(e).split("\n")[0]


def run(seed):
    source, name = program(seed), f"<modules {seed}>"
    # Of float32 a sum in another order, of bfloat16 a bit that such a sum has changed.
    single = "net.double(), x" not in source or "float()" in source
    tolerance = 1e-7 if not single else 0.07 if "autocast('cpu', dtype" in source else 1e-3
    expected = outcome(source, name, lambda net: net)
    for way, wrap in WAYS.items():
        kiln.reset()
        text = difference(expected, outcome(source, name, wrap), rtol=tolerance, atol=tolerance, path=way)
        assert text is None, text
