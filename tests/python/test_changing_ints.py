"""Python ints that change between calls, a counter first of all: inputs of the graph from their first change on."""

import gc
import math
import random
import warnings

import pytest
import torch
from torch import nn

import kiln
from kiln.testing import assert_same
from test_item_numbers import same

X = torch.arange(1.0, 7.0).reshape(2, 3)
VALUES = [3, 4, -2, 7, 0, 1, 100, 12345, 2]


def check(f, *args, variants=2, values=VALUES):
    """Calls of `f` in eager and compiled agree; `variants` is how often it was compiled."""
    compiled = kiln.compile(f)
    for i in values:
        same(f(*args, i), compiled(*args, i))
    if variants:
        assert len(compiled._entries) == variants


@pytest.mark.parametrize(
    "use",
    [
        lambda x, i: x * i + i - (1 - i) / 2,
        lambda x, i: (x, i, i + 1, 2 * i - 3, -i, abs(i), [i * i], {"i": i}),
        lambda x, i: (x, i / 4, i * 0.5, 1.5 - i, i**2, i**0, 0.9**i, float(i), int(i)),
        lambda x, i: (x, i // 3, i % 3, i // -4, i % -4, (i * 7 - 2) // 5),
        lambda x, i: x.add(i).mul(i).add(x, alpha=i) + torch.where(x > 2, x, i),
        lambda x, i: (x > i, x == i, i <= x, x / (i % 5 + 1), x + i * i),
        lambda x, i: (x, max(i, 3), min(2, i), math.sqrt(i * i)),
        lambda x, i: (x * 2, torch.tensor(i), torch.tensor(i + 1, dtype=torch.float32), torch.as_tensor(i * 0.5)),
        lambda x, i: (x, isinstance(i, int), type(i) is int, isinstance(i, bool), type(i + 0.5) is float),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool], ids=str)
def test_arithmetic(use, dtype):
    bools = dtype is torch.bool
    check(use, X > 3 if bools else (X * 2).to(dtype), variants=None if bools else 2)


def test_int32():
    def f(x, i):
        return (
            x * i + i - (1 - i) / 2,
            x.add(i).mul(i).sub(x, alpha=i),
            torch.where(x > 2, x, i),
            x > i,
            x / (i % 5 + 1),
        )

    check(f, X.to(torch.int32))
    check(lambda x, i: x + i * i, X.to(torch.int32), variants=None)  # it may not fit


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.uint8, torch.bfloat16, torch.float16], ids=str)
def test_narrow_types_take_constants(dtype):
    check(lambda x, i: (x * i, x + i), X.to(dtype), variants=None, values=[3, 4, 2, 7, 0, 1])


@pytest.mark.parametrize(
    "use",
    [
        lambda x, i: x[:, i % 3],
        lambda x, i: x.expand(i % 3 + 1, 2, 3),
        lambda x, i: x + sum(range(i % 4)),
        lambda x, i: x * {3: 5}.get(i, 2),
        lambda x, i: x * (2 if i > 3 else 3),
        lambda x, i: (x, f"{i}", str(i), "%d" % i, hex(i)),
        lambda x, i: x * (i & 3) + (i << 1) + ~i,
        lambda x, i: (x * 2, [1, 2] * (i % 3), "ab" * (i % 3)),
        lambda x, i: torch.zeros(i % 5) + x.sum(),
        lambda x, i: (x, i.bit_length(), round(i), divmod(i, 3)),
        lambda x, i: x ** (i % 3),
        lambda x, i: (x, i is None, i == 3, i in (3, 4)),
        lambda x, i: x if i else x * 2,
        lambda x, i: (x, i ** (i % 3), 2 ** abs(i % 5)),
        lambda x, i: x.reshape(-1)[i % 6 :],
        lambda x, i: torch.arange(i % 4) + i,
    ],
)
def test_what_needs_the_value_gets_it(use):
    check(use, X, variants=None, values=VALUES[:7])


def test_large_ints():
    def f(x, i):
        return x, i + 1, i * i, i * i * i * i

    check(f, X, values=[3, 4, 2**31 - 1, -(2**31) + 1, 2**31, 2**63, 2**80, -5], variants=None)


