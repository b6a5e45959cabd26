"""Dynamically quantized modules: their operators take packed weights, objects of TorchBind classes, as arguments."""

import copy
import gc

import pytest
import torch
import torch.ao.quantization as quantization
from torch import nn

import kiln

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.skipif("x86" not in torch.backends.quantized.supported_engines, reason="packs no weights here"),
]


def quantized(module, *classes, dtype=torch.qint8):
    return quantization.quantize_dynamic(module.eval(), set(classes) or {nn.Linear}, dtype=dtype)


def mlp(dtype=torch.qint8):
    torch.manual_seed(0)
    return quantized(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.qint8, torch.float16])
@torch.no_grad()
def test_linear(dtype):
    module = mlp(dtype)
    f = kiln.compile(module, fullgraph=True)
    for n in (3, 3, 5, 7):
        x = torch.randn(n, 8)
        torch.testing.assert_close(f(x), module(x))
    assert f(torch.randn(3, 8)).stride() == (4, 1)


@torch.no_grad()
def test_other_weights():
    f = kiln.compile(lambda module, x: module(x))
    x = torch.randn(3, 8)
    for _ in range(2):
        module = mlp()
        other = quantized(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))
        for m in (module, other, module, copy.deepcopy(other)):
            torch.testing.assert_close(f(m, x), m(x))
        module[0], other[0] = other[0], module[0]
        torch.testing.assert_close(f(module, x), module(x))
        module[2].set_weight_bias(torch.quantize_per_tensor(torch.rand(4, 16), 0.01, 0, torch.qint8), torch.rand(4))
        torch.testing.assert_close(f(module, x), module(x))
        del module, other, m
        gc.collect()


@torch.no_grad()
def test_backend_of_fx_graphs():
    module = mlp()
    x = torch.randn(3, 8)
    f = kiln.compile(module, backend=lambda gm, inputs: gm.forward)
    for _ in range(2):
        torch.testing.assert_close(f(x), module(x))
    compiler = kiln.aot.make_boxed_func
    f = kiln.compile(
        module,
        backend=lambda gm, inputs: kiln.aot.aot_module_simplified(
            gm, inputs, fw_compiler=lambda g, i: compiler(g.forward)
        ),
    )
    torch.testing.assert_close(f(x), module(x))


@torch.no_grad()
def test_recurrent_and_embeddings():
    torch.manual_seed(0)
    lstm = quantized(nn.LSTM(8, 16, num_layers=2), nn.LSTM)
    x = torch.randn(5, 2, 8)
    torch.testing.assert_close(kiln.compile(lstm)(x), lstm(x))
    cell = quantized(nn.GRUCell(8, 16), nn.GRUCell)
    torch.testing.assert_close(kiln.compile(cell)(x[0]), cell(x[0]))


@torch.no_grad()
def test_packs_inside():
    weight = torch.quantize_per_tensor(torch.rand(4, 8), 0.01, 0, torch.qint8)

    def f(x):
        packed = torch.ops.quantized.linear_prepack(weight, None)
        return torch.ops.quantized.linear_dynamic(x, packed) * 2

    x = torch.randn(3, 8)
    torch.testing.assert_close(kiln.compile(f)(x), f(x))


def test_with_gradients():
    module = mlp()
    x = torch.randn(3, 8, requires_grad=True)
    expected, actual = module(x), kiln.compile(module)(x)
    torch.testing.assert_close(actual, expected)
    assert actual.requires_grad == expected.requires_grad
