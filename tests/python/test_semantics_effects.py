"""Side effects and exceptions of Python code: each program leaves behind what it leaves in eager."""

import array
import asyncio
import ctypes
import enum
import functools
import itertools
import operator
import struct
import time
import weakref

import numpy
import pytest
import torch

import kiln
from helpers import check
from kiln.testing import assert_same

X = torch.linspace(-2, 2.6, 12).reshape(3, 4)
Y = torch.linspace(0.5, 3, 12).reshape(3, 4)
SCALE = 2.0
COUNTER = {"calls": 0}


# --- side effects -----------------------------------------------------------------------------------------------------


def test_containers_of_tensors_and_objects_keep_what_they_had():
    class Key:
        def __init__(self, n):
            self.n = n

        def __hash__(self):
            return hash(self.n)

        def __eq__(self, other):
            return self.n == other.n

    def write(table, members, key, x):
        table[key] = x.sum()
        members.add(key)
        return x + 1

    def move(table, members, key, x):
        first = next(iter(table))
        table[first] = table.pop(key)
        members.discard(key)
        return x + 1

    def loop(table, members, key, x):
        for k in list(table):
            state = table.setdefault(k, {})
            kiln.graph_break()
            members.add(k)
            table[k] = x * len(members)
        table[key] = state
        return x

    for make in (torch.tensor, Key):
        keys = [make(i) for i in range(8)]
        for n, f in itertools.product(range(1, 7), (write, move, loop)):
            left = []
            kiln.reset()
            for function in (f, kiln.compile(f)):
                table, members = {k: i for i, k in enumerate(keys[:n])}, set(keys[:n])
                function(table, members, keys[n - 1 if f is move else 7], X)
                left.append([(keys.index(k), v) for k, v in table.items()] if make is Key else list(table.values()))
                left[-1].append([any(k is m for m in members) for k in keys])
            assert_same(*left)


def test_weak_references_that_the_program_makes():
    class Node:
        pass

    module = torch.nn.Linear(4, 4)

    def f(x, cache, members, left):
        node = Node()
        node.parent = weakref.ref(module)
        node.me = weakref.ref(node)
        if module not in cache:
            cache[module] = (weakref.ref(module), 3)
        members.add(module)
        left.append(node)
        kiln.graph_break()
        return x + cache[module][1], node.me() is node, node.parent() is module

    outcomes = []
    for function in (f, kiln.compile(f)):
        cache, members, left = weakref.WeakKeyDictionary(), weakref.WeakSet(), []
        results = [function(X, cache, members, left) for _ in range(2)]
        reference = weakref.ref(left[0])
        assert left[0].me is reference
        left.clear()
        outcomes.append([results, cache[module][0]() is module, module in members, reference() is None])
    assert_same(*outcomes)


def test_what_pops_from_a_long_list_takes_no_square():
    def f(x):
        numbers = list(range(30000))
        while numbers:
            last = numbers.pop()
        return x + last

    started = time.perf_counter()
    check(f, X)
    assert time.perf_counter() - started < 2  # 4 s in the square of the length


def test_writes_to_arguments_and_globals():
    def f(x, log, table, box):
        log.append(x * 2)
        log[0] = x - 1
        table["new"] = x + 1
        table.pop("old")
        box.value = x * 3
        box.count += 1
        COUNTER["calls"] += 1
        return x + len(log)

    class Box:
        pass

    def run(function):
        COUNTER["calls"] = 0
        box = Box()
        box.count = 1
        log, table = [1], {"old": 1, "kept": 2}
        results = [function(X, log, table, box) for _ in range(2) if table.setdefault("old", 1)]
        return results, log, table, vars(box), dict(COUNTER)

    assert_same(run(f), run(kiln.compile(f)))


def test_effects_keep_identity():
    def f(x, log):
        t = x * 2
        log.append(t)
        log.append(t)
        return t

    log = []
    out = kiln.compile(f)(X, log)
    assert log[0] is log[1] is out


