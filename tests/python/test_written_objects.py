"""Existing Python objects that captured code writes to: apart from what else it reads, and not looked at where they are only
appended to."""

import collections
import copy
import heapq
import json
import operator
import warnings

import pytest
import torch
from torch import nn

import kiln
from kiln.explanation import recording
from kiln.testing import assert_same

X = torch.linspace(-1, 1, 4)


class Box:
    def __init__(self, v=1):
        self.v = v


def append(x, a, b):
    a.append(x.sum())
    return len(b), x + 1


def extend(x, a, b):
    a += [1, 2]
    return x + sum(b)


def item(x, a, b):
    a["k"] = x * 2
    return "k" in b, len(b), x + 1


def delete(x, a, b):
    a.pop("old", None)
    return list(b), x + 1


def add(x, a, b):
    a.add(5)
    return 5 in b, x + 1


def push(x, a, b):
    a.append(3)
    return len(b), x * 2


def attribute(x, a, b):
    a.v = a.v + 1
    return x * b.v


def attribute_by_name(x, a, b):
    setattr(a, "w", 3)
    return x + 1, getattr(b, "w", None)


def within(x, a, b):
    a[0].append(1)
    return x + len(b)


class Words(list):
    pass


# What is written is put back before the call ends.


def append_and_pop(x, a, b):
    a.append(1)
    y = x * sum(b)
    a.pop()
    return y


def append_and_pop_unread(x, a, b):
    a.append(1)
    n = len(b)
    a.pop()
    return x * n


def swap(x, a, b):
    a[0], a[1] = a[1], a[0]
    y = x * b[0]
    a[0], a[1] = a[1], a[0]
    return y


def reverse(x, a, b):
    a.reverse()
    y = x * b[0]
    a.reverse()
    return y


def extend_and_cut(x, a, b):
    a += [4, 5]
    y = x * b[-1]
    del a[2:]
    return y


def by_bound_method(x, a, b):
    list(map(a.append, [3, 4]))
    y = x * sum(b)
    a.pop()
    a.pop()
    return y


def by_operator(x, a, b):
    operator.setitem(a, 0, 7)
    y = x * b[0]
    operator.setitem(a, 0, 1)
    return y


def by_methodcaller(x, a, b):
    operator.methodcaller("append", 9)(a)
    y = x * b[-1]
    operator.methodcaller("pop")(a)
    return y


def by_heapq(x, a, b):
    heapq.heappush(a, 0)
    y = x * b[0]
    heapq.heappop(a)
    a.sort()
    return y


def store_and_delete(x, a, b):
    a["k"] = 5
    y = x * b.get("k", 0)
    del a["k"]
    return y


def update_and_pop(x, a, b):
    a.update(k=5)
    y = x * len(b)
    a.pop("k")
    return y


def merge_and_pop(x, a, b):
    a |= {"k": 5}
    y = x * ("k" in b)
    a.popitem()
    return y


def move_and_back(x, a, b):
    a.move_to_end("p")
    y = x * next(iter(b.values()))
    a.move_to_end("p", last=False)
    return y


def miss_and_pop(x, a, b):
    a["k"].append(1)
    y = x * len(b["k"])
    a.pop("k"), b.pop("k", None)
    return y


def add_and_discard(x, a, b):
    a.add(9)
    y = x * (9 in b)
    a.discard(9)
    return y


def join_and_remove(x, a, b):
    a |= {9}
    y = x * len(b)
    a.remove(9)
    return y


def rotate(x, a, b):
    a.rotate(1)
    y = x * b[0]
    a.rotate(-1)
    return y


def attribute_and_back(x, a, b):
    a.v = 5
    y = x * b.v
    a.v = 1
    return y


def attribute_of_a_list(x, a, b):
    a.v = 5
    y = x * getattr(b, "v", 2)
    del a.v
    return y


def attribute_in_dict(x, a, b):
    a.__dict__["v"] = 5
    y = x * b.v
    a.__dict__["v"] = 1
    return y


def attribute_in_dict_for_good(x, a, b):
    a.__dict__["v"] = a.v + 1
    return x * b.v


CASES = [
    *((f, lambda: [1, 2]) for f in (append_and_pop, append_and_pop_unread, swap, reverse, extend_and_cut)),
    *((f, lambda: [1, 2]) for f in (by_bound_method, by_operator, by_methodcaller, by_heapq)),
    *((f, dict) for f in (store_and_delete, update_and_pop, merge_and_pop)),
    (move_and_back, lambda: collections.OrderedDict(p=2, q=3)),
    (miss_and_pop, lambda: collections.defaultdict(list)),
    *((f, lambda: {1}) for f in (add_and_discard, join_and_remove)),
    (rotate, lambda: collections.deque([1, 2, 3])),
    *((f, Box) for f in (attribute_and_back, attribute_in_dict, attribute_in_dict_for_good)),
    (attribute_of_a_list, Words),
    (append, list),
    (extend, lambda: [1]),
    (item, dict),
    (delete, lambda: {"old": 1}),
    (add, set),
    (push, collections.deque),
    (attribute, Box),
    (attribute_by_name, Box),
]


