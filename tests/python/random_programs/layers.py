"""Convolutions, pooling, normalizations, resizing, attention, recurrences and losses of random settings, on tensors of
random layouts, with gradients. Weights are views of one argument."""

import random

import torch
import torch.nn.functional as F

from helpers import check_calls

from .grammar import Grammar, function_of

# Eager's group_norm crashes where only the weight needs a gradient and the channels are last: it gets none here.
IMAGE = Grammar(
    o=["1", "4", "6", "8", "16", "17", "24"],
    k=["1", "2", "3", "3", "5", "(3, 1)", "(1, 4)", "7"],
    s=["1", "1", "1", "2", "3", "(1, 2)"],
    p=["0", "1", "1", "2", "(1, 0)", "'same'"],
    l=["1", "1", "2"],
    g=["1", "1", "1", "$c", "2"],
    b=["True", "False"],
    mode=["nearest", "nearest-exact", "bilinear", "bicubic", "area"],
    padding=["reflect", "replicate", "circular", "constant"],
    step=[
        *["conv($x, w, <o>, <k>, stride=<s>, padding=<p>, dilation=<l>, groups=<gr>)"] * 6,
        *["conv($x, w, $x.shape[1], <k>, stride=<s>, padding=1, groups=$x.shape[1])"] * 2,
        *["transposed($x, w, <o>, <k>, stride=<s>, padding=1, dilation=<l>, groups=<gr>)"] * 2,
        *["F.max_pool2d($x, <k>, <s>, 0, <l>)", "F.max_pool2d($x, 3, 2, 1, ceil_mode=<b>)", "F.avg_pool2d($x, 3, <s>, 1, <b>, <b>)"],
        *["F.avg_pool2d($x, 2, 2, divisor_override=3)", "F.adaptive_avg_pool2d($x, (<a>, <a>))", "F.adaptive_max_pool2d($x, (<a>, <a>))", "F.lp_pool2d($x, 2, 2)"],
        *["F.batch_norm($x, None, None, take(w, $x.shape[1]), take(w, $x.shape[1]), training=True)", "F.batch_norm($x, stat($x), stat($x) + 1, take(w, $x.shape[1]))"],
        *["F.instance_norm($x)", "F.group_norm($x, 1) * take(w, $x.shape[1], 1, 1)", "F.group_norm($x, <gr>)", "F.layer_norm($x, $x.shape[2:])", "F.local_response_norm($x, 3)"],
        *["F.interpolate($x, scale_factor=<f>, mode='<mode>')", "F.interpolate($x, size=(<a>, 5), mode='<mode>')", "F.interpolate($x, scale_factor=2, mode='bilinear', align_corners=True)"],
        *["F.pad($x, (1, 2, 0, 1), mode='<padding>')", "F.pad($x, (-1, 1))", "F.pixel_shuffle($x[:, :$x.shape[1] // 4 * 4], 2)", "F.pixel_unshuffle($x[:, :, :$x.shape[2] // 2 * 2, :$x.shape[3] // 2 * 2], 2)"],
        *["F.unfold($x, 3, padding=1).unflatten(2, $x.shape[2:])[:, :20]", "F.grid_sample($x, grid($x), align_corners=<b>, mode='<sampling>', padding_mode='<border>')"],
        *["torch.cat([$x, $x.flip(1)], 1)[:, :24]", "$x + $x.mean((2, 3), keepdim=True)", "$x * torch.sigmoid($x.amax(1, keepdim=True))", "$x.to(memory_format=torch.channels_last)"],
        *["F.relu($x)", "F.silu($x)", "F.gelu($x)", "F.hardswish($x)", "F.leaky_relu($x, 0.2)", "F.prelu($x, take(w, 1))", "F.softmax($x, 1)", "F.normalize($x, dim=1)", "F.mish($x)"],
        *["$x.transpose(2, 3)", "$x.contiguous()", "$x[:, ::2]", "$x[:, :, 1:]", "$x.roll(1, 2)", "F.channel_shuffle($x, <gr>)", "F.dropout($x, 0.0)", "F.threshold($x, 0.1, 0.0)"],
    ],
    gr=["1", "1", "2"],
    a=["1", "2", "3", "5"],
    f=["2", "0.5", "1.5", "3"],
    sampling=["bilinear", "nearest"],
    border=["zeros", "border", "reflection"],
)  # fmt: skip

