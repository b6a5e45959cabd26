"""Small programs, each a few operators that models are made of: what a compiler does badly shows here first.

`python -m kiln bench --suite patterns` measures each against eager, without gradients and with those of its inputs.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclasses.dataclass
class Pattern:
    """`function(*inputs())`; `gradient`: whether its result is differentiated by the inputs of floats, too."""

    name: str
    function: Callable[..., Tensor]
    inputs: Callable[[], tuple[Tensor, ...]]
    gradient: bool = True


def normal(*shapes: tuple[int, ...]) -> Callable[[], tuple[Tensor, ...]]:
    """Inputs of these shapes from a normal distribution, float32."""
    return lambda: tuple(torch.randn(shape) for shape in shapes)


def mixed(*makers: Callable[[], Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(make() for make in makers)


def floats(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape)


def integers(below: int, *shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(below, shape)


def truths(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.rand(shape) > 0.5


def per_sample_gradients(x: Tensor, g: Tensor) -> Tensor:
    products = x[:, :, None] * g[:, None]
    scale = (1 / (products.flatten(1).norm(dim=1) + 1e-6)).clamp(max=1)
    return torch.einsum("n,nij->ij", scale, products)


def boxes_overlap(a: Tensor, b: Tensor) -> Tensor:
    low, high = torch.maximum(a[:, None, :2], b[:, :2]), torch.minimum(a[:, None, 2:], b[:, 2:])
    return (high - low).clamp(min=0).prod(-1)


def forces(x: Tensor) -> Tensor:
    d = x[None] - x[:, None]
    return (d / (d.square().sum(-1, keepdim=True) + 0.1) ** 1.5).sum(1)


def rotate(q: Tensor, v: Tensor) -> Tensor:
    u, w = q[:, 1:], q[:, :1]
    return v + 2 * torch.linalg.cross(u, torch.linalg.cross(u, v) + w * v)


def complex_rotary(x: Tensor, angle: Tensor) -> Tensor:
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn).flatten(-2)


def spectral_convolution(x: Tensor, real: Tensor, imag: Tensor) -> Tensor:
    """The lowest frequencies by weights of their own, as in a Fourier neural operator."""
    spectrum = torch.fft.rfft2(x)
    out = torch.zeros_like(spectrum)
    out[..., :8, :8] = torch.einsum("bixy,ioxy->boxy", spectrum[..., :8, :8], torch.complex(real, imag))
    return torch.fft.irfft2(out, s=x.shape[-2:])


def masked_spectrogram(x: Tensor, window: Tensor) -> Tensor:
    spectrum = torch.stft(x, 256, 64, window=window, return_complex=True)
    return torch.istft(spectrum * spectrum.abs().sigmoid(), 256, 64, window=window)


def state_space_kernel(real: Tensor, imag: Tensor, x: Tensor) -> Tensor:
    """A diagonal state space model, as a long convolution."""
    n = x.shape[-1]
    powers = torch.exp(torch.complex(-real.square(), imag)[:, None] * torch.arange(n))
    kernel = powers.sum(0).real
    return torch.fft.irfft(torch.fft.rfft(x, 2 * n) * torch.fft.rfft(kernel, 2 * n))[..., :n]


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def rendered(density: Tensor, color: Tensor) -> Tensor:
    alpha = 1 - torch.exp(-density.relu())
    seen = alpha * torch.cumprod(1 - alpha + 1e-6, -1)
    return (seen[..., None] * color).sum(1)


def segment_softmax(x: Tensor, segment: Tensor) -> Tensor:
    e = x.exp()
    return e / torch.zeros(100).index_add(0, segment, e)[segment]


def recurrence(x: Tensor) -> Tensor:
    h = torch.zeros(x.shape[0], x.shape[2])
    for t in range(x.shape[1]):
        h = (h * 0.5 + x[:, t]).tanh()
    return h


def cached_keys(cache: Tensor, keys: Tensor, position: Tensor) -> Tensor:
    """A token's keys into the cache of all, which a query of them then reads."""
    cache.index_copy_(1, position, keys)
    return (cache @ keys.mT).softmax(1)


def added_rows(table: Tensor, x: Tensor, i: Tensor) -> Tensor:
    table.index_add_(0, i, x * 0.5)
    return table[i[0]]


