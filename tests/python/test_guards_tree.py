"""The guard tree by itself: sources read without Python code, checks, and the fast program that trusts dict stamps."""

import weakref

import pytest
import torch
from torch import nn

from kiln import _C

Tree = _C.testing.GuardTree


def L(i, name="x"):
    return ("local", i, name)


def test_constants():
    tree = Tree([("equals", L(0), 1)])
    assert tree.check([1]) == []
    assert tree.check([True]) is None
    assert tree.check([1.0]) is None
    assert tree.check([2]) is None
    assert tree.check([]) is None


@pytest.mark.parametrize(
    ("value", "same", "other"),
    [
        (float("nan"), float("nan"), 1.0),
        (0.0, 0.0, -0.0),
        (10**30, 10**30, -(10**30)),
        ("text", "te" + "xt", "text "),
        (b"a", b"a", b"b"),
        (1 + 2j, 1 + 2j, 1 - 2j),
        ((1, (2.0, "a")), (1, (2.0, "a")), (1, (2, "a"))),
        (torch.float32, torch.float32, torch.float64),
        (torch.device("cpu"), torch.device("cpu"), torch.device("meta")),
        (torch.Size([2, 3]), torch.Size([2, 3]), torch.Size([3, 2])),
        (frozenset([1, 2]), frozenset([2, 1]), frozenset([1, 3])),
        (slice(1, None), slice(1, None), slice(2, None)),
        (None, None, False),
    ],
)
def test_equality_of_constants(value, same, other):
    tree = Tree([("equals", L(0), value)])
    for _ in range(3):
        assert tree.check([same]) == []
        assert tree.check([other]) is None


def test_no_python_code_runs():
    class Loud:
        def __eq__(self, other):
            raise AssertionError

        __hash__ = None

        def __getattr__(self, name):
            raise AssertionError

    loud = Loud()
    assert Tree([("equals", L(0), loud)]).check([Loud()]) is None
    assert Tree([("equals", L(0), loud)]).check([loud]) == []
    assert Tree([("equals", ("attr", L(0), "x"), 1)]).check([loud]) is None
    assert Tree([("equals", ("item", L(0), "x"), 1)]).check([loud]) is None


def test_tensor_facts():
    x = torch.zeros(2, 3)
    tree = Tree([("tensor", L(0), x)], [L(0)])
    other = torch.ones(2, 3)
    assert tree.check([other])[0] is other
    for bad in (
        torch.zeros(3, 2),
        torch.zeros(2, 3, 1),
        torch.zeros(3, 2).t(),
        torch.zeros(2, 3, dtype=torch.float64),
        torch.zeros(2, 3, requires_grad=True),
        torch.zeros(2, 3, device="meta"),
        nn.Parameter(torch.zeros(2, 3)),
        torch.zeros(2, 3).to_sparse(),
        1,
    ):
        assert tree.check([bad]) is None
        assert tree.failure([bad])
    assert tree.check([torch.ones(2, 4)[:, :3]]) is None  # strides
    y = torch.zeros(2, 3, requires_grad=True)
    leaf = Tree([("tensor", L(0), y)])
    assert leaf.check([y]) == [] and leaf.check([y * 2]) is None
    assert Tree([("tensor", L(0), y * 2)]).check([y]) is None


def test_failure_names_the_difference():
    tree = Tree([("tensor", L(0), torch.zeros(2, 3))])
    assert "size 1: expected 3, got 4" in tree.failure([torch.zeros(2, 4)])
    assert "dtype" in tree.failure([torch.zeros(2, 3, dtype=torch.int32)])
    assert "requires_grad" in tree.failure([torch.zeros(2, 3, requires_grad=True)])
    tree = Tree([("equals", ("item", ("dict", L(0, "self")), "n"), 3)])

    class Thing:
        def __init__(self, n):
            self.n = n

    assert tree.failure([Thing(4)]) == "L['self'].__dict__['n'] == 3: got 4"
    assert "no longer exists" in tree.failure([object()])


def test_type_guard_sees_changes_of_the_class():
    class Thing:
        k = 1

    tree = Tree([("type", L(0), Thing)])
    thing = Thing()
    for _ in range(3):
        assert tree.check([thing]) == []
    Thing.k = 2
    assert tree.check([thing]) is None
    assert "class was changed" in tree.failure([thing])