SEQUENCE = Grammar(
    o=["1", "4", "6", "8", "16", "17"],
    b=["True", "False"],
    h=["1", "2"],
    step=[
        *["linear($x, w, <o>)"] * 4,
        *["attention($x, w, <h>, causal=<b>)", "attention($x, w, <h>, causal=<b>) + $x", "masked($x, w, <h>)", "attention($x[:, :1], w, 1, causal=False) + $x"],
        *["recurrent($x, w)", "F.conv1d($x.mT, take(w, $x.shape[2], $x.shape[2], 3), padding=1).mT", "F.conv1d($x.mT, take(w, $x.shape[2], 1, 3), padding=2, groups=$x.shape[2]).mT"],
        *["F.layer_norm($x, $x.shape[2:], take(w, $x.shape[2]))", "F.rms_norm($x, $x.shape[2:])", "F.gelu($x)", "F.silu($x)", "F.glu(torch.cat([$x, $x], 2))", "$x.cumsum(1) * 0.3"],
        *["F.scaled_dot_product_attention($x, $x * 0.5, $x + 1)", "F.avg_pool1d($x, 3, 1, 1)", "F.max_pool1d($x, 2, 1)", "F.normalize($x, dim=-1)", "$x.softmax(1)", "$x.mT.contiguous().mT"],
        *["F.embedding(i % $x.shape[1], $x[0])", "$x[:, i % $x.shape[1]]", "$x.gather(1, (i % $x.shape[1])[None, :, None].expand($x.shape[0], -1, $x.shape[2]))", "$x - $x.mean(1, keepdim=True)"],
        *["F.embedding_bag(i.view(2, 2) % $x.shape[1], $x[0], mode='mean')[None]", "F.cosine_similarity($x, $x.flip(1), -1)[..., None] * $x", "F.softplus($x)", "torch.cdist($x, $x * 0.5)[..., :8]"],
        *["F.fold(take(w, 1, 12, 9), (5, 5), 3)[:, :, 0]", "$x.transpose(0, 1)", "$x[:, 1:]", "F.pad($x, (0, 0, 1, 0))[:, :-1]", "$x.repeat_interleave(2, 1)[:, :7]", "$x.flip(1)", "F.tanhshrink($x)"],
        *["torch.einsum('bij,bkj->bik', $x, $x)[..., :8]", "torch.bmm($x, $x.mT)[..., :6]", "torch.baddbmm($x, $x @ $x.mT, $x)", "F.bilinear($x, $x, take(w, 3, $x.shape[2], $x.shape[2]))", "$x @ take(w, $x.shape[2], 5)"],
    ],
)  # fmt: skip
LOSSES = [
    *["y.square().mean()", "y.sum()", "F.mse_loss(y, y.detach().flip(0) * 0.5)", "F.smooth_l1_loss(y, torch.zeros_like(y))", "y.logsumexp(1).mean()", "F.huber_loss(y, y.detach() + 1)"],
    *["F.cross_entropy(y, i[0].expand(y.shape[:1] + y.shape[2:]) % y.shape[1], label_smoothing=0.1)", "F.cross_entropy(y, i[0].expand(y.shape[:1] + y.shape[2:]) % y.shape[1], ignore_index=1)"],
    *["F.binary_cross_entropy_with_logits(y, (y.detach() > 0).to(y.dtype), pos_weight=torch.tensor(2.0))", "F.kl_div(y.log_softmax(1), y.detach().softmax(1), reduction='batchmean')", "F.l1_loss(y, y.detach() * 2, reduction='sum')"],
    *["F.nll_loss(y.log_softmax(1), i[0].expand(y.shape[:1] + y.shape[2:]) % y.shape[1])", "F.soft_margin_loss(y, y.detach().sign())", "F.poisson_nll_loss(y, y.detach().abs())", "y.norm() + y.var()"],
]  # fmt: skip


def take(w, *shape):
    size = torch.Size(shape).numel()
    return w[:size].view(shape) * (3 / max(shape[-1], 8)) ** 0.5