def test_argument_returned_is_the_argument():
    def f(x, items):
        return x, items, items[0]

    items = [Y]
    a, b, c = kiln.compile(f)(X, items)
    assert a is X and b is items and c is Y


def test_attributes_of_results():
    def f(x):
        y, z = x * 2, x + 1
        y.tag, y.other, z.back = [7, "seven"], z, y
        return y, x.sum()

    y, _ = kiln.compile(f)(X)
    assert y.tag == [7, "seven"] and y.other.back is y
    assert_same(y.other, X + 1)

    def g(x):
        y = x * 2
        y.tag = 7
        kiln.graph_break()
        return y.tag, y

    tag, y = kiln.compile(g)(X)
    assert tag == y.tag == 7
    assert kiln.compile(lambda x: g(x)[1])(X).tag == 7


def closure_that_counts():
    n, total = 0, torch.zeros(3)

    def f(x):
        nonlocal n, total
        n += 1
        total = total + x
        if n == 3:
            total = total * 10
        return x + n, total

    return f, lambda: (n, total)


def closure_with_a_function_inside():
    n, last = 0, None

    def f(x):
        nonlocal n, last

        def inner():
            nonlocal n
            n += 5
            return n

        last = x * 2
        return last + inner()

    return f, lambda: (n, last)


def closure_that_raises():
    n = 0

    def f(x):
        nonlocal n
        try:
            n += 1
            if n > 10:
                raise ValueError(f"{n}")
        finally:
            n += 4
        return x + n

    return f, lambda: (n,)


def closure_that_unbinds():
    v = 1

    def f(x):
        nonlocal v
        del v
        v = x * 2
        return x + 1

    return f, lambda: (v,)


@pytest.mark.parametrize(
    "make",
    [closure_that_counts, closure_with_a_function_inside, closure_that_raises, closure_that_unbinds],
    ids=lambda f: f.__name__,
)
def test_variables_of_the_captured_functions_own_closure(make):
    (f, kept), (g, left) = make(), make()
    compiled = kiln.compile(g, fullgraph=make is not closure_that_raises)
    for i in range(5):
        x = torch.full((3,), float(i))
        results = []
        for function in (f, compiled):
            try:
                results.append(function(x))
            except ValueError as e:
                results.append(str(e))
        assert_same(results[1], results[0])
        assert_same(left(), kept())


def test_nonlocal_and_global_writes():
    state = 0

    def f(x):
        nonlocal state
        global SCALE
        state += 1
        SCALE = SCALE + 1
        return x * SCALE + state

    global SCALE
    before = SCALE
    try:
        compiled = kiln.compile(f)
        first = compiled(X)
        assert state == 1 and SCALE == before + 1
        assert_same(first, X * SCALE + 1)
        second = compiled(X)
        assert state == 2
        assert_same(second, X * SCALE + 2)
    finally:
        SCALE = before


def test_print_order_and_output(capsys):
    def f(x):
        print("before")
        y = x + 1
        print("after", y.shape)
        return y * 2

    f(X)
    expected = capsys.readouterr().out
    out = kiln.compile(f)(X)
    assert capsys.readouterr().out == expected
    assert_same(out, f(X))


def test_iterator_argument_advances():
    def f(x, it):
        return x * next(it)

    def run(function):
        it = iter([2, 3, 4])
        return [function(X, it) for _ in range(3)]

    assert_same(run(f), run(kiln.compile(f)))


def test_object_made_inside_and_kept_outside():
    class Node:
        def __init__(self, value, next=None):
            self.value = value
            self.next = next

    def f(x, registry):
        a = Node(x)
        b = Node(x * 2, a)
        a.next = b
        registry["last"] = b
        return b

    registry = {}
    out = kiln.compile(f)(X, registry)
    assert registry["last"] is out and out.next.next is out
    assert_same(out.next.value, X)


# --- exceptions of the user's code -------------------------------------------------------------------------------------


