"""What existed before a call is left alone by a capture, and used as it is: containers of the user's own classes, iterators,
loggers, cached functions, classes that change."""

import collections
import functools
import logging

import pytest
import torch
from torch.testing._internal import common_utils

import kiln
from helpers import breaks, check, graphs
from kiln.testing import CompileCounter, assert_same

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Table(dict):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.reads = 0

    def __getitem__(self, key):
        self.reads += 1
        return super().__getitem__(key)

    def __missing__(self, key):
        return 3.0


class Items(list):
    pass


Pair = collections.namedtuple("Pair", "left right")


def test_instances_of_container_classes_are_read_and_written():
    def f(x, table, items, pair):
        table["sum"] = x * table["scale"] + table["absent"]
        items.append(x + 1)
        return pair.left + pair.right * items[0], len(table), isinstance(table, Table)

    def run(function):
        table, items = Table(scale=2.0), Items([X * 3])
        result = [function(X, table, items, Pair(X, X + 1)) for _ in range(2)]
        return result, dict.items(table), list(items), table.reads, type(table), type(items)

    expected, actual = run(f), run(kiln.compile(f, fullgraph=True))
    assert_same(expected[0], actual[0])
    assert_same(dict(expected[1]), dict(actual[1]))
    assert_same(expected[2], actual[2])
    assert expected[3:] == actual[3:]


def test_a_changed_container_instance_is_seen():
    counter = CompileCounter()

    @kiln.compile(backend=counter)
    def f(x, table):
        return x * table["scale"]

    table = Table(scale=2.0)
    assert_same(f(X, table), X * 2)
    assert_same(f(X, table), X * 2)
    dict.__setitem__(table, "scale", 5.0)
    assert_same(f(X, table), X * 5)


def test_factories_like_a_tensor_are_captured():
    def f(x):
        y = torch.zeros_like(x).add_(1) + torch.ones_like(x) + torch.full_like(x, 2.0)
        return y * x, torch.empty_like(x).fill_(3), torch.rand_like(x)

    compiled = kiln.compile(f, fullgraph=True)
    torch.manual_seed(0)
    expected = f(X)
    torch.manual_seed(0)
    assert_same(expected, compiled(X))


def test_numbers_written_and_lists_as_indices():
    def f(x):
        y = x.clone()
        y[0] = 1.5
        y[1:, 0] = 2
        y[[0, 2]] = y[[2, 0]] + 1
        y[y > 3] = 0
        return y

    assert_same(f(X), kiln.compile(f)(X))


def test_logging_does_not_break_the_graph(caplog):
    log = logging.getLogger("kiln-test")

    @kiln.compile(fullgraph=True)
    def f(x):
        log.warning("shape %s", tuple(x.shape))
        return x + 1

    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert_same(f(X), X + 1)
    assert [r.getMessage() for r in caplog.records] == ["shape (3, 4)"] * 2


@functools.lru_cache
def cached(n):
    calls.append(n)
    return n * 2


calls = []


def test_cached_functions_run_once():
    cached.cache_clear()
    calls.clear()
    compiled = kiln.compile(lambda x: x * cached(3), fullgraph=True)
    for _ in range(3):
        assert_same(compiled(X), X * 6)
    assert calls == [3]


class Settings:
    scale = 2.0

    @staticmethod
    def shift(x):
        return x + 1


def test_functions_and_numbers_read_through_a_class_are_guarded():
    def f(x):
        return Settings.shift(x) * Settings.scale

    compiled = kiln.compile(f)
    old = Settings.scale, Settings.__dict__["shift"]
    try:
        assert_same(f(X), compiled(X))
        Settings.scale = 7.0
        assert_same(f(X), compiled(X))
        Settings.shift = staticmethod(lambda x: x - 1)
        assert_same(f(X), compiled(X))
    finally:
        Settings.scale, Settings.shift = old


def inner(x, by=2.0):
    return x * by


def test_a_replaced_code_of_an_inlined_function_is_seen():
    helpers = {"run": inner}

    def f(x):
        return helpers["run"](x)

    compiled = kiln.compile(f)
    code, defaults = inner.__code__, inner.__defaults__
    try:
        assert_same(compiled(X), X * 2)
        inner.__defaults__ = (5.0,)
        assert_same(compiled(X), X * 5)
        inner.__code__ = (lambda x, by=2.0: x + by).__code__
        assert_same(compiled(X), X + 5)
    finally:
        inner.__code__, inner.__defaults__ = code, defaults


