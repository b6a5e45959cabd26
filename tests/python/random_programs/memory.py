"""Views, in-place writes and autograd's modes: aliasing, layouts, versions and histories of arguments and results."""

import random
import textwrap

import torch

import kiln
from helpers import check_calls

from .grammar import Grammar, function_of

SHAPES = [(3, 3), (3, 3), (2, 3), (3,), (3, 3, 3), (1, 3), (4, 3)]
STATEMENTS = Grammar(
    v=["a", "b", "c", "d"],
    d=["0", "-1"],
    statement=[
        *["<v> = <value>"] * 12,
        *["<write>"] * 5,
        "with torch.no_grad():\n    <v> = <value>",
        "with torch.no_grad():\n    <write>",
        "kiln.graph_break()\n<v> = <value>",
    ],
    value=[
        *["<v> + <v>", "<v> * <v>", "<v> - <v>", "<v>.sin()", "<v>.abs().sqrt()", "<v> * 0.5 + 1", "<v>.pow(2)", "torch.relu(<v>)"],
        *["torch.where($v > 0, $v, <v>)", "<v>.clamp(-1, 1)", "<v>.exp().clamp(max=5)", "(<v> > 0).float()", "$v.masked_fill($v > 0.5, 2.0)"],
        *["<v>.double().float()", "<v>.to(torch.bfloat16).float()", "<v>.clone()", "<v>.contiguous()", "<v>.detach()"],
        *["<v>.t()", "<v>.transpose(0, -1)", "<v>[1:]", "<v>[..., 0]", "<v>[0]", "<v>[::2]", "<v>.reshape(-1)", "<v>.unsqueeze(<d>)"],
        *["<v>.squeeze()", "$v.expand(2, *$v.shape)", "$v.view($v.shape)", "<v>.flatten()", "<v>.select(<d>, 0)", "<v>.narrow(<d>, 0, 1)"],
        *["<v>.diagonal()", "<v>.mT", "<v>.split(2, <d>)[0]", "<v>.chunk(2, <d>)[-1]", "<v>.unbind(<d>)[0]", "<v>.tensor_split(2, <d>)[0]"],
        *["<v>.sum(<d>)", "<v>.mean(<d>, keepdim=True)", "<v>.softmax(<d>)", "<v>.cumsum(<d>)", "<v>.max(<d>)[0]", "<v>.norm()"],
        *["<v>.max(<d>).values * 2", "<v>.argmax(<d>).float()", "<v>.var(<d>, unbiased=False)", "<v>.logsumexp(<d>)"],
        *["torch.cat([$v, $v], <d>)", "torch.stack([$v, $v], <d>)", "<v> @ <v>", "<v>.matmul(<v>.transpose(0, -1))", "<v>.flip(<d>)"],
        *["<v>.roll(1, <d>)", "<v>.sort(<d>)[0]", "torch.tril(<v>)", "<v>.index_select(0, torch.tensor([0]))", "$v.gather(-1, $v.argsort(-1))"],
        *["torch.nn.functional.pad(<v>, (1, 1))", "$v.repeat(2, *[1] * ($v.dim() - 1))", "torch.nn.functional.gelu(<v>)"],
        *["torch.nn.functional.layer_norm($v, $v.shape[-1:])", "torch.einsum('...i,...i->...', $v, $v)"],
        *["torch.outer(<v>.reshape(-1)[:3], <v>.reshape(-1)[:3])", "<v>.double().sum(<d>).float()"],
    ],
    write=[
        *["<v>.add_(<v>)", "<v>.mul_(2)", "<v>.zero_()", "<v>.copy_(<v>)", "<v>.relu_()", "<v>.fill_(0.5)", "<v>.clamp_(-1, 1)"],
        *["<v>[0] = 1.5", "<v>[..., 0] = <v>.sum()", "<v> += 1", "<v> *= <v>", "$v[$v > 0] = 0.25", "$v.sub_($v.mean())"],
        *["<v>[1:] += 1", "<v>.transpose(0, -1).mul_(3)", "<v>.reshape(-1)[0] = 7", "<v>.view(-1)[:2].zero_()", "<v>.detach().mul_(1.5)"],
        *["<v>.t_()", "<v>.unsqueeze_(0)", "$v.masked_fill_($v > 1, 0.0)", "<v>.index_fill_(0, torch.tensor([0]), 2.0)"],
        *["$v.scatter_(0, torch.zeros_like($v, dtype=torch.long), torch.ones_like($v))", "torch.add(<v>, 1, out=<v>)"],
    ],
)  # fmt: skip


def program(seed):
    r = random.Random(seed)
    lines = [STATEMENTS.text(r, "statement") for _ in range(r.randrange(2, 9))]
    results = r.choice(["a", "a, b", "a, b, c, d", "d, c", "a, a, b"])
    body = textwrap.indent("\n".join(lines), "    ")
    return f"def f(a, b, c, d):\n{body}\n    return [{results}]\n"


def tensors_of(seed):
    r, g = random.Random(seed), torch.Generator().manual_seed(seed)

    def one():
        shape = r.choice(SHAPES)
        make = r.choice(["plain"] * 5 + ["transposed", "gaps", "offset"])
        if make == "transposed":
            t = torch.randn(shape[::-1], generator=g).permute(*reversed(range(len(shape))))
        elif make == "gaps":
            t = torch.randn([2 * n for n in shape], generator=g)[tuple(slice(None, None, 2) for _ in shape)]
        elif make == "offset":
            t = torch.randn(shape[0] + 1, *shape[1:], generator=g)[1:]
        else:
            t = torch.randn(shape, generator=g)
        return t.requires_grad_() if r.random() < 0.35 else t

    tensors = [one() for _ in range(4)]
    if r.random() < 0.1:
        tensors[1] = tensors[0]
    if r.random() < 0.1:
        tensors[2] = tensors[0].detach()
    return tensors


def run(seed):
    function = function_of(program(seed), f"<memory {seed}>", {"torch": torch, "kiln": kiln})
    r = random.Random(seed)
    calls = [tensors_of(r.randrange(10**6)) for _ in range(3)]
    # float32 sums in another order, of values that grow with each step.
    check_calls(function, [*calls, calls[0]], rtol=5e-3, atol=1e-2)
