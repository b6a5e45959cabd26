"""A class that a program looks at: changes are seen, patches that are taken back are none."""

import pytest
import torch
from torch import nn

import kiln
from kiln.testing import CompileCounter, assert_same

X = torch.linspace(-2, 2, 12).reshape(3, 4)


class Doubles(nn.Module):
    def forward(self, x):
        return x * 2


def test_a_class_that_is_patched_for_a_while():
    # Tracers of torch.fx do so with nn.Module, a backend's among them: what was put back was never changed.
    def tracing(gm, example_inputs):
        traces.append(torch.fx.symbolic_trace(nn.Sequential(nn.ReLU())))
        return gm.forward

    traces = []
    model = Doubles()
    compiled = kiln.compile(model, backend=tracing)
    for _ in range(12):
        assert_same(compiled(X), X * 2)
        torch.fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    assert len(traces) == 1


@pytest.mark.parametrize("change", ["method", "base", "bases", "attribute"])
def test_a_class_that_is_changed_and_patched(change):
    class Base(nn.Module):
        scale = 2

        def factor(self):
            return self.scale

    class Model(Base):
        def forward(self, x):
            return x * self.factor()

    class Other(nn.Module):
        def factor(self):
            return 5

    compiled = kiln.compile(Model(), backend=CompileCounter())
    assert_same(compiled(X), X * 2)
    kept = Base.factor
    for factor in (3, 4):
        if change == "method":
            Model.factor = lambda self, n=factor: n
        elif change == "base":
            Base.factor = lambda self, n=factor: n
        elif change == "bases":
            Other.factor = lambda self, n=factor: n
            Model.__bases__ = (Other,)
        else:
            Base.scale = factor
        torch.fx.symbolic_trace(nn.Sequential(nn.ReLU()))
        assert_same(compiled(X), X * factor)
    Base.factor, Base.scale = kept, 2
    Model.__bases__ = (Base,)
    if change == "method":
        del Model.factor
    assert_same(compiled(X), X * 2)
