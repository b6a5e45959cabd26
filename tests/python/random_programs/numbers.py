"""Ints and floats, Python's and NumPy's, that change from call to call: as operands of tensors and of each other, as places
and bounds in tensors, in branches, and as results."""

import math
import random

import numpy as np
import torch

import kiln
from helpers import outcome
from kiln.testing import difference

from .grammar import Grammar, function_of

STATEMENTS = Grammar(
    int=[
        *["i", "j", "(i + 1)", "(i * 2)", "(i - j)", "(i // 2)", "(i % 3)", "abs(i)", "int(i)", "int(a * 3)", "len(l)", "-i"],
        *["max(i, 2)", "min(i, j)", "x.shape[0]", "(i ** 2)", "(i if i > j else 2)", "round(a)", "int(i + j)", "(i & 3)", "l[0]"],
    ],
    float=[
        *["a", "b", "(a * 2)", "(a + i)", "(i / 3)", "(a / b)", "float(i)", "math.sqrt(abs(a))", "(a - b)", "min(a, 1.0)", "-a"],
        *["max(a, b)", "(a ** 2)", "(i * a)", "(a // 0.5)", "(a % 0.7)", "abs(b)", "math.exp(-a)", "(a if a > b else 0.5)"],
    ],
    tensor=[
        *["y", "(x + <float>)", "(x * <int>)", "(<float> * x)", "(x / (<float> + 3.5))", "(x - <int>)", "x.lerp(y, <float>)"],
        *["x[<int> % 4]", "x[:, <int> % 5]", "x[<int> % 4, <int> % 5]", "x[:<int> % 4 + 1]", "x[..., <int> % 5:]"],
        *["x.t()[<int> % 5, None]", "x[torch.tensor([0, 1]), <int> % 5]", "x.view(-1)[<int> % 20]", "x.narrow(0, <int> % 3, 1)"],
        *["x.clamp(<float>, 2)", "x.clamp(min=<float>)", "torch.where(x > <float>, x, <float>)", "x.masked_fill(x > <float>, <int>)"],
        *["torch.full((2,), <float>)", "torch.tensor([<float>, <float>])", "torch.tensor([<int>, 1])", "torch.tensor(<float>)"],
        *["torch.arange(<int> % 6 + 1)", "torch.zeros(<int> % 4 + 1, 2)", "x.repeat_interleave(<int> % 3 + 1, 0)"],
        *["(x.half() * <float>)", "(x.bfloat16() + <float>)", "(x % (<float> + 3.5))", "torch.add(x, y, alpha=<float>)"],
        *["x.index_select(0, torch.tensor([<int> % 4]))", "x.roll(<int>, 0)", "x.mean(<int> % 2)", "x.sum() * <float>"],
        *["(x * (<int> > 2))", "x.long() * <int>", "torch.softmax(x / (abs(<float>) + 1), -1)", "(x > <int>).float()"],
    ],
    condition=["<int> > 2", "<float> > 0.5", "<int> == j", "<float> < <int>", "<int>"],
    result=["<int>", "<float>", "(<condition>)", "f'{<float>:.3f}'"],
)  # fmt: skip


def program(seed):
    r = random.Random(seed)
    names = [f"t{k}" for k in range(r.randint(1, 3))]
    lines = ["def f(x, y, i, j, a, b, l):"]
    lines += [f"    {name} = {STATEMENTS.text(r, 'tensor')}" for name in names]
    if r.random() < 0.3:
        lines.append(f"    if {STATEMENTS.text(r, 'condition')}:\n        t0 = t0 * 2")
    if r.random() < 0.2:
        lines.append("    kiln.graph_break()")
    results = names + [STATEMENTS.text(r, "result") for _ in range(r.randrange(3))]
    return "\n".join([*lines, f"    return [{', '.join(results)}]", ""])


def shown(result):
    if result[0] == "raised":
        return result[1].__name__, result[2][:100]
    return [r if isinstance(r, torch.Tensor) else (type(r).__name__, repr(r)) for r in result[1]]


def layouts(values):
    return [(v.dtype, v.stride()) for v in values if isinstance(v, torch.Tensor)]


def run(seed):
    r, g = random.Random(seed), torch.Generator().manual_seed(seed)
    function = function_of(program(seed), f"<numbers {seed}>", {"torch": torch, "math": math, "kiln": kiln})
    compiled = kiln.compile(function)
    whole, real = r.choice([int, int, np.int64]), r.choice([float, float, np.float64])
    other = r.choice([int, whole])
    x, y = torch.randn(4, 5, generator=g), torch.randn(4, 5, generator=g)
    for call in range(7):
        a, b = r.choice([0.25, 0.5, 1.5, 2.25, -0.75]), r.choice([0.5, 1.25, 3.0])
        args = (
            x,
            y,
            whole(r.randint(0, 6)),
            other(r.randint(1, 4)),
            real(a),
            real(b),
            [r.randint(0, 2)] * r.randint(1, 3),
        )
        with np.errstate(all="ignore"):
            expected, actual = [shown(outcome(f, args, {})[0]) for f in (function, compiled)]
        text = difference(expected, actual, rtol=2e-3, atol=2e-3, path=f"call {call}")
        assert text is None, f"{args[2:]}: {text}"
        assert layouts(expected) == layouts(actual), f"{args[2:]}: call {call}: {layouts(expected)}, {layouts(actual)}"
