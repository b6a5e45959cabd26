"""Products of half types, which are computed in float32 where ATen has no vector code for them: values, gradients, strides and
dtypes against eager, and which products stay."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kiln

DTYPES = {torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Products(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(24, 24) / 5)

    def forward(self, x):
        scores = torch.baddbmm(x.new_ones(1, 1, 1), x, x.mT, beta=0.5, alpha=0.25).softmax(-1)
        return torch.addmm(x[0, 0], (scores @ x).flatten(0, 1), self.w) @ self.w.t()


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.wide, self.depthwise = nn.Conv2d(16, 16, 5, stride=2, padding=2), nn.Conv2d(16, 16, 3, groups=16)
        self.up, self.last = nn.ConvTranspose2d(16, 8, 2, 2, bias=False), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.last(self.up(self.depthwise(self.wide(self.norm(self.first(x)).relu()))))


MODELS = {
    "attention": (Attention, (2, 20, 32)),
    "products": (Products, (3, 20, 24)),
    "convolutions": (Convolutions, (2, 3, 20, 20)),
    "channels last": (lambda: Convolutions().to(memory_format=torch.channels_last), (2, 3, 20, 20)),
    "line": (lambda: nn.Conv1d(6, 8, 5, padding=2), (2, 6, 30)),
    "encoder": (lambda: nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), (2, 20, 32)),
    "cells": (lambda: nn.LSTM(8, 16, batch_first=True), (4, 10, 8)),
}


def first(out):
    return out[0] if isinstance(out, tuple) else out


def step(f, module, x):
    module.zero_grad()
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = first(f(x))
    y.float().sin().mean().backward()
    return [y.detach(), x.grad, *[p.grad.clone() for p in module.parameters()]]


def assert_near(found, expected, tolerance):
    """To a share of the largest number: eager rounds in between, too."""
    assert found.dtype == expected.dtype and found.stride() == expected.stride()
    scale = expected.float().abs().max().item()
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=tolerance * scale + 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_models(model, dtype):
    torch.manual_seed(0)
    make, shape = MODELS[model]
    module, x = make().to(dtype), torch.randn(shape).to(dtype)
    if model == "channels last":
        x = x.contiguous(memory_format=torch.channels_last)
    with kiln.config.patch(widen_half=True):
        compiled = kiln.compile(module, fullgraph=True)
        for found, expected in zip(step(compiled, module, x), step(module, module, x), strict=True):
            assert_near(found, expected, DTYPES[dtype])
        module.eval()
        with torch.no_grad():
            assert_near(first(compiled(x)), first(module(x)), DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast_step(dtype):
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), torch.randn(40, 16)

    def run(f):
        net.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = F.mse_loss(f(x).float(), x)
        loss.backward()
        return [loss.detach(), *[p.grad.clone() for p in net.parameters()]]

    with kiln.config.patch(widen_half=True):
        for found, expected in zip(run(kiln.compile(net)), run(net), strict=True):
            assert_near(found, expected, DTYPES[dtype])


def steps_of(f, *args):
    """The artifact's steps, as kiln.explain prints them."""
    with torch.no_grad():
        return kiln.explain(f)(*args).entries[0].artifact


def test_few_rows_stay():
    """With a matrix whose columns are dense ATen reads each number once, as many as there are; a copy would write them."""
    w = torch.randn(64, 32, dtype=torch.float16)

    def linear(x):
        return F.linear(x, w)

    def steps(x):
        for _ in range(4):
            x = F.linear(F.linear(x, w), w.t())
        return x

    with kiln.config.patch(widen_half=True, disable_passes="plan.measure_products"):
        few, many = torch.randn(4, 32).half(), torch.randn(40, 32).half()
        assert "matmul aten::mm" not in steps_of(linear, few)
        assert "matmul aten::mm" in steps_of(linear, many)
        assert "call aten::mm.out" not in steps_of(steps, few)  # one copy for several products


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_with_one_query(dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, length, 16).to(dtype) for length in (1, 50, 50))
    mask = torch.rand(2, 1, 1, 50) > 0.3
    f = F.scaled_dot_product_attention
    assert "flash_attention" not in steps_of(f, q, k, v)
    for args in ((q, k, v), (q, k, v, mask), (q, k, v, mask.to(dtype))):
        assert_near(kiln.compile(f)(*args), f(*args), DTYPES[dtype])


def test_off_switch():
    x, w = torch.randn(40, 32).half(), torch.randn(64, 32).half()
    with kiln.config.patch(widen_half=True, disable_passes="joint.widen_half"):
        assert torch.equal(kiln.compile(F.linear)(x, w), F.linear(x, w))
        assert "call aten::mm.out" in steps_of(lambda x: F.linear(x, w), x)


def test_what_is_saved_is_half():
    """The backward widens again: eager saves no more."""
    saved = []

    def forward_compiler(gm, inputs):
        def run(*args):
            outputs = gm(*args)
            saved.extend(t.dtype for t in outputs)
            return outputs

        return run

    w, v = torch.randn(32, 32).half().requires_grad_(), torch.randn(32, 32).half().requires_grad_()
    with kiln.config.patch(widen_half=True):
        f = kiln.aot.aot_function(
            lambda x, w, v: F.gelu(x @ w) @ v, fw_compiler=forward_compiler, bw_compiler=lambda gm, inputs: gm.forward
        )
        f(torch.randn(40, 32).half().requires_grad_(), w, v).sum().backward()
    assert len(saved) > 1 and set(saved) == {torch.float16}