def raises_in_the_middle(x, log):
    log.append(1)
    y = x * 2
    log.append(y)
    if x.dim() == 2:
        raise RuntimeError(f"no {x.dim()}d")
    log.append(2)
    return y


def raises_from_torch(x, log):
    log.append(x + 1)
    return x @ torch.ones(7, 7)


def raises_from_python(x, log):
    log.append(x + 1)
    return {"a": x}[x.shape[0]]


def raises_custom(x, log):
    class Special(Exception):
        pass

    log.append(x * 5)
    try:
        raise Special("inner")
    except Special as error:
        raise ValueError("outer") from error


def raises_in_callee(x, log):
    return [raises_in_the_middle(x, log)]


@pytest.mark.parametrize(
    "program",
    [raises_in_the_middle, raises_from_torch, raises_from_python, raises_custom, raises_in_callee],
    ids=lambda f: f.__name__,
)
def test_exception_leaves_what_eager_leaves(program):
    check(program, X, [0])


def test_exception_has_the_users_traceback():
    import traceback

    try:
        kiln.compile(raises_in_callee)(X, [])
    except RuntimeError as error:
        names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        assert names[-2:] == ["raises_in_callee", "raises_in_the_middle"]
        assert error.__cause__ is None
    else:
        pytest.fail("nothing was raised")


def test_calls_after_an_exception_work():
    compiled = kiln.compile(raises_in_the_middle)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="no 2d"):
            compiled(X, [])
    log = []
    assert_same(compiled(X[0], log), X[0] * 2)
    assert len(log) == 3


# --- writes to what no stand-in stands for ----------------------------------------------------------------------------


class Shared:
    n = 0
    tensor = None


class Counted:
    made = 0

    def __init__(self):
        Counted.made += 1


class Color(enum.Enum):
    RED = 1


class Single:
    instance = None

    def __new__(cls):
        if cls.instance is None:
            cls.instance = super().__new__(cls)
            cls.instance.n = 0
        return cls.instance


def counter_of_a_class(x):
    Shared.n += 1
    return x * Shared.n


def counter_by_setattr(x):
    setattr(Shared, "n", Shared.n + 1)
    type.__setattr__(Shared, "n", Shared.n + 1)
    return x * Shared.n


def tensor_kept_in_a_class(x):
    if Shared.tensor is None:
        Shared.tensor = x * 2
    return x + Shared.tensor


def counter_in_init(x):
    Counted()
    return x * Counted.made


def singleton(x):
    s = Single()
    s.n += 1
    return x * s.n


def counter_of_a_function(x):
    counter_of_a_function.n = getattr(counter_of_a_function, "n", 0) + 1
    return x * counter_of_a_function.n


def counter_of_an_enum(x):
    Color.RED.n = Color.RED.n + 1
    return x + 1


def new_class(x):
    class Made:
        n = 1

    Made.n += 1
    return x * Made.n


def run_with_classes(function):
    Shared.n, Shared.tensor, Counted.made, Single.instance, counter_of_a_function.n = 0, None, 0, None, 0
    Color.RED.n = 0
    results = [function(torch.full((2,), i + 1.0)) for i in range(3)]
    return results, Shared.n, Color.RED.n, Shared.tensor, Counted.made, Single.instance and Single.instance.n


@pytest.mark.parametrize(
    "program",
    [
        counter_of_a_class,
        counter_by_setattr,
        tensor_kept_in_a_class,
        counter_in_init,
        singleton,
        counter_of_a_function,
        counter_of_an_enum,
        new_class,
    ],
)
def test_writes_to_classes_and_functions(program):
    assert_same(run_with_classes(program), run_with_classes(kiln.compile(program)))


def test_a_class_made_inside_is_a_new_one_each_time():
    def f(x):
        class Made:
            pass

        return x + 1, Made

    compiled = kiln.compile(f)
    assert compiled(X)[1] is not compiled(X)[1]


def item(o, x):
    o[0] = 9
    return x + 1