@pytest.mark.parametrize(("f", "make"), CASES)
def test_two_objects_may_become_one(f, make):
    def run(function):
        results = []
        for same in (False, False, True, True, False):
            a = make()
            b = a if same else make()
            results.append(function(X, a, b))
        return results

    assert_same(run(f), run(kiln.compile(f)))


def test_one_of_them_within_another():
    def run(function):
        results = []
        for same in (False, True, False):
            b = []
            results.append(function(X, [b if same else []], b))
        return results

    assert_same(run(within), run(kiln.compile(within)))


def test_one_object_may_become_two():
    compiled = kiln.compile(append)
    for same in (True, False, True):
        results = []
        for function in (append, compiled):
            a = []
            results.append(function(X, a, a if same else [])[0])
        assert results[0] == results[1] == int(same)


def test_a_module_that_is_called_twice():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.n = 0

        def forward(self, x):
            self.n += 1
            return x + self.n

    def f(x, first, second):
        return second(first(x))

    compiled = kiln.compile(f)
    net, other = Counter(), Counter()
    assert_same(compiled(X, net, other), X + 2)
    assert (net.n, other.n) == (1, 1)
    net = Counter()
    assert_same(compiled(X, net, net), X + 3)
    assert net.n == 2


# --- lists that are only appended to ---------------------------------------------------------------------------------


history = []


class Recorder(nn.Module):
    def __init__(self):
        super().__init__()
        self.losses = []

    def forward(self, x):
        loss = x.pow(2).sum()
        self.losses.append(loss.item())
        history.append(loss)
        return loss * 2


def test_histories_do_not_recompile():
    def run(compiled):
        net = Recorder()
        history.clear()
        function = kiln.compile(net) if compiled else net
        results = [function(X * i) for i in range(12)]
        return results, net.losses, list(history)

    expected = run(False)
    with recording() as r:
        assert_same(expected, run(True))
    assert len(r.entries) == 1
    assert r.entries[0].graph_break is None


@pytest.mark.parametrize(
    "look",
    [
        lambda self: len(self.items),
        lambda self: self.items[-1],
        lambda self: sum(self.items),
        lambda self: len(getattr(self, "items")),  # noqa: B009
        lambda self: len(self.__dict__["items"]),
        lambda self: len(vars(self)["items"]),
        lambda self: len(operator.attrgetter("items")(self)),
        lambda self: 7 in self.items,
        lambda self: [v + 1 for v in self.items][0],
        lambda self: len([*self.items, 1]),
        lambda self: self.items == [7, 7],
        lambda self: bool(self.items.append) and len(self.items),
        lambda self: self.items.count(7),
    ],
)
@pytest.mark.parametrize("before", [False, True])
def test_a_look_at_the_list_is_guarded(look, before):
    class Holder:
        def __init__(self):
            self.items = [7]

    def f(x, holder):
        seen = look(holder) if before else 0
        holder.items.append(7)
        return x + 1, seen if before else look(holder)

    def run(function):
        holder = Holder()
        return [function(X, holder) for _ in range(4)], holder.items

    assert_same(run(f), run(kiln.compile(f)))


def test_by_globals_and_closures():
    mine = []

    def f(x):
        history.append(x + 1)
        mine.append(2)
        n = len(history)
        history.append(3)
        return x * n, len(mine)

    def run(function):
        history.clear()
        mine.clear()
        return [function(X) for _ in range(3)], list(history), list(mine)

    assert_same(run(f), run(kiln.compile(f)))


def test_two_histories_that_become_one():
    def f(x, a, b):
        a.items.append(1)
        b.items.append(x)
        a.items.append(3)
        return x + 1

    def make(same):
        a, b = Box(), Box()
        a.items, b.items = [], []
        if same:
            b.items = a.items
        return a, b

    compiled = kiln.compile(f)
    for same in (False, True, False):
        left, right = make(same), make(same)
        f(X, *left)
        compiled(X, *right)
        assert_same([left[0].items, left[1].items], [right[0].items, right[1].items])


