"""Convolutions of volumes, which run as those of pictures: outputs, gradients and strides against eager."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kiln
from helpers import training_step

LAYERS = {
    "cube": (lambda: nn.Conv3d(5, 7, 3, padding=1), (2, 5, 6, 8, 9)),
    "no padding, no bias": (lambda: nn.Conv3d(3, 4, (2, 3, 3), bias=False), (2, 3, 5, 6, 7)),
    "stride": (lambda: nn.Conv3d(4, 6, 3, stride=2, padding=1), (2, 4, 7, 8, 9)),
    "stride, something left over": (lambda: nn.Conv3d(4, 6, 3, stride=(3, 2, 1), padding=(0, 1, 2)), (1, 4, 11, 8, 9)),
    "dilation": (lambda: nn.Conv3d(4, 6, 3, dilation=(2, 1, 2), padding=2), (2, 4, 7, 8, 9)),
    "along the depth": (lambda: nn.Conv3d(4, 6, (3, 1, 1), padding=(1, 0, 0)), (2, 4, 7, 4, 5)),
    "within slices": (lambda: nn.Conv3d(4, 6, (1, 3, 3), padding=(0, 1, 1)), (2, 4, 5, 6, 7)),
    "every second slice": (lambda: nn.Conv3d(4, 6, (1, 3, 3), stride=(2, 1, 1)), (2, 4, 5, 6, 7)),
    "points": (lambda: nn.Conv3d(6, 9, 1), (2, 6, 3, 4, 5)),
    "one channel": (lambda: nn.Conv3d(1, 8, 3, padding=1), (2, 1, 6, 8, 8)),
    "one result": (lambda: nn.Conv3d(8, 1, 3), (1, 8, 3, 3, 3)),
    "more padding than slices": (lambda: nn.Conv3d(3, 4, 3, padding=(3, 1, 1)), (1, 3, 2, 6, 6)),
    "more dilation than slices": (lambda: nn.Conv3d(3, 4, 3, padding=(5, 1, 1), dilation=(5, 1, 1)), (1, 3, 3, 6, 6)),
    "one volume without a batch": (lambda: nn.Conv3d(3, 4, 3, padding=1), (3, 4, 6, 6)),
    "large kernel": (lambda: nn.Conv3d(8, 8, 5, padding=2), (1, 8, 6, 8, 8)),
    "groups": (lambda: nn.Conv3d(4, 6, 3, groups=2, padding=1), (2, 4, 4, 6, 6)),
    "twice as large": (lambda: nn.ConvTranspose3d(5, 4, 2, 2), (2, 5, 3, 4, 5)),
    "transposed": (lambda: nn.ConvTranspose3d(5, 4, 3, stride=2, padding=1, output_padding=1), (2, 5, 3, 4, 5)),
    "transposed, no bias": (lambda: nn.ConvTranspose3d(3, 4, 3, padding=1, bias=False), (1, 3, 4, 5, 6)),
    "transposed, dilation": (lambda: nn.ConvTranspose3d(3, 4, (3, 2, 3), stride=(3, 1, 2), dilation=(2, 1, 1)), (2, 3, 3, 4, 4)),
    "transposed, cut": (lambda: nn.ConvTranspose3d(3, 4, 3, stride=(2, 1, 1), padding=(2, 0, 1)), (2, 3, 4, 4, 4)),
}  # fmt: skip
LAYOUTS = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last_3d),
    "turned": lambda x: x.transpose(-1, -3).contiguous().transpose(-1, -3),
}


def step(f, module, x, input_gradient=True):
    module.zero_grad()
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_(input_gradient)
    y = f(x)
    y.sin().sum().backward()
    return [y.detach(), *([x.grad] if input_gradient else []), *[p.grad.clone() for p in module.parameters()]]


def check(module, x, input_gradient=True):
    compiled = kiln.compile(module, fullgraph=True)
    for a, b in zip(step(compiled, module, x, input_gradient), step(module, module, x, input_gradient), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        assert a.stride() == b.stride()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("layer", LAYERS)
def test_gradients(layer, layout):
    torch.manual_seed(0)
    make, shape = LAYERS[layer]
    module, x = make(), torch.randn(shape)
    if x.dim() == 5:
        x = LAYOUTS[layout](x)
    check(module, x)
    check(module, x, input_gradient=False)
    with torch.no_grad():
        y = kiln.compile(module)(x)
        torch.testing.assert_close(y, module(x), rtol=1e-4, atol=1e-4)
        assert y.stride() == module(x).stride()


class Block(nn.Module):
    def __init__(self, c, d):
        super().__init__()
        self.first, self.second = nn.Conv3d(c, d, 3, padding=1), nn.Conv3d(d, d, 3, padding=1, bias=False)
        self.norm, self.norms = nn.InstanceNorm3d(d, affine=True), nn.BatchNorm3d(d)

    def forward(self, x):
        return self.norms(self.second(F.leaky_relu(self.norm(self.first(x))))).relu()


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.bottom, self.up = Block(1, 6), Block(6, 12), Block(12, 6)
        self.larger, self.head = nn.ConvTranspose3d(12, 6, 2, 2), nn.Conv3d(6, 2, 1)

    def forward(self, x):
        a = self.down(x)
        b = self.bottom(F.max_pool3d(a, 2))
        return self.head(self.up(torch.cat([self.larger(b), a], 1)))


class Video(nn.Module):
    """As R(2+1)D and C3D have it."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv3d(3, 8, (1, 7, 7), stride=(1, 2, 2), padding=(0, 3, 3), bias=False)
        self.time = nn.Conv3d(8, 12, (3, 1, 1), padding=(1, 0, 0), bias=False)
        self.norm, self.head = nn.BatchNorm3d(12), nn.Linear(12, 4)

    def forward(self, x):
        x = self.norm(self.time(self.stem(x).relu())).relu()
        return self.head(F.adaptive_avg_pool3d(F.max_pool3d(x, 3, 2, 1), 1).flatten(1))


