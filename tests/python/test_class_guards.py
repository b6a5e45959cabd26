"""A class that a program looks at: changes are seen, patches that are taken back are none."""

import warnings

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


# Numbers that a class holds and that change from call to call.
def counters():
    class Base:
        used, scale = 0, 1.5

        @classmethod
        def add(cls, n):
            cls.used += n

        def value(self):
            return self.used

    class Counted(Base):
        calls = 0

        def value(self):
            return super().value() + super().used

    return Base, Counted


def unread(x, base, counted, made):
    return x * made.scale


def read_by_the_instance(x, base, counted, made):
    return x * made.used + made.value()


def read_by_the_class(x, base, counted, made):
    return x + base.used * 2 + getattr(counted, "used") + type(made).calls


def read_of_a_made_object(x, base, counted, made):
    return x + counted().used + base().value()


def read_in_the_dict(x, base, counted, made):
    return x * base.__dict__["used"] + vars(counted)["calls"]


def written_and_read(x, base, counted, made):
    base.used += 1
    counted.add(x.shape[0])
    counted.calls = counted.calls + 1
    return x * made.used + counted.calls


@pytest.mark.parametrize(
    "f",
    [unread, read_by_the_instance, read_by_the_class, read_of_a_made_object, read_in_the_dict, written_and_read],
)
def test_numbers_of_classes_that_change(f):
    runs = []
    for wrap in (lambda g: g, kiln.compile):
        base, counted = counters()
        made, call, results = counted(), wrap(f), []
        for i in range(14):
            if i == 9:
                counted.used = 100  # in front of the base's from now on
            if i == 11:
                base.used = 0.5
            if i == 12:
                del counted.used
            results.append(call(torch.ones(3), base, counted, made))
            base.used += 3
            counted.calls += 1
        runs.append((results, base.used, counted.calls, call))
    assert_same(runs[1][0], runs[0][0])
    assert runs[1][1:3] == runs[0][1:3]
    if f is unread:
        assert len(runs[1][3]._entries) <= 5  # three of them for what is no other number


def test_a_counter_of_a_class_compiles_a_few_times():
    class Net(torch.nn.Module):
        used = 0

        def forward(self, x):
            return x * 2 + Net.used

    net = Net()
    compiled = kiln.compile(net)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(20):
            assert_same(compiled(torch.ones(2)), torch.full((2,), 2.0 + i))
            Net.used += 1
