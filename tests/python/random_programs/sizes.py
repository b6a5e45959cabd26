"""Calls of many sizes: what opens sizes, and what Python computes of them, branches on them and makes of them."""

import random
import textwrap

import torch
import torch.nn.functional as F

from helpers import check_calls

from .grammar import Grammar, function_of

STATEMENTS = Grammar(
    # b and t are the sizes of x: [b, t, 6]; y: [t], w: [6, 6], past: [b, s, 6], i: [b] of int64, n: a number.
    statement=[
        *["x = <x>"] * 8,
        *["y = <y>", "n = <int>", "s = <scalar>\nx = x * s"],
        "if <condition>:\n    x = <x>",
        "if <condition>:\n    x = <x>\nelse:\n    x = <x>",
        "for step in range(min(<int>, 4)):\n    x = x + step * <scalar>",
        "for row in x:\n    total = total + row.sum()",
        "past = torch.cat([past, x], 1)[:, -7:]\nx = x + past.mean(1, keepdim=True)",
        "parts = x.split(<positive>, 1)\nx = torch.cat([p * (k + 1) for k, p in enumerate(parts)], 1)",
        "parts = x.chunk(3, 1)\nx = torch.cat(parts[::-1], 1)\nn = n + len(parts)",
        "b, t = x.shape[:2]\nx = x.reshape(b, t, 2, 3).transpose(1, 2).reshape(b * 2, t, 3).mT.reshape(b, 2, 3, t).permute(0, 3, 1, 2).flatten(2)",
        "grid = torch.arange(x.shape[1])\nx = torch.where((grid[:, None] <= grid).any(1)[None, :, None], x, 0.0)",
        "mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(<small>)\n"
        "a = (x @ x.mT / x.shape[-1] ** 0.5).masked_fill(~mask, -9.0)\nx = a.softmax(-1) @ x",
        "pad = (-x.shape[1]) % <positive>\nx = F.pad(x, (0, 0, 0, pad))\nx = x[:, : x.shape[1] - pad]",
        "out = x.new_zeros(x.shape[0], <positive>, 6)\nout[:, : min(out.shape[1], x.shape[1])] = x[:, : min(out.shape[1], x.shape[1])]\ntotal = total + out.sum()",
        "x = x + F.interpolate(y[None, None], size=x.shape[1], mode='nearest')[0, 0][None, :, None]",
        "x = F.scaled_dot_product_attention(x, past, past)",
        "x = F.conv1d(x.mT, w[:, :, None].expand(6, 6, <odd>), padding=x.shape[1] % 2).mT",
        "x = x + F.adaptive_avg_pool1d(x.mT, <positive>).mean(-1)[:, None]",
        "lengths = (i % x.shape[1]) + 1\nvalid = torch.arange(x.shape[1])[None] < lengths[:, None]\nx = x * valid[..., None]",
        "x = x.flip(1) if x.shape[1] % 2 else x.roll(<small>, 1)",
        "names[x.shape[1]] = n",
        "assert x.shape[-1] == 6, f'{x.shape}'",
        "total = total + x.numel() / max(<int>, 1)",
        "def pooled(v, size=x.shape[1]):\n    return v.sum() / size\ntotal = total + pooled(x)",
        "kiln.graph_break()",
        "x[:, <small>:] = 0.5" ,
        "x = x.index_select(1, torch.arange(x.shape[1] - 1, -1, -1))",
    ],
    x=[
        *["<x1>"] * 4, "<x1> + <x1>", "<x1> * <scalar>", "<x1> @ w", "F.layer_norm(<x1>, (6,))", "<x1>.softmax(1)", "<x1>.cumsum(1)",
        *["x - x.mean(1, keepdim=True)", "x + y_of(x, y)", "x.view(x.shape[0] * x.shape[1], 6).view(x.shape)", "x.view(-1, 6).relu().view_as(x)"],
        *["x[:, :<int>]", "x[:, <small>:]", "x[:, -<positive>:]", "x[: max(1, <int>)]", "x[:, ::2]", "x.repeat(1, 2, 1)[:, : x.shape[1]]"],
        *["torch.cat([x, x[:, :1]], 1)", "torch.cat([x, past], 1)", "x.expand(x.shape)", "x.unsqueeze(0).expand(2, -1, -1, -1)[1]"],
        *["x + torch.arange(x.shape[1])[None, :, None]", "x + torch.full((x.shape[1], 1), <scalar>)", "x / x.shape[1]", "x * (x.shape[0] + 1)"],
        *["x + past[:, -1:]", "x.transpose(0, 1).contiguous().transpose(0, 1)", "torch.stack(x.unbind(0))", "x.unflatten(-1, (2, -1)).sum(-2).repeat(1, 1, 2)"],
        *["torch.einsum('btc,cd->btd', x, w)", "x[torch.arange(x.shape[0]), i % x.shape[1]][:, None].expand(-1, x.shape[1], -1)", "x.float().norm(dim=-1, keepdim=True) + x"],
        *["F.dropout(x, 0.0)", "x.reshape(-1, 6)[: x.shape[0] * x.shape[1]].reshape(x.shape[0], -1, 6)", "F.pad(x, (0, 0, 1, 0))[:, :-1]"],
    ],
    x1=["x", "x", "x.sin()", "x.tanh()", "(x * 0.5)", "x.relu()", "x.clone()", "torch.zeros_like(x)", "torch.ones(x.shape)", "x.new_ones(x.shape)"],
    y=["y.sin()", "y + 1", "y[: x.shape[1]]", "torch.linspace(0, 1, x.shape[1])", "torch.arange(<positive>) * 1.0", "y.cumsum(0)", "x.mean((0, 2))", "torch.cat([y, y])"],
    scalar=["n", "0.5", "1.5", "x.shape[1] / 4", "1 / (1 + <int>)", "len(y)", "float(<int>)", "math.sqrt(x.shape[1])", "(x.shape[1] ** -0.5)", "y.mean()"],
    int=["n", "x.shape[0]", "x.shape[1]", "x.size(1) // 2", "(x.shape[1] + 1)", "len(x)", "past.shape[1] - 1", "y.numel()", "min(n, x.shape[1])", "3", "x.shape[1] * x.shape[0]", "x.shape[1] % 3", "max(x.shape)"],
    positive=["max(1, <int>)", "2", "3", "(x.shape[1] // 2 + 1)", "(1 + n)"],
    small=["0", "1", "2", "n % 3"],
    odd=["1", "3"],
    condition=[
        *["x.shape[1] > 4", "x.shape[0] == 1", "x.shape[1] == y.shape[0]", "n < x.shape[1]", "x.shape[1] % 2 == 0", "past.shape[1] > x.shape[1]"],
        *["x.shape[0] != past.shape[0]", "x.numel() > 60", "not n", "len(x) in (2, 3)", "x.is_contiguous()", "x.shape == past.shape", "1 < x.shape[1] <= 6"],
    ],
)  # fmt: skip