def test_a_break_while_one_is_appended_to():
    def f(x, holder):
        holder.items.append(x.sum().tolist())
        y = x + 1
        kiln.graph_break()
        holder.items.append(y)
        return y * len(holder.items)

    def run(function):
        holder = Box()
        holder.items = []
        return [function(X, holder) for _ in range(3)], holder.items

    assert_same(run(f), run(kiln.compile(f)))


def test_a_list_that_is_none_any_more():
    class Sink:
        def __init__(self):
            self.seen = 0

        def append(self, v):
            self.seen += 1

    def f(x, holder):
        holder.items.append(x)
        return x + 1

    compiled = kiln.compile(f)
    holder = Box()
    holder.items = []
    compiled(X, holder)
    holder.items = Sink()
    compiled(X, holder)
    assert holder.items.seen == 1


# --- variables of inner functions ------------------------------------------------------------------------------------


def shared_number(x, k):
    def inner(a):
        return a * k

    x = inner(x)
    kiln.graph_break()
    return x, k


def shared_tensor(x, k):
    t = x * k

    def inner():
        return t + k

    kiln.graph_break()
    return inner(), t


def shared_list(x, k):
    values = []

    def put(v):
        values.append(v)

    put(x)
    kiln.graph_break()
    put(x + k)
    kiln.graph_break()
    return sum(values), len(values)


def shared_counter(x, k):
    n = 0

    def count():
        nonlocal n
        n += k
        return n

    count()
    kiln.graph_break()
    n += 1
    kiln.graph_break()
    return x * count() + n


def shared_by_two(x, k):
    t = x

    def read():
        return t * k

    def write(v):
        nonlocal t
        t = v

    kiln.graph_break()
    write(t + 1)
    kiln.graph_break()
    write(read() + t)
    return read(), t


@pytest.mark.parametrize("f", [shared_number, shared_tensor, shared_list, shared_counter, shared_by_two])
def test_cells_behind_a_break_are_those_of_the_call(f):
    compiled = kiln.compile(f)
    for i, k in enumerate((2.5, 1, 2, 2.5, 3)):
        assert_same(f(X * i, k), compiled(X * i, k))


def test_functions_that_share_a_variable_and_later_do_not():
    def make(shared):
        n = 0

        def count():
            nonlocal n
            n += 1
            return n

        if shared:
            return count, lambda: n
        m = 0
        return count, lambda: m

    def f(x, count, read):
        count()
        return x * read()

    compiled = kiln.compile(f)
    for shared in (True, False, True, False, False):
        assert_same(f(X, *make(shared)), compiled(X, *make(shared)))


def test_the_defaults_of_an_inner_function():
    def f(x, n):
        def inner(a, b=n, c=[1], *, d=n):
            c.append(2)
            return a * b + len(c) + d

        return inner(x) + inner(x)

    compiled = kiln.compile(f)
    for n in (1, 2, 2.5, 3.5, 1):
        assert_same(f(X, n), compiled(X, n))


GLOBAL_BOX = None


def test_removes_what_it_has_set():
    """The object has no such attribute when the writes are replayed; one call later it has."""

    def f(x, o):
        global GLOBAL_BOX
        o.t = x * 2
        y = o.t + 1
        del o.t
        GLOBAL_BOX = y
        del GLOBAL_BOX
        return y, hasattr(o, "t")

    compiled = kiln.compile(f)
    for before in ({}, {}, {"t": 1}, {}):
        o = Box()
        o.__dict__.update(before)
        globals()["GLOBAL_BOX"] = None
        y, there = compiled(X, o)
        torch.testing.assert_close(y, X * 2 + 1)
        assert not there and vars(o) == {"v": 1} and "GLOBAL_BOX" not in globals()
        globals().pop("GLOBAL_BOX", None)
        assert torch.equal(compiled(X, o)[0], y) and "GLOBAL_BOX" not in globals()
    with pytest.raises(AttributeError):
        kiln.compile(lambda x, o: delattr(o, "missing"))(X, Box())


def test_a_history_in_a_dict():
    """Lists in a dict that are only appended to do not make each call another entry."""

    class Meter:
        def __init__(self):
            self.of = {"loss": [], "norm": [], "epoch": 0}

    meter, plain = Meter(), Meter()
    histories = {"a": {"b": []}}, {"a": {"b": []}}

    def make(meter, history):
        def step(x):
            y = x.square().sum()
            meter.of["loss"].append(y.item())
            meter.of["norm"].append(x.norm())
            history["a"]["b"].append(len(meter.of))
            return y

        return step

    compiled, eager = kiln.compile(make(meter, histories[0])), make(plain, histories[1])
    for i in range(12):
        x = torch.arange(3.0) + i
        torch.testing.assert_close(compiled(x), eager(x))
    torch.testing.assert_close(meter.of["loss"], plain.of["loss"])
    torch.testing.assert_close(meter.of["norm"], plain.of["norm"])
    assert histories[0] == histories[1]
    assert len(compiled._entries) <= 2


