"""np.int64 that change between calls (what NumPy's generators and arrays give): inputs of the graph from their first change
on, of NumPy's classes and with NumPy's arithmetic."""

import math
import numbers

import numpy as np
import pytest
import torch

import kiln
from test_item_numbers import same

X = torch.arange(24.0).reshape(8, 3)
VALUES = [np.int64(i) for i in (3, 4, 2, 7, 1, 5, 6, 3, 4, 2)]


def picture(result):
    """With the classes of what is no tensor."""
    if isinstance(result, torch.Tensor):
        return result
    if isinstance(result, tuple | list):
        return type(result).__name__, [picture(r) for r in result]
    return type(result).__name__, repr(result)


def check(f, values=VALUES, variants=None):
    """Calls of `f` in eager and compiled agree; `variants` is how often it may be compiled."""
    compiled = kiln.compile(f)
    for i in values:
        same(picture(f(X, i)), picture(compiled(X, i)))
    assert variants is None or len(compiled._entries) <= variants


@pytest.mark.parametrize(
    "use",
    [
        lambda x, i: x[i],
        lambda x, i: x[:i],
        lambda x, i: x[i - 1 : i + 1] * 2,
        lambda x, i: x.view(-1)[i * 2] + x[i, 1],
        lambda x, i: x * i + i * x - (1 - i) / x.add(1) + x / i + x**i,
        lambda x, i: (x * 2, i, i + 1, 2 * i - 3, -i, abs(i), +i, i // 2, i % 3, i**2),
        lambda x, i: (x * 2, i / 4, i * 0.5, 1.5 - i, 1 / i, 2.0 * i, i + True),
        lambda x, i: (x * float(i), int(i), int(i) + 1, float(i), int(i + 1) * 2, math.floor(i), math.sqrt(i)),
        lambda x, i: (x * 2, isinstance(i, int), isinstance(i, np.integer), type(i), type(i + 1), type(i / 2), type(int(i))),
        lambda x, i: (x * 2, isinstance(i, int | float), isinstance(i, (str, np.int64)), isinstance(i, numbers.Integral)),
        lambda x, i: (x * 2, [i, [i]], {"a": 1}, (i, i + 1), sum([i, i]), i and 5),
        lambda x, i: (x * 2, f"{i}", f"{i!r} {i:03d} {i + 1!r}", str(i)),
        lambda x, i: (torch.full((2,), i), torch.full((i,), 1.0), torch.tensor(i), torch.zeros(i, 2), torch.arange(i)),
        lambda x, i: (torch.tensor(i / 2), torch.as_tensor(i * 0.5), torch.tensor(float(i)), torch.tensor(i, dtype=torch.float32)),
        lambda x, i: (x.roll(i, 0), x.narrow(0, 0, i), x[:1].expand(i, 3), x.repeat(i, 1), x.clamp(max=i)),
        lambda x, i: (torch.where(x > i, x, i), x.masked_fill(x > i, i), x.add(x, alpha=i)),
        lambda x, i: (x[:i].sum() / i, x[:i].shape, x[:i].shape[0], x.shape[0] - i),
        lambda x, i: (x * 2, int(i), i is i, not i),
    ],
)  # fmt: skip
def test_one_graph_serves_all(use):
    check(use, variants=3)


@pytest.mark.parametrize(
    "use",
    [
        lambda x, i: x + 1 if i > 3 else x - 1,
        lambda x, i: x * 1 if 0 < i < 4 else x * 2,
        lambda x, i: (x * 2, i > 3, not i > 3, i == 3, i != 3, 0 < i < 4, i in (1, 2)),
        lambda x, i: (x * 2, max(i, 3), min(i, 2), x[: max(i, 2)]),
        lambda x, i: [x * j for j in range(i)],
        lambda x, i: (x * 2, [1] * i, list(range(9))[i], {1: 2, 3: 4}.get(i), hash(i), {i: 1}),
        lambda x, i: (x * 2, i.dtype, i.item(), hasattr(i, "bit_length"), hasattr(i, "dtype"), i.real),
        lambda x, i: (x * np.sqrt(i), np.int64(5) * i, i * np.float64(2), np.sin(i)),
        lambda x, i: (x * 2, 7 // (i + 1), divmod(i, 3), 2**i, i << 1, i & 1, round(i), round(i / 3, 2)),
        lambda x, i: (x * 2, i * 0, i - i, 0 * i + 1.5),
        lambda x, i: x[[0, i]] + x[torch.tensor([i, 0])],
        lambda x, i: (kiln.graph_break(), x * i, i, i + 1)[1:],
    ],
)
def test_what_needs_the_value(use):
    check(use)


def test_division_by_zero_is_numpys():
    with np.errstate(all="ignore"):
        check(lambda x, i: (x * 2, 6 / i, 6 // i), [np.int64(i) for i in (1, 2, 3, 0, 4)])
        check(lambda x, i: x * (6 / i), [np.int64(i) for i in (1, 2, 3, 4, 5)], variants=3)


def test_other_classes_in_its_place():
    values = [np.int64(1), np.int64(2), 3, 4, np.int32(5), np.int64(6), 2.5, True, np.int64(2**40), np.float32(2), 7]
    check(lambda x, i: (x * i, i, i + 1), values)
    check(lambda x, i: (x * i, i), values[::-1])


def test_in_containers_and_attributes():
    class Box:
        def __init__(self):
            self.n = np.int64(1)

    def f(x, box, pair):
        box.n = box.n + pair[1]
        return x * box.n, pair[0]

    eager, compiled, step = Box(), Box(), kiln.compile(f)
    for i in range(6):
        pair = (np.int64(i), np.int64(i + 2))
        same(picture(f(X, eager, pair)), picture(step(X, compiled, pair)))
        assert repr(eager.n) == repr(compiled.n)
    assert len(step._entries) <= 4


@pytest.mark.parametrize(
    "f",
    [
        lambda x, i, a: (x * a * i, a * i, i * a, a + i, i / a, a % i),
        lambda x, i, a: (x * a, i == a, a == i, i != a, i > a, a <= i, i is a, max(i, a)),
        lambda x, i, a: x * 2 if i == a else x * a,
        lambda x, i, a: x * 2 if a < i / 2 else x * a,
        lambda x, i, a: x * (int(i == a) + (i + 1 == a) + (a in (i, 7)) + [a].count(i)),
    ],
)
@pytest.mark.parametrize("kind", [int, float, np.float64])
def test_with_a_number_that_changes(f, kind):
    compiled = kiln.compile(f)
    for i, a in ((5, 3), (2, 1), (1, 1), (2, 1), (4, 4), (3, 3), (1, 2), (2, 4)):
        same(picture(f(X, np.int64(i), kind(a))), picture(compiled(X, np.int64(i), kind(a))))


def test_gradients():
    def f(x, i):
        return (x[:i] * i).sum() / i

    compiled = kiln.compile(f)
    for i in VALUES[:5]:
        grads = []
        for g in (f, compiled):
            x = X.clone().requires_grad_()
            g(x, i).backward()
            grads.append(x.grad)
        torch.testing.assert_close(*grads)
