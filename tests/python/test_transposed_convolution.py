"""Transposed convolutions, which run as gradients of convolutions: outputs and all gradients against eager."""

import pytest
import torch
from torch import nn

import kiln

SETTINGS = {
    "upsample": dict(kernel_size=4, stride=2, padding=1),
    "from one pixel": dict(kernel_size=4, stride=1, padding=0),
    "steps beyond the kernel": dict(kernel_size=2, stride=3),
    "output padding": dict(kernel_size=3, stride=2, padding=1, output_padding=1),
    "dilated": dict(kernel_size=3, stride=2, padding=2, dilation=2, output_padding=1),
    "output padding of a dilation": dict(kernel_size=2, stride=1, dilation=3, output_padding=2),
    "not square": dict(kernel_size=(3, 5), stride=(1, 2), padding=(0, 2), output_padding=(0, 1)),
    "no bias": dict(kernel_size=3, stride=2, bias=False),
    "groups": dict(kernel_size=3, stride=2, groups=2),
}


def check(module, x):
    def run(f):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        y = f(leaf)
        y.sin().sum().backward()
        return [y.detach(), leaf.grad, *[p.grad.clone() for p in module.parameters()]]

    wanted = run(module)
    got = run(kiln.compile(module, fullgraph=True))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        assert a.stride() == b.stride()
    with torch.no_grad():
        torch.testing.assert_close(kiln.compile(module, fullgraph=True)(x), wanted[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_settings(setting, channels_last):
    torch.manual_seed(0)
    format = torch.channels_last if channels_last else torch.contiguous_format
    module = nn.ConvTranspose2d(6, 10, **SETTINGS[setting]).to(memory_format=format)
    check(module, torch.randn(2, 6, 5, 7).to(memory_format=format))


@pytest.mark.parametrize("size", [1, 4, 9])
def test_large_weights(size):
    torch.manual_seed(0)
    check(nn.ConvTranspose2d(160, 270, 4, 2, 1), torch.randn(2, 160, size, size))


def test_other_types_and_dimensions():
    torch.manual_seed(0)
    check(nn.ConvTranspose2d(3, 4, 3, 2).double(), torch.randn(2, 3, 5, 5).double())
    check(nn.ConvTranspose1d(3, 4, 3, 2), torch.randn(2, 3, 9))
    check(nn.ConvTranspose3d(3, 4, 3, 2), torch.randn(2, 3, 3, 4, 5))


def test_among_norms():
    """A generator: its batch norms in training and with stored statistics."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.ConvTranspose2d(20, 32, 4, 1, 0, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 3, 4, 2, 1),
        nn.Tanh(),
    )
    x = torch.randn(4, 20, 1, 1)
    check(module, x)
    module.eval()
    check(module, x)
