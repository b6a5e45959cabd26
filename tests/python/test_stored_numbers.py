"""tensor[key] = number, of numbers that change: open sizes and ints, floats of these, and what item() gives."""

import warnings

import pytest
import torch

import kiln
from helpers import SIZES, check_sizes
from kiln.testing import assert_same


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.float32, torch.bfloat16, torch.float64, torch.bool])
def test_open_sizes(dtype):
    def f(x):
        n = x.shape[0]
        made = torch.zeros(4, 6, dtype=dtype)
        made[0] = n
        made[1, 2:4] = n * 2 - 1
        made[:, -1] = n / 2
        made[made == 0] = n % 3
        made[torch.tensor([2, 3]), torch.tensor([0, 1])] = -n
        return made

    check_sizes(f)


def test_what_does_not_fit_raises():
    def f(x):
        made = torch.zeros(3, dtype=torch.int8)
        made[0] = x.shape[0] * 30
        return made

    compiled = kiln.compile(f, dynamic=True)
    for n in (1, 2, 3):
        assert_same(compiled(torch.ones(n, 2)), f(torch.ones(n, 2)))
    for run in (f, compiled):
        with pytest.raises(RuntimeError, match="value cannot be converted to type"):
            run(torch.ones(5, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32])
def test_items(dtype):
    made = torch.zeros(5, dtype=dtype)

    def f(x):
        total = x.sum().item()
        made[0] = total
        made[1:3] = total * 2 + 1
        made[4] = int(x.abs().max()) + 1
        return made * 2

    compiled = kiln.compile(f)
    for i in range(12):
        x = torch.linspace(-i, 7, 5)
        expected = f(x), made.clone()
        made.zero_()
        assert_same((compiled(x), made.clone()), expected)
    if dtype in (torch.float32, torch.float64):
        assert len(compiled._entries) <= 2


def test_items_that_do_not_fit():
    def f(x, y):
        y[0] = x.sum().item() * 1e30
        return y + 1

    compiled = kiln.compile(f)
    for value in (1.0, 2.0, float("inf"), float("nan")):
        x = torch.tensor([value])
        assert_same(compiled(x, torch.zeros(2)), f(x, torch.zeros(2)))
    for run in (f, compiled):
        with pytest.raises(RuntimeError, match="value cannot be converted to type float"):
            run(torch.tensor([1e30]), torch.zeros(2))


def test_a_counter_and_what_it_stands_for():
    """A queue of features whose place is a buffer (He et al., Momentum Contrast, 2020)."""

    def run(compiled):
        queue, place = torch.zeros(4, 160), torch.zeros(1, dtype=torch.long)

        def enqueue(keys):
            at = int(place)
            queue[:, at : at + 8] = keys.T
            place[0] = (at + 8) % 160
            return queue.sum()

        step = kiln.compile(enqueue) if compiled else enqueue
        results = [step(torch.full((8, 4), float(i))) for i in range(60)]
        return results, queue, place

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no recompile limit
        assert_same(run(True), run(False))


def test_changing_ints():
    def f(x, n):
        x = x * 2
        x[1] = n
        x[x > 3] = n * 0.5
        return x

    compiled = kiln.compile(f)
    for n in (*SIZES, 11, 14, 17, 20):
        x = torch.linspace(-1, 4, 6)
        assert_same(compiled(x, n), f(x, n))
    assert len(compiled._entries) <= 2
