"""Modules of torch.nn that take their shapes from the first input: that call runs in eager, the next is captured."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy

import kiln
from helpers import breaks
from kiln.testing import CompileCounter, assert_same


class Net(nn.Module):
    """Lazy layers of each kind that holds parameters or buffers."""

    def __init__(self):
        super().__init__()
        self.conv = nn.LazyConv2d(4, 3)
        self.norm = nn.LazyBatchNorm2d()
        self.head = nn.Sequential(nn.Flatten(), nn.LazyLinear(6), nn.ReLU(), nn.LazyLinear(2))

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).relu())


@pytest.mark.parametrize("fullgraph", [False, True])
def test_the_second_call_is_one_graph(fullgraph):
    x = torch.randn(3, 2, 6, 6)
    net, other = Net(), Net()
    counter = CompileCounter()
    compiled = kiln.compile(net, backend=counter, fullgraph=fullgraph)
    for call in range(3):
        torch.manual_seed(call)
        want = other(x)
        torch.manual_seed(call)
        assert_same(compiled(x), want)
        assert counter.frame_count == (call > 0)
    assert type(net.head[1]) is nn.Linear
    assert_same(list(net.state_dict().values()), list(other.state_dict().values()))


def test_a_training_step_of_a_lazy_network():
    nets = Net(), Net()
    x = torch.randn(3, 2, 6, 6)

    def step_of(net):
        def step(x):
            loss = net(x).square().mean()
            loss.backward()
            for p in net.parameters():
                with torch.no_grad():
                    p -= 0.1 * p.grad
                p.grad = None
            return loss.detach()

        return step

    plain = step_of(nets[0])
    compiled = kiln.compile(step_of(nets[1]), fullgraph=True)
    for call in range(3):
        torch.manual_seed(call)
        want = plain(x)
        torch.manual_seed(call)
        assert_same(compiled(x), want)
    assert_same(list(nets[1].parameters()), list(nets[0].parameters()))


def test_many_lazy_networks_of_one_class():
    x = torch.randn(3, 2, 6, 6)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="kiln")
        for _ in range(5):
            net = Net()
            counter = CompileCounter()
            compiled = kiln.compile(net, backend=counter, fullgraph=True)
            compiled(x)
            compiled(x)
            assert counter.frame_count == 1


def test_a_network_that_never_gets_its_input():
    net = Net()

    def f(x):
        return x * sum(is_lazy(p) for p in net.parameters())

    compiled = kiln.compile(f)
    x = torch.ones(2)
    with pytest.warns(UserWarning, match="a lazy module waits for its first input, and calls in eager did not change"):
        for _ in range(4):
            assert_same(compiled(x), f(x))


def test_lazy_layers_that_a_function_makes():
    def f(x):
        torch.manual_seed(0)
        return nn.LazyLinear(3)(x)

    x = torch.randn(2, 4)
    compiled = kiln.compile(f)
    for _ in range(3):
        assert_same(compiled(x), f(x))
    assert breaks(f, x)
