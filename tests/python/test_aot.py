"""kiln.aot as PyTorch users write it."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kiln import aot
from kiln.exc import UserError


def recorder(graphs):
    def compiler(gm, example_inputs):
        graphs.append((gm, example_inputs))
        return aot.make_boxed_func(gm.forward)

    return compiler


def test_function_with_compilers():
    forward, backward = [], []
    fn = lambda x, w, scale: {"out": torch.tanh(x @ w) * scale, "scale": scale}  # noqa: E731
    compiled = aot.aot_function(fn, recorder(forward), recorder(backward))
    x, w = torch.randn(4, 6), torch.randn(6, 3, requires_grad=True)
    got, expected = compiled(x, w, scale=2.0), fn(x, w, scale=2.0)
    assert got["scale"] == 2.0
    torch.testing.assert_close(got["out"], expected["out"])
    (g,) = torch.autograd.grad(got["out"].sum(), w)
    (e,) = torch.autograd.grad(expected["out"].sum(), w)
    torch.testing.assert_close(g, e)
    assert len(forward) == len(backward) == 1
    gm, inputs = forward[0]
    assert isinstance(gm, torch.fx.GraphModule)
    assert torch.ops.aten.mm.default in [n.target for n in gm.graph.nodes]
    assert [tuple(i.shape) for i in inputs] == [(4, 6), (6, 3)]
    compiled(x, w, scale=2.0)
    assert len(forward) == 1
    compiled(torch.randn(5, 6), w, scale=2.0)
    assert len(forward) == 2


def test_unboxed_callables_work():
    compiled = aot.aot_function(lambda x: x.sin() * 2, lambda gm, inputs: gm.forward)
    x = torch.randn(4, requires_grad=True)
    compiled(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach().cos())


def test_module_trains_as_in_eager():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    twin = copy.deepcopy(net)
    compiled = aot.aot_module(twin, recorder([]), recorder([]), partition_fn=aot.min_cut_partition)
    x, y = torch.randn(2, 3, 8, 8), torch.tensor([1, 2])
    for _ in range(3):
        for model, run in ((net, net), (twin, compiled)):
            model.zero_grad()
            F.cross_entropy(run(x), y).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad, alpha=0.1)
    for a, b in zip(net.state_dict().values(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)


def test_module_simplified():
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    gm = torch.fx.symbolic_trace(net)
    x = torch.randn(4, 6)
    backward = []
    compiled = aot.aot_module_simplified(gm, [x], fw_compiler=recorder([]), bw_compiler=recorder(backward))
    compiled(x).square().mean().backward()
    got = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    net(x).square().mean().backward()
    for g, p in zip(got, net.parameters(), strict=True):
        torch.testing.assert_close(g, p.grad)
    assert len(backward) == 1


def test_own_compiler_is_the_default():
    compiled = aot.aot_function(lambda x: F.gelu(x).sum())
    x = torch.randn(8, requires_grad=True)
    compiled(x).backward()
    y = x.detach().clone().requires_grad_()
    F.gelu(y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_input_changes_reach_the_input():
    compiled = aot.aot_function(lambda x: x.add_(1) * 2, recorder([]))
    x = torch.zeros(3)
    version = x._version
    torch.testing.assert_close(compiled(x), torch.full((3,), 2.0))
    torch.testing.assert_close(x, torch.ones(3))
    assert x._version > version


def test_mistakes_are_named():
    with pytest.raises(UserError, match="callable"):
        aot.aot_function(lambda x: x + 1, lambda gm, inputs: 3)(torch.randn(2))
    with pytest.raises(UserError, match="partition_fn"):
        aot.aot_function(lambda x: x + 1, partition_fn=lambda *a: None)
    with pytest.raises(ZeroDivisionError):
        aot.aot_function(lambda x: x + 1 / 0)(torch.randn(2))

    def broken(gm, inputs):
        raise ValueError("no luck")

    with pytest.raises(ValueError, match="no luck"):
        aot.aot_function(lambda x: x + 1, broken)(torch.randn(2))
