"""Dicts and lists of which a function asks for some items alone: what else is in them does not matter."""

import collections
import sys

import pytest
import torch
from torch import nn

import kiln
from helpers import check, check_calls
from kiln.testing import CompileCounter

X = torch.arange(4.0)
SETTINGS = {"scale": 2.0, "nested": {"bias": 1.0, "other": 0}, 3: "three", (2, 4): 5.0}


def entries(f, calls):
    """How many graphs `f` has after the calls, each of which must be as in eager."""
    counter = CompileCounter()
    compiled = kiln.compile(f, backend=counter)
    for args in calls:
        torch.testing.assert_close(compiled(*args), f(*args))
    return counter.frame_count


def growing(n=6):
    """Dicts with more and more keys, and a number that changes."""
    return [{"scale": 2.0, "step": i, **{f"k{j}": j for j in range(i)}} for i in range(n)]


LOOKUPS = {
    "item": lambda x, d: x * d["scale"],
    "get": lambda x, d: x * d.get("scale"),
    "get missing": lambda x, d: x * d.get("missing", 3.0),
    "get none": lambda x, d: x + 1 if d.get("missing") is None else x,
    "in": lambda x, d: x + 1 if "scale" in d else x,
    "not in": lambda x, d: x + 1 if "missing" not in d else x,
    "methods": lambda x, d: x * d.__getitem__("scale") if d.__contains__("scale") else x,
    "computed key": lambda x, d: x * d["sc" + str("ale")] * d[("%s" % "scale")],
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_other_keys_do_not_matter(name):
    assert entries(LOOKUPS[name], [(X, d) for d in growing()]) == 1


@pytest.mark.parametrize("kind", [collections.OrderedDict, lambda d: collections.defaultdict(float, d)])
def test_other_dicts(kind):
    assert entries(LOOKUPS["item"], [(X, kind(d)) for d in growing()]) == 1


def test_what_is_looked_up_matters():
    for name in ("item", "get", "methods"):
        assert entries(LOOKUPS[name], [(X, {"scale": "ab".count(c) + 0.5}) for c in ("a", "x")]) == 2
    calls = [(X, {"scale": 1.0}), (X, {}), (X, {"scale": 1.0, "missing": 2.0})]
    for name in ("get missing", "get none", "in", "not in"):
        check_calls(LOOKUPS[name], calls)
    with pytest.raises(KeyError, match="scale"):
        kiln.compile(LOOKUPS["item"])(X, {"scales": 1})


def test_a_key_that_comes_and_goes():
    def f(x, d):
        try:
            return x * d["scale"]
        except KeyError as e:
            return x - len(e.args)

    check_calls(f, [(X, {"a": 1}), (X, {"scale": 3.0}), (X, {}), (X, {"scale": torch.ones(4)}), (X, {"scale": None})])


def test_nested_and_kept_in_locals(monkeypatch):
    def f(x):
        nested = SETTINGS["nested"]
        if nested is not None:
            x = x + nested["bias"] + SETTINGS["nested"].get("more", 0.5)
        return x * SETTINGS[(x.dim() + 1, x.shape[0])]

    counter = CompileCounter()
    compiled = kiln.compile(f, backend=counter)
    for i in range(4):
        monkeypatch.setitem(SETTINGS["nested"], "other", i)
        monkeypatch.setitem(SETTINGS, f"new{i}", i)
        assert torch.equal(compiled(X), f(X))
    assert counter.frame_count == 1
    monkeypatch.setitem(SETTINGS["nested"], "more", 7.0)
    assert torch.equal(compiled(X), f(X))
    monkeypatch.setitem(SETTINGS, "nested", {"bias": -1.0})
    assert torch.equal(compiled(X), f(X))


def test_lists():
    def f(x, options):
        return x * options[0] + options[1][1]

    assert entries(f, [(X, [2.0, [0, 3.0, i], *range(i)]) for i in range(5)]) == 1
    check_calls(f, [(X, [2.0, [0, 3.0]]), (X, [2.0, [0, 4.0]]), (X, [2.0, (0, 4.0)]), (X, [2.0]), (X, [])])
    check_calls(lambda x, o: x * o[-1], [(X, [2.0]), (X, [2.0, 3.0]), (X, [2.0, 2.0])])


def test_a_cache_that_grows():
    class Tables(nn.Module):
        def __init__(self):
            super().__init__()
            self.cache = {}

        def forward(self, x, scale):
            key = (x.shape[-1], x.dtype)
            if key not in self.cache:
                self.cache[key] = torch.arange(float(x.shape[-1]), dtype=x.dtype)
            return self.cache[key] * x * scale

    module = Tables()
    counter = CompileCounter()
    compiled = kiln.compile(module, backend=counter, dynamic=False)
    for _ in range(2):
        compiled(X, 1.0)
    before = counter.frame_count
    for n in range(5, 9):
        module(torch.ones(n), 1.0)  # eager fills the cache
        assert torch.equal(compiled(X, 1.0), X * X)
    assert counter.frame_count == before
    assert torch.equal(compiled(torch.ones(3), 1.0), torch.arange(3.0))
    assert (3, torch.float32) in module.cache


def test_what_is_written_is_kept_apart():
    """One dict is read by an item, another of the same kind written: they may be one."""

    def f(x, a, b):
        before = a["n"]
        b["n"] = x + 1
        return a["n"] * 2, before

    compiled = kiln.compile(f)
    compiled(X, {"n": X}, {"n": X})
    d = {"n": X}
    after, before = compiled(X, d, d)
    assert torch.equal(after, (X + 1) * 2) and before is X

    def g(x, a, b):
        b.append(x)
        return a[0] + len(b)

    check_calls(g, [(X, [X], [X]), (X, [X], [])])


def test_reads_after_writes():
    def f(x, d):
        d["n"] = x + 1
        y = d["n"] * d["scale"]
        del d["scale"]
        return y, "scale" in d, d.get("scale", -1), d.get("n")

    check(f, X, {"n": 0, "scale": 3.0, "more": [1]})

    def g(x, d):
        first = d["scale"]
        d.clear()
        return x * first, len(d), "scale" in d

    check(g, X, {"scale": 3.0, "more": [1]})


def test_all_of_it_is_looked_at_later():
    def f(x, d, whole):
        x = x * d["scale"]
        return x + sum(d.values()) + len(d) if whole else x

    check_calls(f, [(X, d, whole) for whole in (False, True) for d in growing(3)])


def test_across_a_graph_break():
    def f(x, d):
        first = d["scale"]
        print(end="")
        return x * first + d[str(print(end="") or "step")]

    check_calls(f, [(X, d) for d in growing(3)])


def test_keys_of_every_kind():
    class Key:
        def __hash__(self):
            return hash("scale")

        def __eq__(self, other):
            return other == "scale"

    f = LOOKUPS["item"]
    check_calls(f, [(X, {Key(): 2.0}), (X, {"scale": 3.0}), (X, {Key(): 4.0, 1: 2})])

    def types(x, d):
        return x * d[type(x)] + d.get(None, 1) + d.get(True, 2) + d[x.dtype] if x in (x,) and 1.0 not in d else x

    check_calls(types, [(X, {torch.Tensor: 2.0, torch.float32: 1}), (X, {torch.Tensor: 2.0, True: 1}), (X, {None: 3})])


def test_a_module_imported_later(monkeypatch):
    def f(x):
        return x + 1 if "kiln_no_such_module" in sys.modules else x - 1

    counter = CompileCounter()
    compiled = kiln.compile(f, backend=counter)
    assert torch.equal(compiled(X), X - 1)
    monkeypatch.setitem(sys.modules, "kiln_another_module", sys)
    assert torch.equal(compiled(X), X - 1)
    assert counter.frame_count == 1
    monkeypatch.setitem(sys.modules, "kiln_no_such_module", sys)
    assert torch.equal(compiled(X), X + 1)


class Meta(type):
    """A metaclass that leaves comparing to object."""


class Marked(metaclass=Meta):
    pass


def test_a_registry_of_classes_and_functions_is_asked_for_some_alone():
    def key(x):
        return x

    registry = {Meta: 1.0, Marked: 2.0, key: 3.0, torch.Tensor: 4.0}

    def f(x):
        return x * registry[type(x)] if Marked in registry and int not in registry else -x

    counter = CompileCounter()
    compiled = kiln.compile(f, backend=counter, fullgraph=True)

    def call(graphs):
        torch.testing.assert_close(compiled(X), f(X))
        assert counter.frame_count == graphs

    call(1)
    registry[str] = registry[Meta] = 5.0
    call(1)
    registry[torch.Tensor] = 6.0
    call(2)
    registry[int] = 7.0
    call(3)


class Holder:
    def __init__(self, n):
        self.n, self.d, self.l, self.m = n, {"n": n}, [n, 2], nn.Linear(1, 1)
        self.m.flag = n

    def state(self):
        return self.n, self.d, self.l, self.m.flag


def set_twice(o, j):
    o.d["n"] = 5
    o.d["n"] = j


WRITES = {
    "attribute": lambda o, j: setattr(o, "n", j),
    "__dict__": lambda o, j: o.__dict__.__setitem__("n", j),
    "item": lambda o, j: o.d.__setitem__("n", j),
    "twice": set_twice,
    "list": lambda o, j: o.l.__setitem__(0, j),
    "update": lambda o, j: o.d.update(n=j),
    "setdefault": lambda o, j: o.d.setdefault("n", j),
    "module": lambda o, j: setattr(o.m, "flag", j),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_value_that_was_there_already_is_written_in_other_calls(name):
    write = WRITES[name]

    def f(x, o, j):
        write(o, j)
        return x + 1

    compiled = kiln.compile(f)
    for n, j in [(1, 1), (2, 1), (3, 1), (3, 3), (1, 3), ("a", "a"), ("b", "a"), (None, None), (1, None)]:
        ours, theirs = Holder(n), Holder(n)
        compiled(X, ours, j), f(X, theirs, j)
        assert ours.state() == theirs.state()
