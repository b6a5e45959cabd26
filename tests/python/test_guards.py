"""What a compiled entry assumed is checked at each call: a change gives another entry or the right answer, never the old."""

import collections
import gc
import inspect
import types
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import kiln
from helpers import training_step
from kiln.testing import CompileCounter, assert_same

X = torch.linspace(-2, 2, 12).reshape(3, 4)
OFFSET = 1


def calls(function, changes, fullgraph=True, compiles=None):
    """Runs compiled and eager side by side; each change is a function that is called before a call."""
    counter = CompileCounter()
    compiled = kiln.compile(function, backend=counter, fullgraph=fullgraph)
    for change in [lambda: (), *changes]:
        args = change()
        args = args if isinstance(args, tuple) and args else (X,)
        assert_same(compiled(*args), function(*args))
    if compiles is not None:
        assert counter.frame_count == compiles
    return counter


def test_shapes_dtypes_and_strides():
    def f(x):
        return x * x.shape[0] + x.stride(0)

    calls(
        f,
        [lambda: (X,), lambda: (X[:2],), lambda: (X.t(),), lambda: (X.double(),), lambda: (X,), lambda: (X[:2],)],
        compiles=4,
    )


def test_requires_grad_and_grad_mode():
    def f(x):
        return x * 2

    counter = CompileCounter()
    compiled = kiln.compile(f, backend=counter)
    assert not compiled(X).requires_grad
    assert compiled(X.clone().requires_grad_(True)).requires_grad
    with torch.no_grad():
        assert not compiled(X.clone().requires_grad_(True)).requires_grad
    n = counter.frame_count
    assert compiled(X.clone().requires_grad_(True)).requires_grad and not compiled(X).requires_grad
    assert counter.frame_count == n


def test_global_value():
    def f(x):
        return x + OFFSET

    def change(value):
        def apply():
            globals()["OFFSET"] = value
            return ()

        return apply

    try:
        calls(f, [change(2), change(2), change(2.5), change(1)], compiles=3)
    finally:
        globals()["OFFSET"] = 1


def test_global_function_is_replaced(monkeypatch):
    def f(x):
        return helper(x) + 1  # noqa: F821

    monkeypatch.setitem(globals(), "helper", lambda x: x * 2)
    compiled = kiln.compile(f)
    assert_same(compiled(X), X * 2 + 1)
    monkeypatch.setitem(globals(), "helper", lambda x: x * 3)
    assert_same(compiled(X), X * 3 + 1)


def test_builtin_is_shadowed():
    def f(x):
        return x * len([1, 2])

    compiled = kiln.compile(f)
    assert_same(compiled(X), X * 2)
    globals()["len"] = lambda items: 7
    try:
        assert_same(compiled(X), X * 7)
    finally:
        del globals()["len"]
    assert_same(compiled(X), X * 2)


def test_closure_cell():
    k = 1

    def f(x):
        return x * k

    compiled = kiln.compile(f)
    assert_same(compiled(X), X)
    k = 5
    assert_same(compiled(X), X * 5)


def test_containers():
    config = {"scale": 2, "items": [1, 2], "name": "a"}

    def f(x):
        for item in config["items"]:
            x = x + item
        if config["name"] == "a" and "extra" not in config:
            x = x * config["scale"]
        return x

    calls(
        f,
        [
            lambda: config.update(scale=3) or (),
            lambda: config["items"].append(5) or (),
            lambda: config.update(name="b") or (),
            lambda: config.update(name="a") or (),
            lambda: config.update(extra=None) or (),
            lambda: config.pop("extra") or (),
            lambda: config["items"].__setitem__(0, 10) or (),
            lambda: config.update(items=(1,)) or (),
        ],
    )


def test_key_order():
    table = {"a": 2, "b": 3}

    def f(x):
        for i, v in enumerate(table.values()):
            x = x * v + i
        return x

    calls(f, [lambda: table.update(a=table.pop("a")) or ()])


def test_attributes_of_instances_and_classes():
    class Holder:
        factor = 2

        def scale(self, x):
            return x * self.factor

    h = Holder()

    def f(x):
        return h.scale(x)

    def patch():
        Holder.scale = lambda self, x: x - self.factor
        return ()

    calls(
        f,
        [
            lambda: setattr(h, "factor", 3) or (),
            lambda: delattr(h, "factor") or (),
            lambda: setattr(Holder, "factor", 7) or (),
            patch,
            lambda: setattr(h, "scale", lambda x: x * 100) or (),
        ],
        fullgraph=False,
    )