def test_existing_generators_are_not_consumed_by_a_capture():
    def f(x, rows):
        return torch.stack(list(rows)) + x.sum()

    rows = lambda: (r * 2 for r in X)
    assert_same(f(X, rows()), kiln.compile(f)(X, rows()))


@pytest.mark.parametrize("view", ["keys", "values", "items"])
def test_loops_over_a_dict_go_on_behind_a_break(view):
    def f(x, table):
        total = x
        for entry in getattr(table, view)():
            if total.sum() > -100:
                total = total + len(str(entry))
        return total

    check(f, X, {"a": 1, "bcd": 22, "e": 333})


def test_unused_gradients_are_dropped_before_the_step():
    """Old gradients are not alive beside the new ones, and those that the step reads are."""
    weight = torch.ones(3, requires_grad=True)

    @kiln.compile
    def step(x, keep):
        if not keep:
            weight.grad = None
        (weight * x).sum().backward()

    step(torch.ones(3), False)
    step(torch.full((3,), 2.0), True)
    assert weight.grad.tolist() == [3.0, 3.0, 3.0]
    step(torch.full((3,), 5.0), False)
    assert weight.grad.tolist() == [5.0, 5.0, 5.0]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_backward_through_a_graph_break(optimizer):
    """A backward that is captured behind a break goes on into the part before it."""

    def run(compiled):
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 4)
        opt = optimizer(net.parameters(), lr=0.1)

        def step(x):
            opt.zero_grad()
            y = net(x)
            kiln.graph_break()
            loss = (y * y).sum()
            loss.backward()
            opt.step()
            return loss.detach()

        function = kiln.compile(step) if compiled else step
        losses = [function(X * i) for i in range(1, 5)]
        return losses, [p.grad for p in net.parameters()], list(net.parameters())

    assert_same(run(False), run(True), rtol=1e-4, atol=1e-5)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 2 * x


def test_custom_autograd_functions_train():
    def run(compiled):
        torch.manual_seed(0)
        first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        opt = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.01)

        def step(x):
            opt.zero_grad()
            loss = second(Square.apply(first(x))).sum()
            loss.backward()
            opt.step()
            return loss.detach()

        function = kiln.compile(step) if compiled else step
        return [function(X) for _ in range(4)], [p.grad for p in first.parameters()]

    assert_same(run(False), run(True), rtol=1e-4, atol=1e-5)


def test_random_numbers_follow_the_memory_of_a_permuted_tensor():
    """Eager draws a dropout mask in the order of the input's memory."""

    def f(x):
        y = torch.nn.functional.dropout(x.transpose(0, 1), 0.5)
        return y + torch.empty_like(y).uniform_() + torch.empty_like(y).normal_()

    x = torch.randn(5, 2, 8)
    results = []
    for function in (f, kiln.compile(f)):
        torch.manual_seed(3)
        results.append((function(x), torch.rand(1)))
    assert_same(*results)


def test_encoder_layer_trains_with_dropout():
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
        function = kiln.compile(layer) if compiled else layer
        value = function(torch.linspace(-1, 1, 80).reshape(2, 5, 8))
        value.pow(2).sum().backward()
        results.append((value, [p.grad for p in layer.parameters()]))
    assert_same(*results, rtol=1e-4, atol=1e-4)


INDICES, OFFSETS = torch.tensor([1, 2, 3, 4, 4, 9]), torch.tensor([0, 2, 6])


@pytest.mark.parametrize(
    "options", [{}, {"include_last_offset": True}, {"padding_idx": 4}, {"scale_grad_by_freq": True}]
)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_embedding_bags(mode, options, dtype):
    if mode == "max" and "scale_grad_by_freq" in options:
        pytest.skip("eager refuses this")
    weight = torch.linspace(-1, 1, 40, dtype=dtype).reshape(10, 4).requires_grad_()

    def f(weight, indices, *offsets):
        return torch.nn.functional.embedding_bag(indices, weight, *offsets, mode=mode, **options) * 2

    assert graphs(f, weight, INDICES, OFFSETS) == 1
    check(f, weight, INDICES, OFFSETS, rtol=1e-6, atol=1e-6)
    if "include_last_offset" not in options:
        check(f, weight, INDICES.reshape(2, 3), rtol=1e-6, atol=1e-6)
    check(f, weight, INDICES + 2, OFFSETS)  # out of range