def y_of(x, y):
    return y[: x.shape[1]][:, None] if y.shape[0] >= x.shape[1] else y.sum()


def program(seed):
    r = random.Random(seed)
    body = "\n".join(STATEMENTS.text(r, "statement") for _ in range(r.randrange(2, 7)))
    result = r.choice(["x, n", "x, y", "x.sum(1), total", "x.shape, x", "x, past", "x, names"])
    lines = f"total, names = 0.0, {{}}\n{body}\nreturn {result}\n"
    return "def f(x, y, w, past, i, n):\n" + textwrap.indent(lines, "    ")


def arguments(seed, common):
    """Of the sizes some are the same in most calls of one program."""
    r, g = random.Random(seed), torch.Generator().manual_seed(seed)
    b, t, s, u = (r.choice(choice) for choice in common["sizes"])
    x = torch.randn(b, t, 6, generator=g)
    past = torch.randn(b if r.random() < 0.9 else 1, s, 6, generator=g)
    y = torch.randn(t if r.random() < 0.7 else u, generator=g)
    if r.random() < 0.15:
        x = torch.randn(t, b, 6, generator=g).transpose(0, 1)
    if common["grad"]:
        x.requires_grad_()
        past.requires_grad_(common["grad"] == 2)
    n = common["n"] if r.random() < 0.6 else r.randrange(5)
    return [x, y, torch.randn(6, 6, generator=g) / 3, past, torch.randint(0, 99, (b,), generator=g), n]


def run(seed):
    scope = {"torch": torch, "F": F, "math": __import__("math"), "kiln": __import__("kiln"), "y_of": y_of}
    function = function_of(program(seed), f"<sizes {seed}>", scope)
    r = random.Random(seed)
    choices = [[2], [3], [1, 2, 3], [2, 2, 2, 5], [4, 5, 6, 7, 8], [1, 2, 3, 4], list(range(1, 12))]
    common = {"sizes": [r.choice(choices) for _ in range(4)], "grad": r.choice([0, 0, 1, 2]), "n": r.randrange(4)}
    calls = [arguments(r.randrange(10**6), common) for _ in range(9)]
    check_calls(function, [*calls, calls[0]], rtol=2e-3, atol=2e-3)