def conv(x, w, out, k, groups=1, **settings):
    k = (k, k) if isinstance(k, int) else k
    return F.conv2d(x, take(w, out, x.shape[1] // groups, *k), take(w, out), groups=groups, **settings)


def transposed(x, w, out, k, groups=1, **settings):
    k = (k, k) if isinstance(k, int) else k
    return F.conv_transpose2d(x, take(w, x.shape[1], out // groups, *k), take(w, out), groups=groups, **settings)


def stat(x):
    return torch.linspace(0, 1, x.shape[1], dtype=x.dtype)


def grid(x):
    theta = torch.tensor([[0.9, 0.1, 0.05], [-0.1, 1.1, 0.0]], dtype=x.dtype).expand(x.shape[0], 2, 3)
    return F.affine_grid(theta, [x.shape[0], x.shape[1], 4, 6], align_corners=False)


def linear(x, w, out):
    return F.linear(x, take(w, out, x.shape[-1]), take(w, out))


def heads(x, w, count):
    width = x.shape[2] // count
    qkv = F.linear(x, take(w, 3 * count * width, x.shape[2]))
    return qkv.view(*x.shape[:2], 3, count, width).permute(2, 0, 3, 1, 4)


def attention(x, w, count, causal):
    return F.scaled_dot_product_attention(*heads(x, w, count), is_causal=causal).transpose(1, 2).flatten(2)


def masked(x, w, count):
    q, k, v = heads(x, w, count)
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril().logical_or(torch.arange(x.shape[1]) == 2)
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2).reshape(*x.shape[:2], -1)


def recurrent(x, w):
    h = torch.zeros_like(x[:, 0])
    out = []
    for t in range(min(x.shape[1], 4)):
        z, n = F.linear(torch.cat([x[:, t], h], 1), take(w, 2 * x.shape[2], 2 * x.shape[2])).chunk(2, 1)
        h = z.sigmoid() * h + (1 - z.sigmoid()) * n.tanh()
        out.append(h)
    return torch.stack(out, 1)


SCOPE = {f.__name__: f for f in (take, conv, transposed, stat, grid, linear, attention, masked, recurrent)}
SCOPE |= {"torch": torch, "F": F}


def kind_of(seed):
    return ("image", IMAGE) if seed % 2 else ("sequence", SEQUENCE)


def arguments(seed):
    """An image or a sequence x, numbers w that weights are made of, indices i."""
    r, g = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype = r.choice([torch.float32, torch.float32, torch.float64])
    if kind_of(seed)[0] == "image":
        shape = (r.choice([1, 2, 3]), r.choice([1, 2, 3, 4, 8, 16]), r.choice([5, 8, 9, 14]), r.choice([6, 7, 8, 16]))
    else:
        shape = (r.choice([1, 2, 5]), r.choice([3, 4, 7, 16]), r.choice([2, 4, 6, 8, 16]))
    x = torch.randn(shape, generator=g, dtype=dtype)
    layout = r.choice(["plain", "plain", "last", "gaps", "transposed"])
    if layout == "last" and x.dim() == 4:
        x = x.to(memory_format=torch.channels_last)
    elif layout == "gaps":
        x = torch.randn(shape[0], shape[1] * 2, *shape[2:], generator=g, dtype=dtype)[:, ::2]
    elif layout == "transposed":
        x = x.mT.contiguous().mT
    w = torch.randn(20000, generator=g, dtype=dtype) * 0.5
    return [
        x.requires_grad_(r.random() < 0.7),
        w.requires_grad_(r.random() < 0.7),
        torch.randint(0, 100, (4,), generator=g),
    ]


def program(seed):
    """A step that eager refuses is left out, as is one that makes much of little, or something that is not finite."""
    r = random.Random(seed)
    name, grammar = kind_of(seed)
    x, w, i = (t.detach() for t in arguments(seed))
    known, lines = {"x": x, "w": w, "i": i}, []
    for number in range(r.randrange(1, 7)):
        step = grammar.text(r, "step", {"x": ["x" if number == 0 else f"v{number - 1}"] if number else ["x"]})
        last = f"v{len(lines) - 1}" if lines else "x"
        step = step.replace(f"v{number - 1}", last) if number else step
        try:
            value = eval(step, dict(SCOPE), known)
        except Exception:
            continue
        usual = (
            value.dim() == x.dim()
            and 0 < value.numel() < 30000
            and bool(torch.isfinite(value).all())
            and value.abs().max() < 30
        )
        if not usual:
            continue
        known[f"v{len(lines)}"] = value
        lines.append(step)
    body = "".join(f"    v{k} = {step}\n" for k, step in enumerate(lines))
    made = f"v{len(lines) - 1}" if lines else "x * 1"
    loss = r.choice(LOSSES)
    try:
        assert bool(torch.isfinite(eval(loss, dict(SCOPE), {"y": known.get(made, x), "i": i})))
    except Exception:
        loss = "y.square().mean()"
    return f"def f(x, w, i):\n{body}    y = {made}\n    return [y, {loss}]\n"


def run(seed):
    function = function_of(program(seed), f"<layers {seed}>", dict(SCOPE))
    check_calls(function, [arguments(seed), arguments(seed)], rtol=2e-3, atol=2e-3)