def test_type_guard_sees_a_new_class():
    class A:
        pass

    class B:
        pass

    a = A()
    tree = Tree([("type", L(0), A), ("has", ("dict", L(0)), "n")])
    a.n = 1
    for _ in range(3):
        assert tree.check([a]) == []
    a.__class__ = B
    assert tree.check([a]) is None


def test_containers():
    source = L(0)
    assert Tree([("length", source, 2)]).check([[1, 2]]) == []
    assert Tree([("length", source, 2)]).check([{1, 2}]) == []
    assert Tree([("length", source, 2)]).check([[1, 2, 3]]) is None
    assert Tree([("keys", source, ("a", "b"))]).check([{"a": 1, "b": 2}]) == []
    assert Tree([("keys", source, ("a", "b"))]).check([{"b": 1, "a": 2}]) is None
    assert Tree([("lacks", source, "a")]).check([{}]) == []
    assert Tree([("lacks", source, "a")]).check([{"a": 0}]) is None
    assert Tree([("lacks", source, "a")]).check([[]]) is None
    assert Tree([], [("index", source, 1)]).check([(4, 5)]) == [5]
    assert Tree([], [("key_at", source, 1)]).check([{"a": 0, "b": 1}]) == ["b"]
    assert Tree([], [("element_at", source, 0)]).check([{7}]) == [7]
    assert Tree([], [("item_at", source, L(1))]).check([{3: "v"}, 3]) == ["v"]
    cell = (lambda v: lambda: v)(8).__closure__[0]
    assert Tree([], [("contents", source)]).check([cell]) == [8]

    class Thing:
        pass

    thing = Thing()
    assert Tree([], [("weakref", source)]).check([weakref.ref(thing)]) == [thing]
    x = torch.ones(2, requires_grad=True)
    x.sum().backward()
    assert Tree([], [("attr", source, "grad")]).check([x])[0] is x.grad


def test_identity():
    a, b = torch.zeros(4), torch.zeros(4)
    assert Tree([("same", L(0), L(1))]).check([a, a]) == []
    assert Tree([("same", L(0), L(1))]).check([a, b]) is None
    assert Tree([("not_same", L(0), L(1))]).check([a, b]) == []
    assert Tree([("not_same", L(0), L(1))]).check([a, a]) is None


def test_global_state():
    tree = Tree([("global_state",)])
    assert tree.check([]) == [] and tree.check([]) == []
    with torch.no_grad():
        assert tree.check([]) is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tree.check([]) is None
    with torch.inference_mode():
        assert tree.check([]) is None
    torch.set_default_dtype(torch.float64)
    assert tree.check([]) is None
    torch.set_default_dtype(torch.float32)
    assert tree.check([]) == []