@pytest.mark.parametrize("make, shape", [(UNet, (2, 1, 8, 12, 12)), (Video, (2, 3, 6, 16, 16))])
def test_networks(make, shape):
    """Whole training steps, and inference afterwards."""
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net = make()
        opt = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
        step = training_step(net, opt)
        run = kiln.compile(step, fullgraph=True) if compiled else step
        torch.manual_seed(1)
        losses = [run(torch.randn(shape)) for _ in range(4)]
        net.eval()
        infer = kiln.compile(net, fullgraph=True) if compiled else net
        with torch.no_grad():
            results.append([*losses, *net.parameters(), *net.buffers(), infer(torch.ones(shape))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("passes", ["joint.volume_convolutions", "joint.channels_last", "joint.patch_convolutions"])
def test_without_a_pass(passes):
    torch.manual_seed(0)
    with kiln.config.patch(disable_passes=passes):
        check(nn.Conv3d(4, 6, 3, padding=1), torch.randn(2, 4, 4, 6, 6))
        check(nn.ConvTranspose3d(4, 3, 2, 2), torch.randn(2, 4, 3, 4, 4))


def test_they_are_convolutions_of_pictures(capfd):
    """In training too, and no library call is left that takes volumes."""
    torch.manual_seed(0)
    module = nn.Conv3d(4, 6, 3, padding=1)

    @kiln.compile
    def train(x):
        module(x).square().mean().backward()
        grad, module.weight.grad = module.weight.grad, None
        return grad

    kiln.set_logs("aot")
    train(torch.randn(2, 4, 4, 6, 6))
    kiln.set_logs("")
    graph = capfd.readouterr().err
    calls = [line for line in graph.splitlines() if "aten::convolution" in line]
    assert len(calls) >= 2 and all(", [1, 1], [1, 1], [1, 1], False" in line for line in calls)


@pytest.mark.parametrize("channels", [(5, 4), (1, 4), (4, 1)])
@pytest.mark.parametrize("n", [1, 2, 16])
def test_strides_of_transposed_ones(n, channels):
    """Eager's layout depends on the library that it takes."""
    for kernel, stride, output_padding, dilation in [
        (2, 2, 0, 1),
        (3, 2, 1, 1),
        (3, 1, 1, 2),
        (1, 1, 0, 1),
        (4, 2, 0, 1),
    ]:
        module = nn.ConvTranspose3d(*channels, kernel, stride, output_padding=output_padding, dilation=dilation)
        for side in (5, 40):
            x = torch.randn(n, channels[0], 3, side, side).contiguous(memory_format=torch.channels_last_3d)
            check(module, x) if side == 5 else None
            with torch.no_grad():
                assert kiln.compile(module)(x).stride() == module(x).stride()


def test_other_dtypes_are_library_calls():
    torch.manual_seed(0)
    for dtype in (torch.float64, torch.bfloat16):
        module, x = nn.Conv3d(3, 4, 3, padding=1).to(dtype), torch.randn(1, 3, 4, 5, 5, dtype=dtype)
        with torch.no_grad():
            torch.testing.assert_close(kiln.compile(module)(x), module(x))


def test_transposed_ones_in_groups_keep_the_layout_of_eager():
    # Between convolutions that take channels-last volumes; ATen leaves taps of its gradient unwritten for those.
    torch.manual_seed(0)
    up = nn.ConvTranspose3d(64, 64, 7, stride=2, padding=3, groups=64)
    check(nn.Sequential(nn.Conv3d(8, 64, 1), up, nn.Conv3d(64, 8, 1)), torch.randn(1, 8, 4, 4, 4))