def test_division_by_zero():
    compiled = kiln.compile(lambda x, i: (x, 7 // i, 7 % i, 1 / i))
    for i in (3, 4, 5):
        same((X, 7 // i, 7 % i, 1 / i), compiled(X, i))
    with pytest.raises(ZeroDivisionError):
        compiled(X, 0)
    same((X, 7 // 2, 7 % 2, 1 / 2), compiled(X, 2))


def test_floats_and_ints_and_booleans_in_turn():
    compiled = kiln.compile(lambda x, i: (x * i, i))
    for i in (3, 4, 0.5, True, 5, False, 2.5, 7):
        same((X * i, i), compiled(X, i))


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.scale = 0, 1

    def forward(self, x):
        self.calls += 1
        self.scale = self.scale * 3 % 1001
        return x * self.scale + self.calls


def test_counters_on_modules():
    eager, counter = Counter(), Counter()
    compiled = kiln.compile(lambda x: counter(x))
    for _ in range(12):
        same(eager(X), compiled(X))
        assert (eager.calls, eager.scale) == (counter.calls, counter.scale)
        assert type(counter.calls) is int
    assert len(compiled._entries) == 2


def test_across_a_graph_break():
    def f(x, i):
        y = x * i
        kiln.graph_break()
        return y + i, i

    check(f, X)


def test_in_a_loop_with_a_break():
    def f(x):
        for i in range(10):
            x = x + i
            kiln.graph_break()
        return x

    same(f(X), kiln.compile(f)(X))


def test_identity_of_small_ints():
    def f(x, i, j):
        return x * i, i is j

    compiled = kiln.compile(f)
    for i, j in ((3, 4), (4, 5), (5, 5), (6, 7), (7, 7)):
        same(f(X, i, j), compiled(X, i, j))


def test_constants_stay_constants():
    compiled = kiln.compile(lambda x, i, n: x.reshape(n, -1) * i)
    for i in VALUES:
        same(X.reshape(3, -1) * i, compiled(X, i, 3))
    assert len(compiled._entries) == 2
    kiln.reset()
    assert any("L['n'] == 3" in g for g in kiln.explain(lambda x, n: x.reshape(n, -1))(X, 3).guards)


def test_branches_are_guards():
    def f(x, i, w):
        if i % 10 == 0:
            x = x * 2
        if w > 0.5 or not i:
            x = x + i
        return x * w

    compiled = kiln.compile(f)
    for i in range(1, 40):
        same(f(X, i, 1 / (i + 1)), compiled(X, i, 1 / (i + 1)))
    assert len(compiled._entries) == 3  # constants, others, every tenth


def test_a_branch_keeps_a_division_from_zero():
    def f(x, n):
        return x / n + 7 // n if n != 0 else x

    compiled = kiln.compile(f)
    for n in (3, 4, 0, 5, 0, 6):
        same(f(X, n), compiled(X, n))


def test_branches_that_go_back_and_forth():
    def f(x, i, j):
        while i > j:
            i, x = i - 3, x * 2
        return x, i, sorted([j, i, 4]), [i, j].index(j)

    compiled = kiln.compile(f)
    for i, j in ((5, 1), (7, 2), (3, 3), (9, 1), (2, 1), (14, 3), (5, 4), (7, 7)):
        same(f(X, i, j), compiled(X, i, j))


def test_ints_that_are_always_needed_settle_as_before():
    def f(x, i):
        return x[i % 3 :] if i % 2 == 0 else x * i

    compiled = kiln.compile(f)
    for i in [0, 1, 2, 3] * 3:
        same(f(X.T, i), compiled(X.T, i))
    assert len(compiled._entries) <= 4


def test_switched_off():
    compiled = kiln.compile(lambda x, i: x * i)
    with kiln.config.patch(disable_passes="capture.changing_ints"):
        for i in VALUES[:5]:
            same(X * i, compiled(X, i))
    assert len(compiled._entries) == 5


CUBE = torch.arange(120.0).reshape(8, 3, 5)
PLACES = torch.tensor([[0, 1], [1, 1]])


@pytest.mark.parametrize(
    "use",
    [
        lambda x, i: x[i, 1],
        lambda x, i: x[i, :, 0],
        lambda x, i: x[:, i % 3],
        lambda x, i: x[i, i % 3, :2],
        lambda x, i: x[..., i % 5],
        lambda x, i: x[i, ..., -1],
        lambda x, i: x[None, i, :, None],
        lambda x, i: x[i, 1:, i % 5],
        lambda x, i: x[-i - 1, 0],
        lambda x, i: x[i, PLACES],
        lambda x, i: x[PLACES, i % 3, PLACES],
        lambda x, i: x[PLACES, :, i % 5],
        lambda x, i: x[:, None, i % 3, PLACES],
    ],
)
def test_places_in_several_dims(use):
    def store(x, i):
        part = use(x, i)
        part.mul_(2)
        return x

    values = [3, 4, 2, 7, 0, 1, 5, 6]
    check(use, CUBE, values=values)
    check(lambda x, i: store(x.clone(), i), CUBE, values=values, variants=None)
    for i in values:
        assert use(CUBE, i).stride() == kiln.compile(use)(CUBE, i).stride()
    gradients = []
    for f in (use, kiln.compile(use)):
        x = CUBE.clone().requires_grad_()
        for i in values:
            f(x, i).pow(2).sum().backward()
        gradients.append(x.grad)
    same(*gradients)


@pytest.mark.parametrize("value", [7, torch.arange(5.0)])
def test_writes_to_places_in_several_dims(value):
    def one(x, i):
        x[i, 1] = value
        return x

    def steps(x, i):
        x[:, i % 3] = value
        x[i, PLACES[0]] *= 2
        x[..., i % 3, 1:] += 1
        return x

    for f in (one, steps):
        check(lambda x, i, f=f: f(x.clone(), i), CUBE, values=[3, 4, 2, 7, 0, 1, 5, 6], variants=None)
        eager, compiled = CUBE.clone(), CUBE.clone()
        run = kiln.compile(f)
        for i in (3, 4, 2, 7, 0):
            f(eager, i), run(compiled, i)
            same(eager, compiled)
        assert len(run._entries) <= 3


@pytest.mark.parametrize(
    "use",
    [
        lambda x, i: x[i, 5],
        lambda x, i: x[i, 0, 0, 0],
        lambda x, i: x[i + 6, 1],
        lambda x, i: x[..., i, ...],
        lambda x, i: x[i, "a"],
        lambda x, i: x[i, 1.5],
    ],
)
def test_places_that_are_not_there(use):
    compiled = kiln.compile(use)
    for i in (1, 2, 3, 4):
        outcomes = []
        for f in (use, compiled):
            try:
                outcomes.append(f(CUBE, i))
            except (IndexError, TypeError) as e:
                outcomes.append((type(e), str(e)))
        same(*outcomes)


def test_tensors_of_ints():
    def f(x, i):
        rows = (
            torch.tensor([i % 8, 0]),
            torch.as_tensor([[i, 2.5], (i / 4, 1)]),
            torch.tensor([i, 1], dtype=torch.float64),
        )
        return x[rows[0]], *rows, x.repeat_interleave(i, 0)

    check(f, CUBE, values=[3, 4, 2, 7, 1, 5, 6])
    check(lambda i: torch.tensor([i / 3, 0.1], dtype=torch.float64), values=[3, 4, 2, 7, 1, 5, 6], variants=None)


class Pair:
    def __init__(self, p, q):
        self.p, self.q = p, q


def asked_first(x, k, s, d):
    return x * k[0] / 2, k, s, d, [d, s]


def kept_in_an_object(x, k, s, d):
    pair = Pair(d, s)
    return x + k[-1] / 2, pair.p, pair.q


def behind_a_break(x, k, s, d):
    y = x * k[0] / 2
    print("out of the graph", end="")
    return y, k, s, d


@pytest.mark.parametrize("f", [asked_first, kept_in_an_object, behind_a_break])
def test_tuples_that_are_one_object_only_now(f):
    """One tuple may be a changing number in one place and a constant, guarded by its value, in another."""
    pool = [(1, 1), (2, 2), (3, 3), (2, 3)]
    for seed in range(12):
        kiln.reset()
        compiled, rng = kiln.compile(f), random.Random(seed)
        for _ in range(8):
            args = [rng.choice(pool) for _ in range(3)]
            same(f(X, *args), compiled(X, *args))


def test_identity_of_tuples_that_change():
    f = kiln.compile(lambda x, k, d: (x * k[0] / 2, k is d, d is not k))
    fixed = (2, 2)
    for k in ((3, 3), (4, 4), fixed, (5, 5), (6, 6), fixed):
        assert f(X, k, fixed)[1:] == (k is fixed, k is not fixed)


def test_a_class_that_is_made_with_the_number():
    def f(x, n):
        n = n * 2 - 1

        class Settings:
            scale = n

        return x * Settings.scale, (x if n > 2 else x * 2)

    compiled = kiln.compile(f)
    for n in (1, 2, 3, 4, 2):
        assert_same(compiled(X, n), f(X, n))
        gc.collect()


def test_a_counter_that_indexes_a_list_breaks_in_the_end():
    """Its value is needed, and another in each call: compiled for the first ones, then around a break at the index."""
    buffer = [[None, 0.0] for _ in range(10)]

    def step(x, state, buffer):
        state["n"] += 1
        slot = buffer[state["n"] % 10]
        slot[0] = state["n"]
        slot[1] += 0.5
        return x * slot[1] + state["n"]

    ours, theirs = {"n": 0}, {"n": 0}
    slots = [[list(s) for s in buffer] for _ in range(2)]
    compiled = kiln.compile(step)
    x = torch.arange(4.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the recompile limit
        for _ in range(30):
            torch.testing.assert_close(compiled(x, ours, slots[0]), step(x, theirs, slots[1]))
    assert ours == theirs and slots[0] == slots[1]