def test_type_of_an_argument():
    def f(x, k):
        return x * (k + k if isinstance(k, int) else 3)

    counter = CompileCounter()
    compiled = kiln.compile(f, backend=counter)
    for k in (1, 2.0, True, "s", None, 1, 1.0, 2):
        assert_same(compiled(X, k), f(X, k))


def test_none_and_tensor():
    def f(x, mask=None):
        return x if mask is None else x * mask

    counter = CompileCounter()
    compiled = kiln.compile(f, backend=counter)
    for mask in (X, None, X, None):
        assert_same(compiled(X, mask), f(X, mask))
    assert counter.frame_count == 1  # without a mask there is nothing to compile


def test_nan_and_signed_zero():
    def f(x, k):
        return x * k

    compiled = kiln.compile(f)
    for k in (0.0, -0.0, float("nan"), 0.0, float("nan"), 1, 1.0, True):
        expected, actual = f(X, k), compiled(X, k)
        assert_same(actual, expected)
        assert torch.equal(torch.signbit(actual), torch.signbit(expected))


def test_nan_does_not_recompile_each_time():
    counter = CompileCounter()
    compiled = kiln.compile(lambda x, k: x * k, backend=counter)
    for _ in range(4):
        compiled(X, float("nan"))
    assert counter.frame_count == 1


def test_same_and_different_objects():
    def f(x, y, items):
        if x is y:
            return x + items[0]
        return x - items[0]

    compiled = kiln.compile(f)
    other = X.clone()
    for args in ((X, other, [X]), (X, X, [X]), (X, other, [other]), (X, other, [X.clone()])):
        assert_same(compiled(*args), f(*args))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.scale = 2.0
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return self.drop(x) * self.scale


MODULE_CHANGES = {
    "attribute": lambda m: setattr(m, "scale", 3.0),
    "mode": lambda m: m.eval(),
    "weights in place": lambda m: m.layers[0].weight.data.mul_(2),
    "a parameter": lambda m: setattr(m.layers[1], "weight", nn.Parameter(torch.ones(4, 4))),
    "a layer": lambda m: m.layers.__setitem__(1, nn.Tanh()),
    "another layer": lambda m: m.layers.append(nn.Linear(4, 4)),
    "frozen": lambda m: m.requires_grad_(False),
    "no bias": lambda m: setattr(m.layers[2], "bias", None),
    "dtype": lambda m: m.layers.__delitem__(0),
    "hook": lambda m: m.layers[0].register_forward_hook(lambda mod, args, out: out + 10),
    "pre hook": lambda m: m.register_forward_pre_hook(lambda mod, args: (args[0] * 2,)),
    "forward of the instance": lambda m: setattr(m.layers[0], "forward", lambda x: x * 0.5),
}


@pytest.mark.parametrize("change", MODULE_CHANGES)
def test_change_of_a_module(change):
    torch.manual_seed(0)
    net = Net()
    compiled = kiln.compile(net)

    def compare():
        torch.manual_seed(1)
        expected = net(X)
        torch.manual_seed(1)
        assert_same(compiled(X), expected)

    compare()
    compare()
    MODULE_CHANGES[change](net)
    compare()
    compare()


def test_class_attribute_of_a_module_class():
    class Local(nn.Module):
        gain = 2

        def forward(self, x):
            return x * self.gain

    m = Local()
    compiled = kiln.compile(m)
    assert_same(compiled(X), X * 2)
    Local.gain = 4
    assert_same(compiled(X), X * 4)
    Local.forward = lambda self, x: x + self.gain
    assert_same(compiled(X), X + 4)


def test_function_code_and_defaults_are_replaced():
    def f(x, k=2):
        return x * k

    def g(x):
        return f(x)

    compiled = kiln.compile(g)
    assert_same(compiled(X), X * 2)
    f.__defaults__ = (5,)
    assert_same(compiled(X), X * 5)
    f.__code__ = (lambda x, k: x + k).__code__
    assert_same(compiled(X), X + 5)


def test_default_dtype():
    def f(x):
        return x.sum() + torch.ones(2)

    compiled = kiln.compile(f)
    assert compiled(X).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    assert_same(compiled(X), f(X), rtol=1e-6, atol=1e-6)  # x.sum() is a float32 sum


