"""Which item of which dict a value was read from: keys that look alike, orders of their own, what makes missing items."""

import collections
import enum
import types
import warnings

import pytest
import torch
from torch import nn

import kiln
from helpers import check_calls
from kiln.testing import CompileCounter

X = torch.ones(2)
LONG = "a" * 300


class Mode(enum.Enum):
    A = 1
    B = 2


class Level(enum.IntEnum):
    A = 1
    B = 2


@pytest.mark.parametrize(
    "a, b", [(Mode.A, Mode.B), (Level.A, Level.B), (LONG + "x", LONG + "y"), ((1, Mode.A), (1, Mode.B))]
)
@pytest.mark.parametrize("kind", [dict, collections.Counter, lambda d: collections.defaultdict(int, d)])
@pytest.mark.parametrize("one", [1, 0.5])
def test_counters_whose_keys_look_alike(a, b, kind, one):
    def count(x, counts, key):
        counts[key] += one
        return x * counts[key]

    compiled = kiln.compile(count)
    ours, theirs = kind({a: 0, b: 100}), kind({a: 0, b: 100})
    for key in [a, b] * 6:
        torch.testing.assert_close(compiled(X, ours, key), count(X, theirs, key))
        assert ours == theirs


def test_globals_of_two_modules():
    modules = []
    for name in ("first", "second"):
        module = types.ModuleType(name)
        exec("step = 0\ndef advance(x):\n    global step\n    step += 1\n    return x * step\n", module.__dict__)
        modules.append(module)
    first, second = modules
    second.step = 100
    compiled = kiln.compile(lambda x: first.advance(x) - second.advance(x))
    for i in range(1, 8):
        torch.testing.assert_close(compiled(X), X * -100.0)
        assert (first.step, second.step) == (i, 100 + i)


ORDERS = {
    "items": lambda x, d: x * 0 + sum(10**i * v for i, (k, v) in enumerate(d.items())),
    "first": lambda x, d: x * d[next(iter(d))],
    "last": lambda x, d: x * next(reversed(d.values())),
    "list": lambda x, d: x * list(d.values())[0],
    "oldest goes": lambda x, d: x * d.popitem(last=False)[1],
}


@pytest.mark.parametrize("name", ORDERS)
def test_the_order_of_an_ordered_dict(name):
    def moved(key):
        d = collections.OrderedDict(a=1, b=2, c=3)
        if key:
            d.move_to_end(key)
        return d

    check_calls(ORDERS[name], [(X, moved(key)) for key in (None, "a", "b", None, "a")])
    compiled, d = kiln.compile(ORDERS[name]), moved(None)  # the same object
    for key in ("a", "b", "c"):
        if key in d:
            d.move_to_end(key)
        expected = ORDERS[name](X, d.copy())
        torch.testing.assert_close(compiled(X, d), expected)


def test_an_ordered_dict_of_tuples_and_tensors():
    def touch(x, cache, key):
        if key in cache:
            cache.move_to_end(key)
        else:
            cache[key] = x * len(cache)
        if len(cache) > 3:
            cache.popitem(last=False)
        return cache[key] + len(cache)

    compiled = kiln.compile(touch)
    keys = [(i, "k") for i in range(5)]
    for choice in (keys, [torch.full((2,), float(i)) for i in range(5)]):
        ours, theirs = collections.OrderedDict(), collections.OrderedDict()
        for i in (0, 1, 2, 0, 3, 1, 4, 4, 0, 2):
            torch.testing.assert_close(compiled(X, ours, choice[i]), touch(X, theirs, choice[i]))
            assert [id(k) for k in ours] == [id(k) for k in theirs]


def test_what_makes_missing_items():
    def read(x, d):
        return x + d["a"]

    def append(x, d):
        d["a"].append(1)
        return x + len(d)

    zeros = [int, float, lambda: torch.zeros(2).double(), lambda: torch.ones(2), int]
    check_calls(read, [(X, collections.defaultdict(f)) for f in zeros])
    compiled = kiln.compile(append)
    for kind in (list, collections.deque, list):
        d = collections.defaultdict(kind)
        compiled(X, d)
        assert type(d["a"]) is kind and list(d["a"]) == [1]


def test_tuples_of_tensors_and_modules_as_keys():
    def read(x, parts, d):
        return sum((i + 1) * d[part, "m"] for i, part in enumerate(parts)) + x

    for parts in ([torch.ones(2), torch.ones(3)], [nn.Linear(1, 1), nn.Linear(1, 1)]):
        compiled = kiln.compile(read)
        items = [((part, "m"), torch.tensor(10.0 * i)) for i, part in enumerate(parts)]
        for order in (items, items[::-1], items):
            torch.testing.assert_close(compiled(X, parts, dict(order)), read(X, parts, dict(order)))


def test_a_loop_over_numbered_parameters():
    def step(group):
        for i, p in enumerate(group["params"]):
            norm = p.sum().item()
            if norm > 100:
                group["seen"] = i
            kiln.graph_break()
            p.add_(group["lr"] if norm > 0 else group["lr"] * 2)

    ours, theirs = ({"params": [torch.full((2,), i - 5.0) for i in range(14)], "lr": 0.5} for _ in range(2))
    compiled = kiln.compile(step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the recompile limit
        for _ in range(3):
            compiled(ours), step(theirs)
    torch.testing.assert_close(ours["params"], theirs["params"])


def test_callers_that_take_turns():
    """What is a closure of its own in each call is learned though another caller comes between."""
    counter = CompileCounter()

    @kiln.compile(backend=counter)
    def apply(f, x):
        return f(x).sum()

    def double(x):
        return x * 2

    for i in range(12):
        assert apply(lambda t: t * 3, X).item() == 6
        with torch.no_grad():
            assert apply(double, X).item() == 4
    assert counter.frame_count <= 4
