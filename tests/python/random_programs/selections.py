"""What is taken out of tensors and put into them by position: indexing of all kinds, gathers, scatters, masks, sorting,
and results whose sizes the data say."""

import random
import textwrap

import torch
import torch.nn.functional as F

from helpers import check_calls

from .grammar import Grammar, function_of

STATEMENTS = Grammar(
    # x: [n, m, 5], y: [n, m], i: [k] of int64 in [-2, 2], j: [n] in [0, m), b: bool [n, m], p: an int
    statement=[
        *["out.append(<value>)"] * 6,
        *["x = <same>"] * 4,
        "<write>",
        "<write>",
        "y = <like_y>",
        "i = <index>",
        "b = <mask>",
        "x = x.clone()",
    ],
    value=[
        *["x[<key>]", "x[<key>, <key>]", "x[..., <key>]", "x[<key>, ..., <slice>]", "x[:, <key>]", "x[None, <key>]", "x[<key>, None]"] * 2,
        *["x[b]", "y[b]", "x[b].sum(0)", "x[b, 1]", "x[:, b[0]]", "x[b.nonzero(as_tuple=True)]", "x[b.any(1)]", "y[y > 0]", "x[..., x[0, 0] > 0]"],
        *["x.index_select(<dim>, i % 2)", "x.gather(<dim>, (x > 0).long())", "x.take(i % x.numel())", "torch.take_along_dim(x, x.argsort(<dim>), <dim>)"],
        *["x.masked_select(b[..., None])", "b.nonzero()", "torch.argwhere(y > 0.2)", "torch.where(y > 0)[0]", "y.unique()", "(y * 2).round().unique(return_inverse=True, return_counts=True)"],
        *["torch.where(b[..., None], x, <scalar>)", "torch.where(b, y, -y)", "torch.where(x > 0, x, x.mean())", "torch.where(b, 1, 2)"],
        *["x.sort(<dim>, descending=<flag>)", "x.sort(dim=<dim>, stable=True).indices", "x.topk(2, <dim>)", "x.topk(1, <dim>, largest=False).values", "x.kthvalue(1, <dim>)", "x.median(<dim>)", "y.mode(1).values", "x.argsort(<dim>)"],
        *["x.max(<dim>)", "x.argmin(<dim>, keepdim=<flag>)", "x.aminmax(dim=<dim>)", "x.cummax(<dim>)", "x.amax((0, 2))", "y.argmax()", "x.cumsum(<dim>).diff(dim=<dim>)"],
        *["F.one_hot(j, x.shape[1])", "torch.bucketize(y, torch.tensor([-0.5, 0.0, 0.5]))", "torch.searchsorted(y.sort(1).values, y)", "torch.histc(y, 4, -1, 1)", "torch.bincount(j, minlength=4)", "torch.isin(j, i)"],
        *["x.unfold(1, 2, 1)", "x.split([1, x.shape[1] - 1], 1)", "x.tensor_split((1, 2), 0)", "x.chunk(2, 2)", "x.unbind(<dim>)[-1]", "x.narrow(1, 1, x.shape[1] - 1)", "torch.tril(y)", "torch.triu(x.mT, 1)", "x.diagonal(0, 1, 2)", "torch.diag_embed(y)"],
        *["x.repeat_interleave(2, <dim>)", "x.repeat_interleave(j % 3, 0)", "x.flip((0, 2))", "x.roll((1, -1), (0, 2))", "x.rot90(1, (0, 1))", "torch.tril_indices(3, 3)", "torch.combinations(j)", "torch.cartesian_prod(i, j)"],
        *["torch.zeros(4, 5).index_add(0, j % 4, x[:, 0])", "torch.zeros(4, 5).scatter_reduce(0, (j % 4)[:, None].expand(-1, 5), x[:, 0], '<reduce>', include_self=<flag>)"],
        *["torch.zeros(x.shape).scatter(1, j[:, None, None].expand(-1, 1, 5), x)", "torch.ones(4, 5).index_copy(0, torch.arange(min(4, len(x))), x[:4, 0])", "x.index_fill(<dim>, i % 2, <scalar>)"],
        *["x.masked_fill(b[..., None], <scalar>)", "x.masked_scatter(b[..., None], x.flip(0))", "torch.index_put(x, (i % 2, i % 2), x[0, :1], accumulate=True)", "torch.gather(y, 1, j[:, None])"],
        *["F.embedding(j, x[0])", "F.embedding_bag(j, x[0], torch.tensor([0, 1]))", "x.select_scatter(y, 2, 1)", "x.slice_scatter(x[:, :1], 1, 0, 1)", "torch.diagonal_scatter(y, torch.zeros(min(y.shape)))", "x[:, [1, 0]]", "x[[0, -1], [1, 0]]", "x[(i % 2).tolist()]"],
    ],
    same=["x * 2", "x.flip(1)", "x.sin()", "x[:, torch.randperm(x.shape[1])]" , "x[torch.arange(len(x) - 1, -1, -1)]", "x.gather(1, x.argsort(1))", "x.masked_fill(x > 1, 0.0)", "x + y[..., None]", "x.mT.contiguous().mT"],
    like_y=["y.flip(0)", "x[..., 1]", "x.sum(2)", "y[torch.arange(len(y))]", "y.sort(1).values", "y.masked_fill(b, 0.1)", "x.select(2, 0)"],
    index=["i.flip(0)", "i[i != 1]", "j[:3] - 1", "torch.arange(-1, 1)", "i.unique()", "i.clamp(-1, 0)", "torch.tensor([0, -1, 1])"],
    mask=["b.logical_not()", "y > y.mean()", "b & (y < 0.5)", "b.clone().fill_(True)", "torch.zeros_like(b)", "x[..., 0] > 0"],
    key=["0", "-1", "p", "i", "i[:, None]", "(i % 2)", "j", "[0, 1]", "<slice>", "<slice>", "b.any(1).nonzero()[:, 0]", "torch.tensor(1)", "i[0]", "[False, True]", "None", "slice(None, p)", "j[j > 0]"],
    slice=[":", "1:", "::2", ":-1", "p:", ":p", "-2:", "1:3:2", "5:2"],
    dim=["0", "1", "2", "-1"],
    flag=["True", "False"],
    scalar=["0.5", "-1", "y[0, 0]", "float('inf')", "p", "2.25"],
    reduce=["sum", "amax", "amin", "mean", "prod"],
    write=[
        *["x[<key>] = <scalar>", "x[:, <key>] = <scalar>", "x[<key>, ..., <slice>] = <scalar>", "x[b] = <scalar>", "x[b] = x[b] * 2", "y[b] += 1", "x[b, 1] = y[b]", "x[y > 0] *= 0.5"],
        *["x[i % 2, i % 2] = x[0, :1]", "x[i] += x[0].detach() * 0.1", "x[..., <slice>] = x[..., <slice>].flip(0)", "x[j > 0] = 3.0", "x[:, 0] = y[:, :1]", "x[None, 0] = x[1]"],
        *["x.index_add_(1, j % x.shape[1], x[:, : len(j)].detach().clone()) if x.shape[1] >= len(j) else None", "x.scatter_add_(1, torch.zeros_like(x, dtype=torch.long), torch.ones_like(x))", "y.masked_fill_(b, <scalar>)"],
        *["x.index_put_((i % 2,), y[:1, :1, None].detach(), accumulate=<flag>)", "x.masked_scatter_(b[..., None], torch.arange(200.0))", "y.copy_(y.flip(1))", "x.put_(torch.tensor([0, 1]), torch.tensor([5.0, 6.0]))", "x[0].index_fill_(0, torch.tensor([0]), 7.0)"],
        *["x.scatter_reduce_(1, torch.zeros_like(x, dtype=torch.long), x.detach().clone(), '<reduce>')", "x[[0, 1]] = x[[1, 0]]", "x[:, 1:] = x[:, :-1].clone()", "torch.sort(y, 1, out=(y2 := torch.empty_like(y), torch.empty_like(y).long()))\nout.append(y2)"],
    ],
)  # fmt: skip