@pytest.mark.parametrize(
    "use",
    [
        lambda d: len(d["a"]),
        lambda d: d["a"][-1],
        lambda d: sum(d["a"]),
        lambda d: str(d),
        lambda d: f"{d}",
        lambda d: d == {"a": [1, 2], "b": {"c": [3]}, "t": (4, [5]), "n": [[[[{"l": [0]}]]]]},
        lambda d: [1, 2] in d.values(),
        lambda d: list(d.values())[0] == [1, 2],
        lambda d: sorted(list(d.values())[0]),
        lambda d: [len(v) for v in d.values()],
        lambda d: dict(d)["b"]["c"] == [3],
        lambda d: {**d, "a": 0} == {"a": 0, "b": {"c": [3]}, "t": (4, [5]), "n": [[[[{"l": [0]}]]]]},
        lambda d: (d, 1) == ({"a": [1, 2], "b": {"c": [3]}, "t": (4, [5]), "n": [[[[{"l": [0]}]]]]}, 1),
        lambda d: d["n"] == [[[[{"l": [0]}]]]],
        lambda d: [[[[d]]]] == [[[[{"a": [1, 2], "b": {"c": [3]}, "t": (4, [5]), "n": [[[[{"l": [0]}]]]]}]]]],
        lambda d: max(d["b"].values()),
        lambda d: d.get("b")["c"].index(3) if d["b"]["c"] else None,
        lambda d: bool(d["b"]["c"]),
        lambda d: [*d["a"]],
        lambda d: [v for k, v in sorted(d.items(), key=lambda p: p[0])][0] * 2,
        lambda d: copy.deepcopy(d),
        lambda d: json.dumps(d),
        lambda d: d["t"][1][0],
        lambda d: sum(d["a"], 0) if d["a"] is not d["b"] else 0,
    ],
)
def test_what_looks_into_a_dict_of_lists(use):
    """Anything that sees more of a list in a dict than an append does, sees the list as it is now."""

    def fresh():
        return {"a": [1, 2], "b": {"c": [3]}, "t": (4, [5]), "n": [[[[{"l": [0]}]]]]}

    d = fresh()

    def f(x):
        d["a"].append
        return x + 1, use(d)

    compiled = kiln.compile(f)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for change in (
            lambda: None,
            lambda: d["a"].append(7),
            lambda: d["a"].clear() or d["a"].extend([0, 9]),
            lambda: d["b"]["c"].append(1),
            lambda: d["b"]["c"].pop() and d["b"]["c"].append(8),
            lambda: d["t"][1].insert(0, 6),
            lambda: d["n"][0][0][0][0]["l"].append(1),
            lambda: d.update(fresh()),
        ):
            change()
            assert repr(compiled(X)[1]) == repr(use(d))


KEPT = {
    "tensor": lambda x, y: y,
    "size": lambda x, y: x.shape[0],
    "tuple": lambda x, y: (y, x.shape[1]),
    "number": lambda x, y: y.mean().item(),
}


@pytest.mark.parametrize("kept", KEPT)
def test_what_a_module_keeps_of_a_call_is_not_guarded_if_nobody_reads_it(kept):
    keep = KEPT[kept]

    class Keeps(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.last = None

        def forward(self, x):
            y = x * 2
            self.last = keep(x, y)
            return y

    net = Keeps()
    compiled = kiln.compile(net, fullgraph=True)
    for shape in [(2, 4)] * 3 + [(3, 5)] * 2 + [(n, n + 1) for n in range(4, 12)]:
        x = torch.rand(shape)
        assert_same(compiled(x), x * 2)
        assert_same(net.last, keep(x, x * 2))
    assert len(compiled._kiln_entry._entries) <= 2  # for the first sizes, and for open ones


def test_tensors_that_a_module_takes_for_parameters_and_buffers():
    class Registers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("state", torch.zeros(3))

        def forward(self, x, new):
            self.state = x * 2
            self.more = new
            return self.state + 1

    found = []
    for compile in (lambda f: f, kiln.compile):
        net = Registers()
        run = compile(net)
        for new in (torch.ones(3), torch.nn.Buffer(torch.ones(3)), torch.nn.Parameter(torch.ones(3))):
            try:
                found.append(
                    (run(torch.ones(3), new), sorted(net.state_dict()), [n for n, _ in net.named_parameters()])
                )
            except (TypeError, KeyError) as e:
                found.append(str(e))
    assert_same(found[:3], found[3:])
