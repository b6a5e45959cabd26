"""Iterators that were there before the captured code: each call takes from its own, as much as eager takes."""

import collections

import pytest
import torch

import kiln

X = torch.arange(1.0, 4.0)


def count(*args, **kwargs):
    return len(args)


def added(x, it):
    items = [0]
    items += it
    return x * sum(items)


def stored_in_a_slice(x, it):
    items = [0, 9]
    items[1:] = it
    return x * sum(items)


def added_to_a_deque(x, it):
    items = collections.deque([0])
    items += it
    return x * sum(items)


def extended(x, it):
    items = []
    items.extend(it)
    return x * sum(items)


def unpacked(x, it):
    a, b, c = it
    return x * (a + b + c)


def unpacked_with_star(x, it):
    a, *rest = it
    return x * (a + sum(rest))


def delegated(x, it):
    def numbers():
        yield 0
        yield from it

    return x * sum(numbers())


def looped(x, it):
    for i in it:
        x = x * i
    return x


def left_in_the_middle(x, it):
    for i in it:
        if i > 1:
            break
        x = x * i
    return x


USES = [
    added,
    stored_in_a_slice,
    added_to_a_deque,
    extended,
    unpacked,
    unpacked_with_star,
    delegated,
    looped,
    left_in_the_middle,
    lambda x, it: x * (2 in it),
    lambda x, it: x * (2 not in it),
    lambda x, it: x * count(*it),
    lambda x, it: x * count(0, *it),
    lambda x, it: x * max(*it),
    lambda x, it: x * len([*it]),
    lambda x, it: x * len((*it, 1)),
    lambda x, it: x * len({*it}),
    lambda x, it: x * len([i for i in it]),
    lambda x, it: x * sum(it),
    lambda x, it: x * next(it),
    lambda x, it: x * len(list(zip(it, it, strict=False))),
    lambda x, it: x * sorted(it)[-1],
    lambda x, it: x * len(dict.fromkeys(it)),
    lambda x, it: torch.stack([x * i for i in it]),
    lambda x, it: torch.tensor(list(it)),
]
ITERATORS = {
    "a generator": lambda numbers: (i for i in numbers),
    "a list's": iter,
    "a map": lambda numbers: map(int, numbers),
}


@pytest.mark.parametrize("kind", ITERATORS)
@pytest.mark.parametrize("f", USES)
def test_each_call_takes_from_its_own(f, kind):
    compiled = kiln.compile(f)
    for numbers in ([1, 2, 3], [1, 2, 3], [2, 5, 7], [4, 1, 2]):
        want, got = ITERATORS[kind](numbers), ITERATORS[kind](numbers)
        torch.testing.assert_close(compiled(X, got), f(X, want))
        assert list(got) == list(want)


def made_before(consume):
    """A generator that is alive where its first item breaks the graph, and then is used up by `consume`."""

    def f(tensors):
        return consume(t.numpy().sum() for t in tensors)

    return f


@pytest.mark.parametrize(
    "f",
    [
        made_before(lambda it: count(*it)),
        made_before(lambda it: max(*it)),
        made_before(lambda it: list(zip(*([i, i] for i in it), strict=True))),
        made_before(lambda it: [*it]),
        made_before(lambda it: (count(*it), list(it))),
        made_before(lambda it: (next(it), count(*it))),
        lambda tensors: count(*(t.numpy() for t in tensors)),
        lambda tensors: count(0, *(t.numpy() for t in tensors), last=1),
        lambda tensors: max(*(float(t.numpy().sum()) for t in tensors)),
    ],
)
def test_a_generator_whose_items_break_the_graph(f):
    tensors = [torch.ones(2), torch.zeros(3), torch.ones(4)]
    compiled = kiln.compile(f)
    for _ in range(3):
        assert compiled(tensors) == f(tensors)