def module_guards(m, source, name="self"):
    """What capture would observe of a module and its children: classes, parameters, empty hooks, flags."""
    d = ("dict", source)
    guards = [("type", source, type(m)), ("equals", ("item", d, "training"), m.training)]
    guards += [("length", ("item", d, h), 0) for h in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")]
    wanted = []
    for key, p in m._parameters.items():
        wanted.append(("item", ("item", d, "_parameters"), key))
        guards.append(("tensor", wanted[-1], p))
    for key, child in m._modules.items():
        g, w = module_guards(child, ("item", ("item", d, "_modules"), key))
        guards += g
        wanted += w
    return guards, wanted


def test_unchanged_modules_take_the_fast_way():
    m = nn.Sequential(*[nn.Linear(2, 2) for _ in range(20)])
    tree = Tree(*module_guards(m, L(0, "self")))
    params = list(m.parameters())
    for _ in range(5):
        got = tree.check([m])
        assert all(a is b for a, b in zip(got, params)) and len(got) == len(params)
    assert tree.slow_runs == 1


@pytest.mark.parametrize(
    ("change", "holds"),
    [
        (lambda m: m[1].eval(), False),
        (lambda m: m[1].register_forward_hook(lambda *a: None), False),
        (lambda m: setattr(m[1], "weight", nn.Parameter(torch.zeros(2, 2))), True),
        (lambda m: setattr(m[1], "weight", nn.Parameter(torch.zeros(3, 2))), False),
        (lambda m: m[1].weight.requires_grad_(False), False),
        (lambda m: setattr(m[1].weight, "data", torch.zeros(4, 2)), False),
        (lambda m: setattr(m[1].weight, "data", torch.zeros(2, 2)), True),
        (lambda m: setattr(m[1].weight, "data", torch.zeros(3, 2)[1:]), True),
        (lambda m: setattr(m[1].weight, "data", torch.zeros(2, 2).t()), False),
        (lambda m: setattr(m[1].weight, "data", torch.zeros(2, 2, dtype=torch.float64)), False),
        (lambda m: setattr(m[1].weight, "data", torch.zeros(1, 1, 1, 1, 1, 1)), False),
        (lambda m: m[1].weight.data.zero_(), True),
        (lambda m: m[1].weight.detach().t_(), True),
        (lambda m: m[1].weight.requires_grad_(False).t_(), False),
        (lambda m: m[1].weight.detach_(), False),
        (lambda m: m[1].weight.requires_grad_(False).mul_(torch.ones(2, requires_grad=True)), False),
        (lambda m: torch.utils.swap_tensors(m[1].weight, nn.Parameter(torch.ones(2, 2))), True),
        (lambda m: torch.utils.swap_tensors(m[1].weight, nn.Parameter(torch.ones(3, 2))), False),
        (lambda m: setattr(m[1].weight, "__class__", type("Other", (nn.Parameter,), {})), False),
        (lambda m: m.__setitem__(1, nn.Linear(2, 2)), True),
        (lambda m: m.__setitem__(1, nn.Tanh()), False),
        (lambda m: m.double(), False),
        (lambda m: setattr(m[1], "note", 3), True),
        (lambda m: m[1].__dict__.update(training=False), False),
        (lambda m: setattr(m[1], "__dict__", dict(m[1].__dict__)), True),
        (lambda m: setattr(m[1], "__dict__", {**m[1].__dict__, "training": 2}), False),
        (lambda m: m[1]._parameters.__setitem__("weight", nn.Parameter(torch.zeros(2, 2))), True),
        (lambda m: m[1]._parameters.pop("bias"), False),
    ],
)
def test_changes_behind_a_fast_check_are_seen(change, holds):
    m = nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)])
    tree = Tree(*module_guards(m, L(0, "self")))
    assert tree.check([m]) is not None and tree.check([m]) is not None
    change(m)
    for _ in range(3):
        got = tree.check([m])
        assert (got is not None) == holds
        if holds:
            assert all(a is b for a, b in zip(got, m.parameters()))


def test_another_module_of_the_kind():
    """The address of the first one is assumed only while it is right."""
    a, b, c = (nn.Linear(2, 2) for _ in range(3))
    tree = Tree(*module_guards(a, L(0, "self")))
    for m in (a, b, c) * 4:
        assert tree.check([m])[0] is m.weight
    before = tree.slow_runs
    for m in (a, b, c) * 4:
        assert tree.check([m])[0] is m.weight
    assert tree.slow_runs == before  # it has given up assuming


def test_a_dict_that_keeps_changing():
    space = {"n": 0, "k": 5}
    tree = Tree([("equals", ("global", space, "k"), 5)])
    for i in range(8):
        space["n"] = i
        assert tree.check([]) == []
    before = tree.slow_runs
    for i in range(8, 16):
        space["n"] = i
        assert tree.check([]) == []
    assert tree.slow_runs == before
    space["k"] = 6
    assert tree.check([]) is None


def test_freed_objects_at_the_same_address():
    """A new object where an old one was must be looked at again."""

    class Thing:
        pass

    def make(n):
        t = Thing()
        t.n = n
        return t

    tree = Tree([("type", L(0), Thing), ("equals", ("item", ("dict", L(0)), "n"), 1)])
    hits = 0
    for i in range(200):
        t = make(1 if i % 3 else 2)
        ok = tree.check([t]) is not None
        assert ok == bool(i % 3)
        hits += ok
        del t
    assert hits > 100


def test_texts():
    m = nn.Linear(2, 2)
    guards, wanted = module_guards(m, L(0, "self"))
    texts = Tree(guards, wanted).texts()
    assert texts[0] == "type(L['self']) is Linear"
    assert "L['self'].__dict__['training'] == True" in texts
    assert any(t.startswith("tensor(L['self'].__dict__['_parameters']['weight']: f32[2, 2]") for t in texts)
