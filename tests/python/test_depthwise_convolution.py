"""Convolutions with a group for each channel, which have kernels of their own: outputs, all gradients and strides
against eager."""

import pytest
import torch
from torch import nn

import kiln
from helpers import training_results

SETTINGS = {
    "3x3": dict(kernel_size=3, padding=1),
    "5x5 in steps": dict(kernel_size=5, stride=2, padding=2),
    "7x7": dict(kernel_size=7, padding=3, bias=False),
    "other sides": dict(kernel_size=(1, 9), padding=(0, 4), stride=(2, 1)),
    "dilated": dict(kernel_size=3, dilation=(2, 3), padding=(1, 4)),
    "larger than the image": dict(kernel_size=11, padding=8, stride=3),
}


def compare(module, x, strides=True):
    for a, b in zip(
        training_results(kiln.compile(module, fullgraph=True), module, x),
        training_results(module, module, x),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=3e-4)
        assert a.stride() == b.stride() or not strides


@pytest.mark.parametrize("channels", [2, 8, 19, 48])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("training", [True, False])
def test_settings(setting, channels, training):
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(channels, channels, groups=channels, **SETTINGS[setting]), nn.BatchNorm2d(channels), nn.ReLU6()
    ).train(training)
    compare(module, torch.randn(3, channels, 13, 17))
    compare(module, torch.randn(2, channels, 9, 12).to(memory_format=torch.channels_last))


FILTERS = {
    "window": dict(kernel_size=11, padding=5),
    "window inside": dict(kernel_size=(7, 11)),
    "row": dict(kernel_size=(1, 11), padding=(0, 20)),
    "column": dict(kernel_size=(11, 1), padding=(9, 0), bias=False),
    "every other row": dict(kernel_size=(6, 3), stride=(2, 1), padding=(3, 2)),
    "rows that nothing reads": dict(kernel_size=(1, 3), stride=(2, 1), padding=(0, 1)),
    "dilated": dict(kernel_size=(4, 5), dilation=(3, 2), padding=(5, 4), stride=(3, 1)),
}


@pytest.mark.parametrize("channels", [1, 3, 5, 12])
@pytest.mark.parametrize("setting", FILTERS)
@pytest.mark.parametrize("threads", [1, 2])
def test_filters_of_few_channels(setting, channels, threads):
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        module = nn.Conv2d(channels, channels, groups=channels, **FILTERS[setting])
        compare(module, torch.randn(3, channels, 23, 70))
        compare(module, torch.randn(2, channels, 14, 33).to(memory_format=torch.channels_last), strides=False)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("filters", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("setting", FILTERS)
def test_filters_of_one_channel(setting, filters):
    torch.manual_seed(0)
    module = nn.Conv2d(1, filters, **FILTERS[setting])
    compare(module, torch.randn(3, 1, 23, 70))
    module.eval().requires_grad_(False)
    x = torch.randn(2, 1, 14, 33)
    torch.testing.assert_close(kiln.compile(module)(x), module(x))


def test_filters_read_nothing_but_their_window():
    x = torch.rand(1, 3, 20, 64)
    x[:, :, 4, 10] = float("inf")
    x[:, 1, 9, 63] = float("nan")
    weight = torch.rand(3, 1, 3, 5)

    def f(x):
        return torch.nn.functional.conv2d(x, weight, padding=(1, 2), groups=3)

    torch.testing.assert_close(kiln.compile(f)(x), f(x), equal_nan=True)


@pytest.mark.parametrize("kernel", [1, 4, 31])
def test_lines(kernel):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv1d(20, 20, kernel, padding=kernel // 2, groups=20), nn.SiLU())
    compare(module, torch.randn(3, 20, 41))
    compare(module, torch.randn(3, 41, 20).transpose(1, 2))


def test_runs_on_own_kernels(capfd):
    module = nn.Sequential(nn.Conv2d(32, 32, 3, groups=32), nn.ReLU())
    x = torch.randn(2, 32, 10, 10)

    def step(x):
        module.zero_grad()
        module(x).square().sum().backward()

    kiln.set_logs("output_code")
    kiln.compile(step)(x)
    kiln.set_logs("")
    plan = capfd.readouterr().err
    assert "<- convolution(" in plan and "<- convolution_backward(" in plan and "call aten::convolution" not in plan


def test_other_groups_are_library_calls():
    torch.manual_seed(0)
    # Two outputs for each input: the library's gradient has another stride for a dim of one element.
    compare(nn.Conv2d(8, 16, 3, groups=8), torch.randn(2, 8, 9, 9), strides=False)
    compare(nn.Conv2d(16, 16, 3, groups=4), torch.randn(2, 16, 9, 9))
    compare(nn.ConvTranspose2d(8, 8, 3, groups=8), torch.randn(2, 8, 9, 9), strides=False)