def test_recompile_limit_runs_eager_and_says_so_once():
    seen = []

    def f(x, k):
        return x * k

    counter = CompileCounter()
    with kiln.config.patch(recompile_limit=3):
        compiled = kiln.compile(f, backend=counter, dynamic=False)
        with pytest.warns(UserWarning, match="recompile") as caught:
            for k in range(10):
                assert_same(compiled(X, k), X * k)
        seen = [w for w in caught if "recompile" in str(w.message)]
    assert len(seen) == 1
    assert counter.frame_count == 3


def test_reset_forgets():
    counter = CompileCounter()
    compiled = kiln.compile(lambda x: x + 1, backend=counter)
    compiled(X)
    compiled(X)
    kiln.reset()
    compiled(X)
    assert counter.frame_count == 2


def test_two_compiled_callables_of_one_function_have_their_own_backends():
    def f(x):
        return x + 1

    a, b = CompileCounter(), CompileCounter()
    kiln.compile(f, backend=a)(X)
    kiln.compile(f, backend=b)(X)
    assert (a.frame_count, b.frame_count) == (1, 1)


def test_objects_die():
    """Compiled code keeps no tensor of a call alive."""
    import gc
    import weakref

    def f(x, box):
        box.append(x * 2)
        return x + 1

    compiled = kiln.compile(f)
    x = X.clone()
    box = collections.UserList()
    out = compiled(x, [])
    refs = [weakref.ref(x), weakref.ref(out)]
    del x, out, box
    gc.collect()
    assert [r() for r in refs] == [None, None]


def test_memory_does_not_grow():
    import gc

    compiled = kiln.compile(lambda x, log: (log.append(x), x * 2)[1])

    def count():
        gc.collect()
        return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())

    for _ in range(3):
        compiled(X.clone(), [])
    before = count()
    for _ in range(20):
        compiled(X.clone(), [])
    assert count() <= before + 1


def overlapping():
    base = torch.arange(12.0)
    array = np.arange(12, dtype=np.float32)
    yield "distinct", base.clone(), base.clone()
    yield "view", base, base.view(12)
    yield "shifted", *(lambda t: (t[:12], t[1:]))(torch.arange(13.0))
    yield "disjoint", *torch.arange(24.0).split(12)
    yield "numpy", torch.from_numpy(array), torch.from_numpy(array[:])
    yield "same", *(lambda t: (t, t))(torch.arange(12.0))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(6))
def test_written_inputs_that_share_memory(first):
    def f(x, y):
        x.add_(1)
        return x * 2 + y

    compiled = kiln.compile(f)
    names = [name for name, *_ in overlapping()]
    for name in [names[first], *names]:
        expected = next(f(x, y) for other, x, y in overlapping() if other == name)
        actual = next(compiled(x, y) for other, x, y in overlapping() if other == name)
        assert_same(actual, expected)


class Output(collections.OrderedDict):
    def __init__(self, **fields):
        super().__init__(**fields)


@pytest.mark.parametrize(
    "keep",
    [
        lambda x, o: collections.OrderedDict(kept=o, x=x * 2),
        lambda x, o: dict(kept=o, x=x * 2),
        lambda x, o: Output(kept=o, x=x * 2),
    ],
)
def test_what_a_dict_only_keeps_may_be_another_object(keep):
    class Cache:
        pass

    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward

    compiled = kiln.compile(keep, backend=backend)
    for _ in range(4):
        cache = Cache()
        made = compiled(X, cache)
        assert made["kept"] is cache and type(made) is type(keep(X, cache))
    assert len(graphs) == 1


def typechecked(function):
    signature = inspect.signature(function)

    def checked(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return function(*bound.args, **bound.kwargs)

    return checked


@typechecked
def scaled(x, by=3):
    return x * by


behind = {"a": 2, "b": 3}
READ_ONLY = types.MappingProxyType(behind)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: scaled(x) + scaled(x, by=2) + scaled(x, 4),
        lambda x: x * READ_ONLY["a"] + len(READ_ONLY) + sum(READ_ONLY.values()) + ("c" in READ_ONLY),
        lambda x: [x * v for k, v in READ_ONLY.items() if k != "b"],
        lambda x: (x + 1, READ_ONLY, READ_ONLY is not None, {**READ_ONLY}, READ_ONLY.copy()),
    ],
)
def test_read_only_views_of_dicts(f):
    def change():
        behind["c"] = behind.get("c", 4) + 1

    calls(f, [change, change])
    assert kiln.compile(lambda x: (x + 1, READ_ONLY))(X)[1] is READ_ONLY