def test_weighted_embedding_bags():
    def f(weight, scale):
        return torch.nn.functional.embedding_bag(INDICES, weight, OFFSETS, mode="sum", per_sample_weights=scale)

    weight, scale = torch.linspace(-1, 1, 40).reshape(10, 4), torch.linspace(1, 2, 6)
    check(f, weight.requires_grad_(), scale.requires_grad_(), rtol=1e-6, atol=1e-6)
    check(f, weight.detach(), scale.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("make", "graphs"), [(torch.nn.Embedding, 1), (torch.nn.EmbeddingBag, 2)])
def test_sparse_gradients_are_of_eager(make, graphs):
    """The embedding alone runs in eager; that of bags comes after their offsets."""
    layer, head = make(10, 4, sparse=True), torch.nn.Linear(4, 2)
    found = []
    for function in (lambda i: head(layer(i)).sum(), kiln.compile(lambda i: head(layer(i)).sum())):
        layer.zero_grad()
        function(INDICES.reshape(2, 3)).backward()
        found.append(layer.weight.grad)
    assert found[1].layout == torch.sparse_coo
    assert_same(found[0].to_dense(), found[1].to_dense())
    assert kiln.explain(lambda i: head(layer(i)).sum())(INDICES.reshape(2, 3)).graph_count == graphs


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
        lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True),
        lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, fused=True),
    ],
)
def test_a_fused_optimizer_is_part_of_the_step(make):
    def run(compiled):
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 3)
        opt = make(net.parameters())

        def step(x):
            opt.zero_grad()
            loss = net(x).pow(2).sum()
            loss.backward()
            opt.step()
            return loss.detach()

        function = kiln.compile(step, fullgraph=True) if compiled else step
        return [function(X) for _ in range(4)], list(net.parameters())

    assert_same(run(False), run(True), rtol=1e-4, atol=1e-5)


def test_a_break_in_a_comprehension_over_a_closure():
    scale, rows = 2.0, [X, X + 1]

    def f(x):
        return torch.stack([(r * scale if r.sum() > 0 else r - scale) + x for r in rows])

    check(f, X)


