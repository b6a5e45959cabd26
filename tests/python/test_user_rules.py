"""What users say of functions: disable, run, graph_break, allow_in_graph, assume_constant_result and their like."""

import pytest
import torch

import kiln
from helpers import graphs
from kiln.testing import CompileCounter, assert_same

X = torch.linspace(-2, 2, 12).reshape(3, 4)


def test_disable_run_and_is_compiling():
    seen = []

    @kiln.disable
    def outside(x):
        seen.append(kiln.is_compiling())
        return x + 1

    def f(x):
        if kiln.is_compiling():
            x = x + 0
        return outside(x * 2) * 3

    counter = CompileCounter()
    assert_same(kiln.compile(f, backend=counter)(X), (X * 2 + 1) * 3)
    assert seen == [False]
    assert counter.frame_count == 2
    assert kiln.is_compiling() is False


def test_graph_break_function():
    def f(x):
        x = x + 1
        kiln.graph_break()
        return x * 2

    assert_same(f(X), (X + 1) * 2)
    assert graphs(f, X) == 2
    with pytest.raises(kiln.exc.GraphBreakError, match="graph_break"):
        kiln.compile(f, fullgraph=True)(X)


def test_assume_constant_result():
    calls = []

    @kiln.assume_constant_result
    def answer():
        calls.append(1)
        return 42

    def f(x):
        return x + answer()

    compiled = kiln.compile(f)
    for _ in range(3):
        assert_same(compiled(X), X + 42)
    assert len(calls) == 1


@kiln.assume_constant_result
def found(x):
    return torch.nonzero(x)


@kiln.assume_constant_result
def total(values):
    return {"sum": values.sum().item(), "kept": values[values > 0]}


def test_assume_constant_result_of_what_needs_values():
    def f(x):
        try:
            n = found(x).size(0)
        except RuntimeError:
            n = -1
        return x * n, total(x)["kept"] + x.max(), total(x)["sum"]

    x = torch.tensor([1.0, 0.0, 2.0])
    assert_same(kiln.compile(f, fullgraph=True)(x), (x * 2, torch.tensor([3.0, 4.0]), 3.0))

    def computed(x):
        return x * found(x + 1).size(0)

    assert_same(kiln.compile(computed)(x), x * 3)
    with pytest.raises(kiln.exc.GraphBreakError, match="found with tensors that are computed here"):
        kiln.compile(computed, fullgraph=True)(x)


def test_allow_and_disallow_in_graph():
    def helper(x):
        return x * 2 + 1

    def f(x):
        return helper(x) - 1

    kiln.allow_in_graph(helper)
    counter = CompileCounter()
    assert_same(kiln.compile(f, backend=counter)(X), X * 2)
    assert counter.op_count == 2  # helper as one node, and the subtraction
    kiln.reset()
    kiln.disallow_in_graph(torch.sub)

    def g(x):
        return torch.sub(x + 1, 2) * 3

    try:
        assert graphs(g, X) == 2
    finally:
        kiln.allow_in_graph(torch.sub)


def test_run_compiles_nothing():
    def f(x):
        return (x + 1).sin()

    counter = CompileCounter()
    compiled = kiln.compile(f, backend=counter)
    assert_same(kiln.run(compiled)(X), f(X))
    assert counter.frame_count == 0
    compiled(X)
    assert_same(kiln.run(compiled)(X), f(X))
    assert counter.frame_count == 1