def filled_rows(x: Tensor) -> Tensor:
    out = x.cumsum(0)
    for row in range(16):
        out[row] = x[row] * row
    return out


def gates(x: Tensor) -> Tensor:
    a, b, c, d = x.chunk(4, -1)
    return a.sigmoid() * b.tanh() + c.sigmoid() * d


PATTERNS = [
    # Products.
    Pattern("products of 3 x 3", lambda a, b: (a @ b).relu(), normal((2000, 3, 3), (2000, 3, 3))),
    Pattern("products of 16 x 16", lambda a, b: (a @ b).softmax(-1), normal((500, 16, 16), (500, 16, 16))),
    Pattern("matrices by vectors", lambda a, v: (a @ v[..., None])[..., 0], normal((64, 128, 128), (64, 128))),
    Pattern("one output", lambda x, w, b: F.linear(x, w, b).sigmoid(), normal((1024, 128), (1, 128), (1,))),
    Pattern("per-sample gradients", per_sample_gradients, normal((64, 64), (64, 64))),
    Pattern("bilinear form", lambda x, w, y: torch.einsum("bi,oij,bj->bo", x, w, y), normal((64, 32), (16, 32, 32), (64, 32))),
    Pattern("tiny network", lambda x, a, b: (x @ a).relu() @ b, normal((8, 16), (16, 16), (16, 4))),
    # Attention.
    Pattern("causal attention", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), normal(*[(2, 4, 128, 32)] * 3)),
    Pattern("attention of one query", F.scaled_dot_product_attention, normal((4, 8, 1, 64), (4, 8, 256, 64), (4, 8, 256, 64))),
    Pattern("attention of few queries", F.scaled_dot_product_attention, normal((4, 8, 4, 64), (4, 8, 256, 64), (4, 8, 256, 64))),
    Pattern("biased attention", lambda q, k, v, b: (q @ k.mT * 0.2 + b).softmax(-1) @ v, normal(*[(8, 128, 32)] * 3, (128, 128))),
    Pattern("rotary embedding", rotary, normal((2, 4, 128, 32), (128, 32), (128, 32))),
    Pattern("complex rotary embedding", complex_rotary, normal((2, 64, 4, 32), (64, 16))),
    # Normalizations, activations, losses.
    Pattern("layer norm", lambda x, w, b: F.layer_norm(x, (256,), w, b).relu(), normal((512, 256), (256,), (256,))),
    Pattern("rms norm", lambda x, w: F.rms_norm(x, (256,), w), normal((512, 256), (256,))),
    Pattern("group norm", lambda x, w, b: F.group_norm(x, 8, w, b).relu(), normal((4, 64, 32, 32), (64,), (64,))),
    Pattern("softmax over channels", lambda x: x.softmax(1), normal((16, 64, 256))),
    Pattern("gates", gates, normal((256, 512))),
    Pattern("gelu", F.gelu, normal((512, 512))),
    Pattern("cross entropy", F.cross_entropy, mixed(floats(128, 10000), integers(10000, 128))),
    Pattern("cross entropy of images", F.cross_entropy, mixed(floats(2, 20, 64, 64), integers(20, 2, 64, 64))),
    Pattern("cosine similarity", lambda x, y: F.cosine_similarity(x[:, None], y[None], -1), normal((64, 128), (64, 128))),
    Pattern("nearest points", lambda a, b: (a[:, None] - b).square().sum(-1).amin(1).mean(), normal((256, 3), (256, 3))),
    # Convolutions and images.
    Pattern("convolution of lines", lambda x, w: F.conv1d(x, w, padding=2).relu(), normal((4, 32, 256), (32, 32, 5))),
    Pattern("depthwise convolution of lines", lambda x, w: F.conv1d(x, w, padding=3, groups=64).sigmoid(), normal((2, 64, 256), (64, 1, 4))),
    Pattern("window of a structural similarity", lambda x, w: F.conv2d(x, w, padding=5, groups=3), normal((2, 3, 96, 96), (3, 1, 11, 11))),
    Pattern("blur of rows", lambda x, w: F.conv2d(x, w, padding=(0, 4)), normal((4, 1, 64, 128), (1, 1, 1, 9))),
    Pattern("transposed convolution", lambda x, w: F.conv_transpose2d(x, w, stride=2).relu(), normal((2, 32, 16, 16), (32, 16, 2, 2))),
    Pattern("max pooling", lambda x: F.max_pool2d(x, 3, 2, 1), normal((4, 32, 56, 56))),
    Pattern("average pooling", lambda x: F.avg_pool2d(x, 3, 2, 1), normal((4, 32, 56, 56))),
    Pattern("upsampling", lambda x: F.interpolate(x, scale_factor=2), normal((2, 16, 32, 32))),
    Pattern("reflecting borders", lambda x, w: F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), w), normal((2, 16, 32, 32), (16, 16, 3, 3))),
    Pattern("windows of images", lambda x: F.unfold(x, 3, padding=1).sum(1), normal((2, 16, 28, 28))),
    Pattern("total variation", lambda x: (x[..., 1:] - x[..., :-1]).abs().mean(), normal((4, 3, 64, 64))),
    # Indices, scans, sorted values.
    Pattern("embedding", lambda w, i: F.embedding(i, w).sum(1), mixed(floats(5000, 64), integers(5000, 64, 32))),
    Pattern("sums at indices", lambda x, i: torch.zeros(100, 64).index_add(0, i, x), mixed(floats(2000, 64), integers(100, 2000))),
    Pattern("writes to a cache", cached_keys, mixed(floats(4, 2048, 64), floats(4, 1, 64), integers(2048, 1)), gradient=False),
    Pattern("sums added to a table", added_rows, mixed(floats(20000, 64), floats(256, 64), integers(20000, 256)), gradient=False),
    Pattern("writes to rows", filled_rows, normal((512, 256))),
    Pattern("softmax of segments", segment_softmax, mixed(floats(2000), integers(100, 2000))),
    Pattern("running sums", lambda x: x.cumsum(-1), normal((256, 512))),
    Pattern("masked mean", lambda x, m: (x * m).sum(1) / m.sum(1).clamp(min=1), mixed(floats(64, 128, 32), truths(64, 128, 1))),
    Pattern("largest values", lambda x: x.topk(8, -1)[0], normal((256, 512))),
    Pattern("recurrence", recurrence, normal((64, 32, 16))),
    # Geometry and science.
    Pattern("overlap of boxes", boxes_overlap, normal((200, 4), (200, 4))),
    Pattern("forces", forces, normal((128, 3))),
    Pattern("rotations", rotate, normal((5000, 4), (5000, 3))),
    Pattern("rendering along rays", rendered, normal((256, 64), (256, 64, 3))),
    Pattern("spectrum", lambda x: torch.fft.rfft(x).abs(), normal((64, 512))),
    Pattern("spectral convolution", spectral_convolution, normal((4, 16, 32, 32), (16, 16, 8, 8), (16, 16, 8, 8))),
    Pattern("masked spectrogram", masked_spectrogram, lambda: (torch.randn(4, 8000), torch.hann_window(256))),
    Pattern("state space kernel", state_space_kernel, normal((64,), (64,), (8, 256))),
    Pattern("singular values", torch.linalg.svdvals, normal((20, 16, 16))),
    Pattern("norm of order 3", lambda x: x.norm(3, dim=-1), normal((256, 256))),
    Pattern("half precision", lambda x: (x.bfloat16() * 2 + 1).sigmoid(), normal((256, 512))),
    Pattern("integers", lambda x: ((x * 31 + 7) % 97 // 3) ^ 5, mixed(integers(1000, 65536)), gradient=False),
]  # fmt: skip


def find(name: str) -> Pattern:
    return next(p for p in PATTERNS if p.name == name)


def call(pattern: Pattern, gradient: bool) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """(what is compiled, its arguments): the function, or with `gradient` the gradients of its result's sum of squares."""
    inputs = pattern.inputs()
    if not gradient:
        return pattern.function, inputs

    def gradients(*inputs: Tensor) -> tuple[Tensor, ...]:
        loss = pattern.function(*inputs).square().sum()
        return torch.autograd.grad(loss, [x for x in inputs if x.requires_grad])

    return gradients, tuple(x.requires_grad_() if x.is_floating_point() else x for x in inputs)