NAMES = {f"layer.{i}" for i in range(500)}


def test_sets_of_constants():
    """One guard for all elements: each by itself would be found by going through those before it."""

    def f(x):
        return [x * len(name) for name in NAMES if name.endswith("7")]

    def change():
        NAMES.symmetric_difference_update({"other.7", "layer.7"})

    kiln.reset()
    assert len(kiln.explain(f)(X).guards) < 10
    calls(f, [change, change, NAMES.clear])


def gaps(elements, kept):
    """A set that has the table of a larger one, from which all but every `kept`th element was removed."""
    made = set(elements)
    for i, element in enumerate(elements):
        if i % kept:
            made.discard(element)
    return made


NUMBERS = gaps(range(64), 7)
WORDS = gaps([f"word.{i}" for i in range(200)], 9)


@pytest.mark.parametrize("elements", [NUMBERS, WORDS], ids=["numbers", "words"])
@pytest.mark.parametrize("kind", [lambda s: s, frozenset, list], ids=["set", "frozenset", "list"])
def test_sets_keep_their_order(elements, kind):
    """A copy of a set from which elements were removed has them in another order."""
    held = kind(elements)

    def f(x):
        return [x * int(str(e).split(".")[-1]) for e in held], 7 in held

    calls(f, [lambda: None])
    assert set(elements) == set(held)


def test_unions_of_types_are_compared_by_value():
    class Holder:
        pass

    holder = Holder()
    holder.types = int | str

    def f(x):
        return x * (2 if holder.types == int | str else 3)

    def change():
        holder.types = str | float

    calls(f, [lambda: setattr(holder, "types", int | str), change])


def test_builtins_and_methods_of_tensors_that_are_replaced(monkeypatch):
    def f(x):
        return x + max(1, 2)

    compiled = kiln.compile(f)
    x = torch.ones(3)
    assert_same(compiled(x), f(x))
    with monkeypatch.context() as patch:
        patch.setattr("builtins.max", lambda *args: 5)
        assert_same(compiled(x), f(x))
    add = torch.Tensor.__add__
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "__add__", lambda a, b: add(a, b) * 10)
        assert_same(compiled(x), f(x))
        assert compiled(x)[0] == 30
    assert_same(compiled(x), f(x))


def test_entries_of_a_model_that_is_gone_go_with_it():
    """A search over settings makes a model, an optimizer and a step for each trial, from one code."""

    def trial():
        net = torch.nn.Linear(6, 3)
        opt = torch.optim.Adam(net.parameters())
        step = kiln.compile(training_step(net, opt))
        for _ in range(80):
            step(torch.ones(2, 6))
        return weakref.ref(net), weakref.ref(net.weight)

    with kiln.config.patch(recompile_limit=2), warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = [trial() for _ in range(20)]
    gc.collect()
    # The last one's entries go with the next compile.
    assert not any(ref() is not None for refs in kept[:-1] for ref in refs)


def test_models_that_take_turns_in_one_step_do_not_use_up_the_limit():
    @kiln.compile
    def step(net, opt, x):
        loss = net(x).square().sum()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    with kiln.config.patch(recompile_limit=4), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(10):
            net = torch.nn.Linear(6, 3)
            opt = torch.optim.Adam(net.parameters())
            for _ in range(80):
                step(net, opt, torch.ones(2, 6))


def test_what_is_made_anew_for_each_call_uses_up_the_limit():
    """Its entries go, too, but each call would compile."""
    counter = CompileCounter()
    compiled = kiln.compile(lambda x, f: f(x), backend=counter)
    with kiln.config.patch(recompile_limit=4, disable_passes="capture.changing_functions"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in range(12):
            factor = n + 0.5
            assert_same(compiled(X, lambda x, factor=factor: x * factor), X * factor)
    assert counter.frame_count == 2 * 4  # the function, then what it calls


def test_packed_weights_of_models_that_are_gone_take_no_memory():
    def resident():
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * 4096

    def infer():
        net = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)])
        compiled = kiln.compile(net)
        with torch.no_grad():
            for _ in range(3):
                compiled(torch.ones(64, 1024))

    for i in range(40):
        infer()
        gc.collect()
        if i == 9:
            before = resident()
    assert resident() - before < 100e6  # a model takes 16 MB
