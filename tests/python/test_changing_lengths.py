"""Containers that grow between calls: how many items there are is a number that the graph computes with."""

import collections
import time
import warnings

import pytest
import torch
from torch import nn

import kiln
from kiln.testing import assert_same

CALLS = 14


class Memory:
    """What remembers earlier calls."""

    def __init__(self):
        self.items, self.recent, self.named = [], collections.deque(maxlen=5), {}

    def __len__(self):
        return len(self.items)

    def add(self, i):
        self.items.append(i)
        self.recent.append(i)
        self.named[i] = i


def mean_so_far(x, memory):
    return x / max(len(memory), 1)


def append_first(x, memory):
    memory.items.append(x.sum().item())
    return x * len(memory.items), len(memory.items)


def append_later(x, memory):
    n = len(memory.items)
    memory.items.append(n)
    return x + n, len(memory.items) - n


def full(x, memory):
    memory.recent.append(7)
    return x * len(memory.recent), list(memory.recent) if len(memory.recent) == 2 else None


def branches(x, memory):
    if not memory.items:
        return x - 1
    if len(memory.named) > 3:
        x = x * 2
    return x + 1 if memory.recent else x


def texts(x, memory):
    return x, f"{len(memory.items)} of {len(memory.named):3d}", [len(memory.items)]


@pytest.mark.parametrize("options", [{}, {"dynamic": True}])
@pytest.mark.parametrize("f", [mean_so_far, append_first, append_later, full, branches, texts])
def test_lengths_that_change(f, options):
    results = []
    for g in (f, kiln.compile(f, **options)):
        memory, seen = Memory(), []
        for i in range(CALLS):
            seen.append((g(torch.ones(3), memory), list(memory.items), list(memory.recent)))
            memory.add(i)
        results.append(seen)
    assert_same(*results)


@pytest.mark.parametrize("f", [mean_so_far, append_later, branches])
def test_they_compile_a_few_times(f):
    compiles = []

    def backend(gm, inputs):
        compiles.append(gm)
        return gm.forward

    compiled, memory = kiln.compile(f, backend=backend), Memory()
    memory.add(0)
    for i in range(1, CALLS):
        compiled(torch.ones(3), memory)
        memory.add(i)
    assert len(compiles) <= 4


class Sized:
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length


def length_or_error(x, sized):
    try:
        return x, len(sized), type(len(sized))
    except (TypeError, ValueError, OverflowError) as e:
        return x, str(e)


@pytest.mark.parametrize("length", [3, True, -1, 2.5, "two", 2**70], ids=str)
def test_what_a_class_says(length):
    x, sized = torch.ones(1), Sized(length)
    assert_same(length_or_error(x, sized), kiln.compile(length_or_error)(x, sized))


def two(x, grows, asked):
    grows.append(1)
    return x * len(asked)


def pushed_and_popped(x, grows, asked):
    grows.append(1)
    x = x + len(asked)
    if grows:
        grows.pop()
    return x


def test_a_list_that_is_longer_for_a_while():
    compiled, grows, asked = kiln.compile(pushed_and_popped), [], [1]
    for same in [False, False, True, False, True]:
        other = grows if same else asked
        expected = 1.0 + (1 if same else len(asked))
        torch.testing.assert_close(compiled(torch.ones(1), grows, other), torch.full((1,), expected))
        asked.append(1)


def test_one_list_under_two_names():
    compiled = kiln.compile(two)
    for same in [False, False, False, True, True, False]:
        grows, asked = [1, 2], [1] * 3
        asked = grows if same else asked
        torch.testing.assert_close(compiled(torch.ones(1), grows, asked), torch.full((1,), 3.0))
    for n in range(CALLS):
        asked = [1] * n
        torch.testing.assert_close(compiled(torch.ones(1), [], asked), torch.full((1,), float(n)))
        torch.testing.assert_close(compiled(torch.ones(1), asked, asked), torch.full((1,), n + 1.0))