def test_autocast_inside_the_function():
    layer = torch.nn.Linear(4, 4)

    def f(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(x)
            z = torch.softmax(y @ y.t(), -1)
        return y, z, layer(x)

    compiled = kiln.compile(f, fullgraph=True)
    for _ in range(2):
        expected, actual = f(X), compiled(X)
        assert [t.dtype for t in expected] == [t.dtype for t in actual]
        assert_same(expected, actual, rtol=2e-2, atol=2e-2)


def test_a_break_inside_autocast():
    layer = torch.nn.Linear(4, 4)

    def f(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(x)
            kiln.graph_break()
            z = y @ y.t()
        return y, z, torch.is_autocast_enabled("cpu")

    compiled = kiln.compile(f)
    for _ in range(2):
        expected, actual = f(X), compiled(X)
        assert expected[1].dtype == actual[1].dtype and expected[2] is actual[2] is False
        assert_same(expected[:2], actual[:2], rtol=2e-2, atol=2e-2)
        assert not torch.is_autocast_enabled("cpu")
        with torch.no_grad():  # casts of the old weight are not cached
            layer.weight.add_(1)


def test_modes_that_a_function_leaves_behind():
    def f(x):
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        return x @ x.t()

    compiled = kiln.compile(f)
    for _ in range(2):
        result = compiled(X)
        left = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        torch.set_grad_enabled(True)
        torch.set_autocast_enabled("cpu", False)
        assert left == (False, True) and result.dtype == torch.bfloat16


def test_the_random_module_is_called_each_time():
    import random

    def f(x):
        return x * random.random() + random.randint(0, 1000)

    results = []
    for function in (f, kiln.compile(f)):
        random.seed(5)
        results.append([function(X) for _ in range(3)])
    assert_same(*results)


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("clip", ["norm", "inf norm", "value"])
def test_clipped_gradients_stay_in_the_graph(clip, foreach):
    def train(compiled):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
        optimizer = torch.optim.AdamW(net.parameters())

        def step(x):
            optimizer.zero_grad()
            net(x).square().sum().backward()
            norm = None
            if clip == "value":
                torch.nn.utils.clip_grad_value_(net.parameters(), 0.1, foreach=foreach)
            else:
                kind = float("inf") if clip == "inf norm" else 2.0
                norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5, norm_type=kind, foreach=foreach)
            optimizer.step()
            return norm

        run = kiln.compile(step, fullgraph=True) if compiled else step
        return [run(torch.randn(2, 4).double()) for _ in range(4)], list(net.parameters())

    norms, parameters = train(False)
    found_norms, found = train(True)
    for a, b in zip(norms + parameters, found_norms + found, strict=True):
        if a is not None:
            torch.testing.assert_close(a, b)


def test_deques_are_read_and_written():
    def f(x, d):
        d.append(x.sum())
        d.rotate(1)
        d.appendleft(len(d))
        return x * d[1] + (d.maxlen or 0), [type(v) for v in d]

    def run(function):
        out = []
        for maxlen in (None, 3):
            d = collections.deque([1, X * 2], maxlen)
            out += [function(X, d), list(d), function(X, d), list(d), d.maxlen]
        return out

    compiled = kiln.compile(f, fullgraph=True)
    assert_same(run(f), run(compiled))
    compiled = kiln.compile(lambda x, d: x * sum(d), fullgraph=True)
    for items in ([1, 2], [1, 3], [1, 2, 3]):
        assert_same(compiled(X, collections.deque(items)), X * sum(items))


def test_a_deque_that_is_only_appended_to_is_not_read():
    def step(x, recent):
        loss = x.square().mean()
        recent.append(loss.item())
        recent.append(x)
        return x - loss

    def push(x, first, second):
        first.append(x)
        second.append(x + 1)
        return x * 2

    def read(x, recent):
        recent.append(x)
        recent.appendleft(x * 2)
        recent.append(x * 3)
        return x * len(recent)

    compiled = [kiln.compile(f, fullgraph=True) for f in (step, push, read)]
    for maxlen in (None, 0, 3):
        kept, wanted = collections.deque(maxlen=maxlen), collections.deque(maxlen=maxlen)
        for i in range(5):
            assert_same(compiled[0](X * i, kept), step(X * i, wanted))
            assert_same(list(kept), list(wanted))
    assert len(compiled[0]._entries) == 1
    for one in (False, True, False):
        kept, wanted = collections.deque(maxlen=3), collections.deque(maxlen=3)
        others = (kept, wanted) if one else (collections.deque(), collections.deque())
        for i in range(3):
            assert_same(compiled[1](X * i, kept, others[0]), push(X * i, wanted, others[1]))
            assert_same([list(kept), list(others[0])], [list(wanted), list(others[1])])
    kept, wanted = collections.deque(maxlen=2), collections.deque(maxlen=2)
    for i in range(4):
        assert_same(compiled[2](X * i, kept), read(X * i, wanted))
        assert_same(list(kept), list(wanted))


def test_a_break_inside_a_profiler_label():
    class Holder:
        pass

    Holder.value = torch.sparse_coo_tensor([[0]], [1.0], (3,))
    made_before = torch.autograd.profiler.record_function("before")

    def f(x):
        with torch.autograd.profiler.record_function("label"):
            Holder.value.requires_grad  # noqa: B018  (breaks the graph before any operator)
        with made_before:
            x = x * 2
            kiln.graph_break()
        return x + 1

    compiled = kiln.compile(f)
    for _ in range(2):
        assert_same(compiled(X), f(X))


def test_sparse_gradients_are_zeroed():
    def run(wrap):
        torch.manual_seed(0)
        embedding = torch.nn.Embedding(7, 3, sparse=True)
        optimizer = torch.optim.SparseAdam(list(embedding.parameters()), 0.1)

        @wrap
        def step(i):
            optimizer.zero_grad()
            loss = embedding(i).pow(2).sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return [step(torch.tensor([1, 2])) for _ in range(3)], embedding.weight.detach()

    assert_same(run(kiln.compile), run(lambda f: f))


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(
    "name", ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
)
def test_every_optimizer_steps(name, foreach):
    def run(wrap):
        p = torch.nn.Parameter(torch.linspace(-1, 1, 4))
        optimizer = getattr(torch.optim, name)([p], lr=0.01, foreach=foreach)
        step = wrap(optimizer.step)
        for k in range(4):
            p.grad = torch.linspace(1, 2, 4) * (k + 1)
            step()
        return p.detach()

    assert_same(run(kiln.compile), run(lambda f: f))


def test_padded_sequences_in_an_encoder():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 1).eval()
    x = torch.randn(2, 5, 8)
    padding = torch.tensor([[False] * 4 + [True]] * 2)
    compiled = kiln.compile(model)
    with torch.no_grad():
        for _ in range(2):
            assert_same(compiled(x, src_key_padding_mask=padding), model(x, src_key_padding_mask=padding))


def ordered_dict_made(module, x):
    state = module.state_dict()
    state.note = x * 2
    kiln.graph_break()
    return state, state._metadata, state.note


def ordered_dict_returned(module, x):
    return module.state_dict()


