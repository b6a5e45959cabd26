"""Kernels that run on the rows of a product or a convolution as these are finished: same bits as one after the other."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import kiln


class Block(nn.Module):
    """Convolutions whose results go through relu, a residual sum, and a pool."""

    def __init__(self, width, size):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, width, 1)
        self.c = nn.Conv2d(width, width, 3, padding=1, stride=2)
        self.input = torch.randn(2, 3, size, size)

    def forward(self, x):
        x = F.relu(self.a(x))
        x = F.relu(self.b(x) + x)
        return F.max_pool2d(F.silu(self.c(x)), 2)


class Layer(nn.Module):
    """Products whose results go through gelu, a residual sum and a norm over their rows."""

    def __init__(self, rows, width, hidden):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, hidden), nn.Linear(hidden, width), nn.LayerNorm(width)
        self.input = torch.randn(2, rows, width)

    def forward(self, x):
        return self.norm(self.down(F.gelu(self.up(x))) + x), torch.softmax(self.up(x), -1)


MODELS = {
    "conv": lambda: Block(64, 48),
    "conv, odd": lambda: Block(37, 61),
    "linear": lambda: Layer(197, 256, 1024),
    "linear, odd": lambda: Layer(331, 136, 300),
    "linear, long rows": lambda: Layer(40, 64, 5000),
}


def steps(capfd, run):
    """The result of run() and the plan that it logged."""
    kiln.set_logs("output_code")
    result = run()
    kiln.set_logs("")
    return result, capfd.readouterr().err


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("train", [False, True])
def test_same_bits(name, threads, train, capfd):
    torch.manual_seed(0)
    model = MODELS[name]().train(train)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)

    def run():
        kiln.reset()
        compiled = kiln.compile(model)
        for _ in range(2):
            model.zero_grad()
            x = model.input.clone().requires_grad_(train)
            with torch.set_grad_enabled(train):
                out = compiled(x)
                out = out if isinstance(out, tuple) else (out,)
                if train:
                    sum(o.square().mean() for o in out).backward()
        return [*out, *[p.grad for p in model.parameters() if train], *([x.grad] if train else [])]

    try:
        with kiln.config.patch(disable_passes="plan.measure_products"):
            joined, plan = steps(capfd, run)
        with kiln.config.patch(disable_passes="plan.measure_products,schedule.epilogues,schedule.in_place"):
            apart, plain = steps(capfd, run)
    finally:
        torch.set_num_threads(before)
        kiln.reset()
    assert "\n    then " in plan
    assert "\n    then " not in plain
    for a, b in zip(joined, apart, strict=True):
        assert torch.equal(a, b)
