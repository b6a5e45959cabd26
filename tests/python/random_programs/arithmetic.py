"""Chains of operators without side effects: what lowering, fusion and code generation make of them, with gradients."""

import random

import torch
import torch.nn.functional as F

from helpers import check_calls

from .grammar import Grammar, function_of

SHAPES = [(4, 6), (5,), (3, 4, 5), (2, 3, 4, 4), (8, 16), (1, 7), (6, 1), (17, 9), (2, 32, 8)]
STEPS = Grammar(
    step=[
        # pointwise
        *["$x.sin()", "$x * 0.5 + 1", "added($x, <x>)", "$x.exp().clamp(max=3)", "torch.relu($x)", "F.gelu($x)"],
        *["torch.sigmoid($x)", "$x.tanh() * $x", "$x.abs().sqrt()", "$x.pow(2)", "torch.where($x > 0, $x, $x * 0.1)"],
        *["($x > 0) * $x", "$x.masked_fill($x < -0.5, 0.0)", "$x.minimum($x.mean())"],
        # reductions and scans
        *["$x.sum(<d>, keepdim=True)", "$x.mean(<d>)", "$x.amax(<d>, keepdim=True)", "$x - $x.mean(<d>, keepdim=True)"],
        *["$x.softmax(<d>)", "$x.log_softmax(<d>)", "$x.logsumexp(<d>)", "$x.var(<d>, unbiased=False)", "$x.prod(<d>)"],
        *["F.layer_norm($x, $x.shape[-1:])", "$x.cumsum(<d>)", "$x.cumprod(<d>)", "$x.norm(dim=<d>)", "$x.argmax(<d>) * 1.0"],
        # views and copies
        *["$x.transpose(0, -1)", "$x.transpose(0, -1).contiguous()", "$x.reshape(-1)", "$x.unsqueeze(<d>)", "$x.squeeze()"],
        *["$x.reshape($x.shape[0], -1)", "$x.flatten().view(-1, 2)", "$x.flip(<d>)", "$x.roll(1, <d>)", "$x[..., ::2]"],
        *["torch.cat([$x, $x * 2], <d>)", "torch.stack([$x, $x.sin()], <d>)", "$x[1:]", "$x.expand(3, *$x.shape)"],
        *["$x.repeat(2, *[1] * ($x.dim() - 1))", "$x.repeat_interleave(2, <d>)", "F.pad($x, (1, 2))", "$x.unfold(-1, 2, 1)"],
        *["$x.movedim(0, -1)", "$x.chunk(2, -1)[0]", "torch.tril($x)", "$x.diagonal(0, 0, -1)", "F.glu($x, -1)"],
        # gathers
        *["$x.index_select(<d>, torch.tensor([0, 0]))", "$x.gather(-1, $x.argsort(-1))", "$x.sort(-1)[0]", "$x.topk(1, -1)[0]"],
        *["$x.scatter_add(-1, torch.zeros_like($x, dtype=torch.long), $x)", "F.one_hot($x.long().clamp(0, 4), 5) * 1.0"],
        # products, windows, norms
        *["$x @ $x.transpose(-1, -2)", "torch.einsum('...i,...i->...', $x, $x)", "F.conv1d($x.reshape(1, 1, -1), kernel)[0, 0]"],
        *["F.max_pool1d($x.reshape(1, 1, -1), 2)[0, 0]", "F.avg_pool1d($x.reshape(1, 1, -1), 3, 1, 1).reshape($x.shape)"],
        *["F.interpolate($x.reshape(1, 1, -1), scale_factor=2)[0, 0]"],
        *["F.batch_norm($x.reshape(-1, $x.shape[-1]), None, None, training=True)"],
    ],
)  # fmt: skip


def added(x, y):
    """The sum, where the shapes allow it."""
    try:
        return x + y
    except RuntimeError:
        return x * 1.5


def shorter(x):
    return x if x.numel() < 20000 else x.reshape(-1)[:1000]


def program(seed):
    """A step that eager refuses for its operands' shapes is left out."""
    r = random.Random(seed)
    scope = scope_of()
    known, lines = dict(zip("ab", tensors_of(seed))), []
    for number in range(r.randrange(3, 14)):
        name = f"v{number}"
        recent = list(known)[-4:]
        step = STEPS.text(r, "step", {"x": [*recent, *recent, "a", "b"], "d": ["0", "-1"]})
        try:
            known[name] = eval(f"shorter({step})", scope, known)
        except (RuntimeError, IndexError, ValueError):
            continue
        lines.append(f"    {name} = shorter({step})")
    made = list(known)[2:] or ["a"]
    results = r.sample(made, min(len(made), r.randrange(1, 4)))
    return "def f(a, b):\n" + "\n".join(lines) + f"\n    return [{', '.join(results)}]\n"


def scope_of():
    return {
        "torch": torch,
        "F": F,
        "added": added,
        "shorter": shorter,
        "kernel": torch.ones(1, 1, 3, dtype=torch.float64),
    }


def tensors_of(seed, grad=False):
    r, g = random.Random(seed), torch.Generator().manual_seed(seed)
    a, b = (torch.randn(r.choice(SHAPES), generator=g, dtype=torch.float64) for _ in range(2))
    if r.random() < 0.3:
        a = a.transpose(0, -1)
    return [t.requires_grad_(grad) for t in (a, b)]


def run(seed):
    function = function_of(program(seed), f"<arithmetic {seed}>", scope_of())
    for grad in (False, True):
        # Variances near zero make much of rounding.
        check_calls(function, [tensors_of(seed, grad)], rtol=1e-6, atol=1e-6)
