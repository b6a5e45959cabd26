"""Convolutions whose windows are too large for Winograd's form: the faster of kiln's kernel and ATen's, which is measured."""

import pytest
import torch
import torch.nn.functional as F

import kiln
from helpers import check

SHAPES = [(2, 32, 28, 32, 5, 1), (2, 64, 14, 64, 7, 1), (1, 16, 30, 48, 5, 2), (3, 16, 9, 16, 9, 1)]


def joined(x, w, b, stride):
    y = F.conv2d(x, w, b, stride=stride, padding=w.shape[2] // 2)
    return F.max_pool2d(F.silu(y) + y.roll(1, 1), 2)


@pytest.mark.parametrize("passes", ["", "plan.measure_products"])
@pytest.mark.parametrize(("n", "channels", "size", "out", "window", "stride"), SHAPES)
def test_as_in_eager(n, channels, size, out, window, stride, passes):
    torch.manual_seed(0)
    x = torch.randn(n, channels, size, size, requires_grad=True)
    w = (torch.randn(out, channels, window, window) * 0.05).requires_grad_()
    b = torch.randn(out, requires_grad=True)
    with kiln.config.patch(disable_passes=passes):
        check(joined, x, w, b, stride, rtol=1e-4, atol=1e-4)
        check(joined, x.detach(), w, b, stride, rtol=1e-4, atol=1e-4)
        check(joined, x.detach(), w.detach(), b.detach(), stride, rtol=1e-4, atol=1e-4)


def test_both_are_measured(capfd):
    x, w = torch.randn(2, 24, 17, 17), torch.randn(24, 24, 5, 5)
    kiln.set_logs("timing")
    kiln.compile(lambda x, w: F.conv2d(x, w).relu())(x, w)
    kiln.set_logs("")
    text = capfd.readouterr().err
    assert "aten::convolution" in text and "library" in text, text
    assert "not measured" not in text, text