def program(seed):
    r = random.Random(seed)
    lines = "\n".join(STATEMENTS.text(r, "statement") for _ in range(r.randrange(2, 7)))
    lines = f"out = []\n{lines}\nreturn out, x.sum(), y * 1\n"
    return "def f(x, y, i, j, b, p):\n" + textwrap.indent(lines, "    ")


def arguments(seed, sizes, grad):
    r, g = random.Random(seed), torch.Generator().manual_seed(seed)
    n, m = r.choice(sizes)
    x = torch.randn(n, m, 5, generator=g)
    if r.random() < 0.2:
        x = torch.randn(m, n, 5, generator=g).transpose(0, 1)
    y = torch.randn(n, m, generator=g)
    if grad:
        x, y = x.requires_grad_() * 1, y.requires_grad_(r.random() < 0.3) * 1
    i = torch.randint(-2, 2, (r.choice([3, 3, 2]),), generator=g)
    return [
        x,
        y,
        i,
        torch.randint(0, m, (n,), generator=g),
        torch.rand(n, m, generator=g) > r.choice([0.3, 0.5, 0.99]),
        r.randrange(-1, 3),
    ]


def run(seed):
    function = function_of(program(seed), f"<selections {seed}>", {"torch": torch, "F": F})
    r = random.Random(seed)
    sizes, grad = r.choice([[(4, 3)], [(2, 3), (3, 4)], [(3, 3), (2, 6), (6, 2)]]), r.random() < 0.4
    calls = [arguments(r.randrange(10**6), sizes, grad) for _ in range(4)]
    check_calls(function, [*calls, calls[0]], rtol=1e-4, atol=1e-5)