def ordered_dict_from_outside(module, x):
    HISTORY.count = HISTORY.count + 1
    HISTORY.last = x + 1
    HISTORY["x"] = x
    kiln.graph_break()
    return HISTORY.count, HISTORY.last


def ordered_dict_without_attributes(module, x):
    OTHERS.first = x + 1
    return OTHERS.first * 2


HISTORY, OTHERS = collections.OrderedDict(), collections.OrderedDict(a=1)


@pytest.mark.parametrize(
    "program",
    [ordered_dict_made, ordered_dict_returned, ordered_dict_from_outside, ordered_dict_without_attributes],
)
def test_ordered_dicts_have_attributes(program):
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))

    def run(f):
        HISTORY.__dict__.clear()
        OTHERS.__dict__.clear()
        HISTORY.count = 3
        out = []
        for i in range(3):
            result = f(module, torch.full((2,), float(i)))
            out += [result, dict(getattr(result, "__dict__", {})), dict(HISTORY.__dict__), dict(OTHERS.__dict__)]
        return out

    assert_same(run(program), run(kiln.compile(program)))


def test_reversed_iterator_over_a_module_that_is_being_made():
    class Chain(torch.nn.ModuleList):
        def __init__(self, modules, x):
            super().__init__(modules)
            for module in reversed(self):
                kiln.graph_break()
                x = module(x)
            self.last = x

    modules = [torch.nn.Linear(2, 2), torch.nn.Tanh()]
    f = lambda x: Chain(modules, x).last  # noqa: E731
    x = torch.ones(1, 2)
    assert_same(f(x), kiln.compile(f)(x))


def test_gradients_made_infinite_before_a_scaled_step():
    def step(net, optimizer, scaler, x):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = net(x).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        for i, p in enumerate(net.parameters()):
            p.grad.copy_(torch.inf if i % 2 else torch.nan)
        scaler.step(optimizer)
        scaler.update()

    def run(f):
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 2)
        scaler = torch.GradScaler("cpu", init_scale=128.0)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        for _ in range(2):
            f(net, optimizer, scaler, torch.ones(2, 3))
        return [p.detach() for p in net.parameters()], scaler.get_scale()

    assert_same(run(step), run(kiln.compile(step)))


def test_a_deque_keeps_tuples():
    def f(x, d):
        before = d[1], [len(e) for e in d]
        d.append((x * 2,))
        made = collections.deque(maxlen=3)
        made.append((x, x + 1))
        return before, list(made), made[0]

    def run(function):
        d = collections.deque([(torch.zeros(1),), (torch.ones(1), 2)])
        return function(torch.ones(2), d), list(d)

    assert_same(run(kiln.compile(f)), run(f))


def test_messages_are_made_of_what_is_logged_then(caplog):
    log = logging.getLogger("kiln-test")
    seen = []

    def f(x):
        y = x.clone()
        log.warning("%s of %s after %s", y, x.shape[0], seen)
        y.add_(1)
        seen.append(1)
        log.warning("then %s", y.sum().item())
        return y

    told = []
    for function in (f, kiln.compile(f)):
        seen.clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                function(torch.zeros(2))
        told.append([r.getMessage() for r in caplog.records])
    assert told[0] == told[1]


@torch.jit.script
def scripted_gelu(x):
    return x * 0.5 * (1.0 + torch.erf(x / 1.41421))


@torch.jit.script
def scripted_head(x: torch.Tensor, n: int) -> torch.Tensor:
    if n > 2:
        return x[:, :n]
    return x


def test_scripted_functions_are_captured(monkeypatch):
    # PyTorch's tools for tests put a function in Python in its place.
    monkeypatch.setattr(torch.jit.ScriptFunction, "__call__", common_utils.func_call)

    def f(x):
        return scripted_head(scripted_gelu(x * 2) + 1, 3)

    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    check(f, x)
    assert breaks(f, x) == 0


@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python boolean")
def test_traced_functions_stay_what_was_traced():
    traced = torch.jit.trace(lambda x: x * 2 if x.sum() > 0 else x - 1, torch.ones(3))
    for x in (torch.ones(3), -torch.ones(3)):
        check(lambda x: traced(x) + 1, x)


def test_an_input_that_is_reshaped_in_place_breaks_the_graph_there():
    def f(t, x):
        t.unsqueeze_(-1)
        return sum((x[i] * t[i]).sum() for i in range(3))

    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    check(f, torch.arange(3.0), x)
    assert breaks(f, torch.arange(3.0), x) == 1
