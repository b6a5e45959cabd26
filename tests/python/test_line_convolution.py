"""1-d convolutions, which run as 2-d ones: outputs, all gradients and strides against eager."""

import pytest
import torch
from torch import nn

import kiln
from helpers import training_results

SETTINGS = {
    "plain": dict(kernel_size=3),
    "padded": dict(kernel_size=5, padding=2),
    "strided and dilated": dict(kernel_size=3, stride=2, dilation=2, padding=1),
    "one element": dict(kernel_size=1),
    "groups": dict(kernel_size=4, groups=2),
    "no bias": dict(kernel_size=2, stride=2, bias=False),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("layer", [nn.Conv1d, nn.ConvTranspose1d])
@pytest.mark.parametrize("training", [True, False])
def test_settings(setting, layer, training):
    torch.manual_seed(0)
    kwargs = SETTINGS[setting]
    module = nn.Sequential(layer(6, 10, **kwargs), nn.BatchNorm1d(10), nn.ReLU(), layer(10, 4, **kwargs)).train(
        training
    )
    x = torch.randn(3, 6, 41)
    for a, b in zip(
        training_results(kiln.compile(module, fullgraph=True), module, x),
        training_results(module, module, x),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=3e-4)
        assert a.stride() == b.stride()


def test_runs_on_own_kernels_and_folds_norms(capfd):
    module = nn.Sequential(nn.Conv1d(16, 32, 3, bias=False), nn.BatchNorm1d(32), nn.ReLU()).eval()
    with torch.no_grad():
        x = torch.randn(2, 16, 50)
        compiled = kiln.compile(module)
        kiln.set_logs("output_code")
        compiled(x)
        kiln.set_logs("")
        plan = capfd.readouterr().err
        assert "<- convolution(" in plan and "call aten::convolution" not in plan
        assert "_folded" in plan
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-4)
        module[1].running_mean.add_(1)  # what was folded follows
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-4)


def test_transposed_and_permuted_inputs():
    torch.manual_seed(0)
    module = nn.Conv1d(8, 12, 3, padding=1)
    x = torch.randn(4, 30, 8).transpose(1, 2)  # as after attention
    for a, b in zip(
        training_results(kiln.compile(module, fullgraph=True), module, x),
        training_results(module, module, x),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=3e-4)
        assert a.stride() == b.stride()


@pytest.mark.parametrize("shape", [(2, 1, 9), (1, 6, 1), (5, 1, 1), (6, 20)])
def test_odd_shapes(shape):
    torch.manual_seed(0)
    channels = shape[-2]
    module = nn.Conv1d(channels, 3, 1)
    x = torch.randn(shape)
    for a, b in zip(
        training_results(kiln.compile(module), module, x), training_results(module, module, x), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=3e-4)
        assert a.stride() == b.stride()
