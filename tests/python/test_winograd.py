"""Convolutions of 3 x 3 that move by one pixel, which take fewer multiplications: values and gradients are as near to
those in double precision as eager's are."""

import copy

import pytest
import torch
from torch import nn

import kiln
from helpers import training_results

NETS = {
    "squares": (lambda: nn.Conv2d(32, 48, 3, padding=1), (4, 32, 16, 16)),
    "cut squares": (lambda: nn.Conv2d(40, 33, 3, padding=1, bias=False), (3, 40, 15, 13)),
    "no border": (lambda: nn.Conv2d(24, 64, 3), (5, 24, 12, 17)),
    "wide border": (lambda: nn.Conv2d(16, 96, 3, padding=2), (6, 16, 9, 9)),
    "few squares, many channels": (lambda: nn.Conv2d(300, 260, 3, padding=1), (2, 300, 7, 7)),
    "more channels than a block": (lambda: nn.Conv2d(530, 64, 3, padding=1), (2, 530, 14, 14)),
    "transposed": (lambda: nn.ConvTranspose2d(64, 32, 3, padding=1), (4, 64, 12, 12)),
    "one after the other": (
        lambda: nn.Sequential(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 32, 3, padding=1), nn.Tanh()),
        (4, 32, 14, 14),
    ),
}


def distance(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_as_exact_as_eager(name, channels_last):
    torch.manual_seed(0)
    make, shape = NETS[name]
    module, x = make(), torch.randn(shape)
    if channels_last:
        module, x = module.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    exact = copy.deepcopy(module).double()
    want = training_results(exact, exact, x.double())
    eager = training_results(module, module, x)
    with kiln.config.patch(disable_passes="plan.winograd"):
        direct = training_results(kiln.compile(module), module, x)
    kiln.reset()
    got = training_results(kiln.compile(module), module, x)
    assert not torch.equal(got[0], direct[0])  # the switch switches
    for a, e, d, w in zip(got, eager, direct, want, strict=True):
        assert a.stride() == e.stride()
        assert distance(a, w) < 3 * max(distance(e, w), distance(d, w), 1e-7)


@pytest.mark.parametrize("name", NETS)
def test_frozen_weights(name):
    torch.manual_seed(0)
    make, shape = NETS[name]
    module, x = make().eval(), torch.randn(shape)
    compiled = kiln.compile(module)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-5)
        for p in module.parameters():  # kept forms of the weight are made anew
            p.add_(0.1 * torch.randn_like(p))
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-4)


def test_what_is_not_a_number_stays_in_its_window():
    module = nn.Conv2d(32, 32, 3, padding=1)
    x = torch.randn(2, 32, 16, 16)
    x[0, 5, 6, 7] = float("nan")
    with torch.no_grad():
        assert torch.equal(kiln.compile(module)(x).isnan(), module(x).isnan())
