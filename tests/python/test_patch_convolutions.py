"""Convolutions whose windows tile the input, which run as matrix products: outputs, gradients and strides against eager."""

import pytest
import torch
from torch import nn

import kiln

LAYERS = {
    "patches": (lambda: nn.Conv2d(3, 20, 8, 8), (2, 3, 32, 24)),
    "one channel": (lambda: nn.Conv2d(1, 5, 7, 7), (2, 1, 28, 28)),
    "something left over": (lambda: nn.Conv2d(3, 20, 4, 4), (2, 3, 33, 34)),
    "no bias": (lambda: nn.Conv2d(3, 32, (2, 8), (2, 8), bias=False), (1, 3, 32, 32)),
    "one picture": (lambda: nn.Conv2d(4, 6, 16, 16), (1, 4, 16, 16)),
    "a line": (lambda: nn.Conv1d(9, 8, 16, 16), (2, 9, 64)),
    "volumes": (lambda: nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4)), (2, 3, 4, 8, 12)),
    "volumes, left over": (lambda: nn.Conv3d(4, 8, 2, 2), (2, 4, 9, 8, 8)),
}
LAYOUTS = {
    "contiguous": lambda x: x,
    "channels last": lambda x: {
        3: lambda: x.transpose(1, 2).contiguous().transpose(1, 2),
        4: lambda: x.contiguous(memory_format=torch.channels_last),
        5: lambda: x.contiguous(memory_format=torch.channels_last_3d),
    }[x.dim()](),
    "turned": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
}


def step(f, module, x, input_gradient):
    module.zero_grad()
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_(input_gradient)
    y = f(x)
    y.sin().sum().backward()
    return [y.detach(), *([x.grad] if input_gradient else []), *[p.grad.clone() for p in module.parameters()]]


@pytest.mark.parametrize("input_gradient", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("layer", LAYERS)
def test_gradients(layer, layout, input_gradient):
    torch.manual_seed(0)
    make, shape = LAYERS[layer]
    module, x = make(), LAYOUTS[layout](torch.randn(shape))
    compiled = kiln.compile(module, fullgraph=True)
    for a, b in zip(step(compiled, module, x, input_gradient), step(module, module, x, input_gradient), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        assert a.stride() == b.stride()
    with torch.no_grad():
        torch.testing.assert_close(kiln.compile(module)(x), module(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(2, 3, 32, 32), (2, 3, 4, 16, 16)])
def test_embeddings_are_products(shape, capfd):
    """In training too."""
    torch.manual_seed(0)
    module = (nn.Conv2d if len(shape) == 4 else nn.Conv3d)(3, 16, 4, 4)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)

    @kiln.compile
    def train(x):
        loss = module(x).flatten(2).transpose(1, 2).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    kiln.set_logs("output_code")
    with kiln.config.patch(disable_passes="plan.measure_products"):
        train(torch.randn(shape))
    kiln.set_logs("")
    plan = capfd.readouterr().err
    assert "convolution" not in plan
    assert "<- matmul aten::addmm" in plan and "<- matmul aten::mm" in plan


def test_one_channel_whose_strides_are_those_of_channels_last():
    """ATen takes such a line for a channels-last picture, and so does kiln."""
    torch.manual_seed(0)
    for kernel in (3, 16):
        module, x = nn.Conv1d(1, 8, kernel, kernel), torch.randn(2, 64, 1).transpose(1, 2)
        assert kiln.compile(module)(x).stride() == module(x).stride() == (8 * (64 // kernel), 1, 8)