def in_place(o, x):
    o += type(o)([7])
    return x + 1


def by_method(o, x):
    o.extend([3]) if hasattr(o, "extend") else o.fill(3)
    return x + 1


def deleted(o, x):
    del o[0]
    return x + 1


def by_operator(o, x):
    operator.setitem(o, 0, 9)
    return x + 1


WRITES = [
    (item, lambda: numpy.array([1, 2])),
    (item, lambda: bytearray(b"ab")),
    (item, lambda: array.array("i", [1, 2])),
    (item, lambda: memoryview(bytearray(b"ab"))),
    (item, lambda: (ctypes.c_int * 2)(1, 2)),
    (in_place, lambda: bytearray(b"ab")),
    (lambda o, x: (o.__iadd__(1), x + 1)[1], lambda: numpy.array([1, 2])),
    (by_method, lambda: bytearray(b"ab")),
    (by_method, lambda: array.array("i", [1, 2])),
    (by_method, lambda: numpy.array([1, 2])),
    (deleted, lambda: bytearray(b"ab")),
    (by_operator, lambda: numpy.array([1, 2])),
    (lambda o, x: (struct.pack_into("b", o, 0, 5), x + 1)[1], lambda: bytearray(b"ab")),
]


@pytest.mark.parametrize("number", range(len(WRITES)))
def test_writes_to_objects_of_c(number):
    program, make = WRITES[number]

    def run(function):
        results = []
        for _ in range(3):
            o = make()
            results.append(function(o, X))
            results.append(list(o))
        return results

    assert_same(run(program), run(kiln.compile(program)))


def test_finalizers_run_where_eager_runs_them():
    log = []

    class Dying:
        def __init__(self, v):
            self.v = v

        def __del__(self):
            log.append("del")

    def at_a_break(x):
        t = Dying(x)
        y = t.v + x
        return y * float(y.sum())

    def at_the_end(x):
        t = Dying(x)
        return t.v + x

    def before(x):
        t = Dying(x)
        y = t.v + x
        del t
        log.append("mid")
        return y

    def run(function):
        log.clear()
        return [function(X) for _ in range(3)], list(log)

    for program in (at_a_break, at_the_end, before):
        assert_same(run(program), run(kiln.compile(program)))


@functools.lru_cache(None)
def buffer(n):
    return torch.zeros(n)


@functools.lru_cache(None)
def state(n):
    return []


@functools.cache
def of_tensor(x):
    return x * 2


def test_caches_give_the_object_that_they_keep():
    def f(x):
        b = buffer(4)
        b += x
        state(1).append(1)
        return b.clone(), len(state(1)), buffer(4) is b

    def run(function):
        buffer.cache_clear()
        state.cache_clear()
        results = [function(torch.ones(4)) for _ in range(3)]
        return results, buffer(4), tuple(buffer.cache_info())

    assert_same(run(f), run(kiln.compile(f)))

    def g(x):
        return of_tensor(x) is of_tensor(x)

    assert kiln.compile(g)(X) is True


def test_exceptions_keep_their_context():
    def f(x):
        try:
            try:
                raise ValueError("v")
            except ValueError as e:
                if x is None:
                    raise RuntimeError("from") from e
                raise RuntimeError("w")
        except RuntimeError as e:
            return e

    def chain(e):
        return e and (type(e), e.args, chain(e.__context__), chain(e.__cause__), e.__suppress_context__)

    compiled = kiln.compile(f)
    for argument in (X, None):
        assert chain(compiled(argument)) == chain(f(argument))
        try:
            raise KeyError("of the caller")
        except KeyError:
            assert chain(compiled(argument)) == chain(f(argument))


def test_coroutines_are_made_once(recwarn):
    async def double(x):
        return x * 2

    def f(x):
        return asyncio.run(double(x)) + 1

    assert_same(kiln.compile(f)(X), X * 2 + 1)
    assert not [w for w in recwarn if "never awaited" in str(w.message)]