class Growing(nn.Module):
    """Looks for a submodule by name in a dict of which it has asked the length."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        x = x + len(self.layers)
        i = 0
        while hasattr(self.layers, str(i)):
            x = getattr(self.layers, str(i))(x)
            i += 1
        return x


def test_a_submodule_that_comes_where_the_number_of_them_changes():
    x = torch.randn(2, 3)
    nets = [Growing(*[nn.Linear(3, 3) for _ in range(n)]) for n in (1, 3, 2, 4, 1, 0)]
    compiled = kiln.compile(lambda net, x: net(x))
    for net in nets:
        torch.testing.assert_close(compiled(net, x), net(x))
    grows = Growing()
    for _ in range(4):
        torch.testing.assert_close(compiled(grows, x), grows(x))
        grows.layers.append(nn.Linear(3, 3))


def test_a_submodule_that_is_gone_by_name_while_another_comes():
    x = torch.randn(2, 3)

    def f(net, x):
        return (net.last(x) if hasattr(net, "last") else x) * len(net._modules)

    compiled = kiln.compile(f)
    for names in (("a",), ("a", "b"), ("a", "b", "c"), ("a", "last"), ("last",), ("a", "b", "c", "last")):
        net = nn.Module()
        for name in names:
            net.add_module(name, nn.Linear(3, 3))
        torch.testing.assert_close(compiled(net, x), f(net, x))


def test_a_length_asked_for_where_exceptions_are_caught():
    def f(x, items):
        items.append(1)
        try:
            n = len(items)
        except Exception as e:
            n = repr(e)
        return x, n

    compiled = kiln.compile(f)
    for n in range(1, 6):
        expected, got = [2.0] * n, [2.0] * n
        assert_same(compiled(torch.ones(2), got), f(torch.ones(2), expected))
        assert got == expected


def noted(out, x):
    out.append(x.shape[0])


def noted_by_name(x, *, out, more=2):
    for _ in range(more):
        noted(out, x)
    return x * 2


class Recorder:
    def __init__(self):
        self.items, self.others = [], [[], []]

    def note(self, out, x):
        out.append(1)
        noted(self.others[0], x)
        noted_by_name(x, out=self.others[1])

    def __call__(self, x):
        self.note(self.items, x)
        return x + len(self.others)


def test_lists_that_functions_are_given_to_append_to():
    kept, seen = [], []
    recorder = Recorder()

    def f(x):
        noted(kept, x)
        y = noted_by_name(x, out=seen, more=3) + recorder(x)
        return y - noted_by_name(x=x, out=kept)

    def g(x, out):
        noted(out, x)
        return x * sum(out)

    compiled, summed = kiln.compile(f), kiln.compile(g)
    for i in range(CALLS):
        x = torch.randn(3)
        assert_same(compiled(x), x * 2 + x + 2 - x * 2)
        assert_same(summed(x, [i]), x * (i + 3))
    assert (len(kept), len(seen), len(recorder.items)) == (3 * CALLS, 3 * CALLS, CALLS)
    assert [len(out) for out in recorder.others] == [CALLS, 2 * CALLS]
    assert len(compiled._entries) == 1


def test_lists_that_grow_in_a_dict():
    def program():
        history, nested, groups = {"mean": []}, {"inner": {}}, collections.defaultdict(list)

        def f(x):
            for name in ("u", "v"):
                history.setdefault(name, []).append((x.mean().item(), 1))
            history.get("mean").append(x.shape[0])
            nested["inner"].setdefault("z", []).append(2)
            groups["k"].append(x.sum().item())
            return x * len(history.setdefault("fixed", [1, 2]))

        return f, (history, nested, groups)

    (f, expected), (g, seen) = program(), program()
    compiled = kiln.compile(g)
    for i in range(CALLS):
        x = torch.full((4,), float(i))
        assert_same(compiled(x), f(x))
    assert seen == expected
    assert len(compiled._entries) == 2


def test_a_list_on_the_stack_at_a_break():
    times, recent = [], collections.deque(maxlen=4)

    def f(x):
        start = time.time()
        y = x * 2
        times.append(time.time() - start)
        recent.append(time.time() - start)
        return y

    compiled = kiln.compile(f)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(CALLS):
            x = torch.randn(3)
            assert_same(compiled(x), x * 2)
    assert (len(times), len(recent)) == (CALLS, 4)


def test_lists_that_are_given_twice_or_read_on_the_way():
    def program():
        kept, seen = [], []

        def twice(a, b):
            a.append(1)
            b.append(2)

        def size(out, text):
            return len(text) + len(out)

        def f(x):
            twice(kept, kept)
            y = x * size(seen, str(kept)) + size(kept, repr((kept, seen)))
            twice(seen, sorted(kept, key=lambda i: -i))
            return y + size(kept, str(max(kept, seen))) + sum(map(len, (kept, kept)))

        return f, (kept, seen)

    (f, expected), (g, found) = program(), program()
    compiled = kiln.compile(g)
    for _ in range(4):
        x = torch.randn(3)
        assert_same(compiled(x), f(x))
    assert found == expected
