"""Compiled modules: the wrapper is the module to everything but the call."""

import copy
import functools
import inspect
import io
import math
import pickle
import warnings

import pytest
import torch
from torch import nn

import kiln
from helpers import breaks
from kiln.testing import CompileCounter, assert_same

X = torch.linspace(-1, 1, 8).reshape(2, 4)


class Net(nn.Module):
    """A small net."""

    def __init__(self, width=4):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU())
        self.head = nn.Linear(width, 2)
        self.note = "here"

    def forward(self, x, scale=1.0):
        return self.head(self.body(x)) * scale

    def helper(self):
        return self.note.upper()


@pytest.fixture
def pair():
    torch.manual_seed(0)
    net = Net()
    return net, kiln.compile(net)


def test_is_the_same_kind(pair):
    net, compiled = pair
    assert isinstance(compiled, Net) and isinstance(compiled, nn.Module) and isinstance(compiled, kiln.OptimizedModule)
    assert not isinstance(net, kiln.OptimizedModule)
    assert compiled._orig_mod is net
    assert type(compiled).__name__ == "Net" and repr(compiled) == repr(net)
    assert compiled.__doc__ == "A small net."


def test_attributes_go_both_ways(pair):
    net, compiled = pair
    assert compiled.note == "here" and compiled.helper() == "HERE" and compiled.head is net.head
    compiled.note = "there"
    assert net.note == "there"
    net.fresh = 3
    assert compiled.fresh == 3
    del compiled.fresh
    assert not hasattr(net, "fresh")
    with pytest.raises(AttributeError, match="nothing"):
        compiled.nothing


def test_state_dict_keys_and_loading(pair):
    net, compiled = pair
    assert list(compiled.state_dict()) == list(net.state_dict())
    other = Net()
    compiled.load_state_dict(other.state_dict())
    assert_same(net.head.weight, other.head.weight)
    buffer = io.BytesIO()
    torch.save(compiled.state_dict(), buffer)
    buffer.seek(0)
    Net().load_state_dict(torch.load(buffer))


def test_parameters_and_modes(pair):
    net, compiled = pair
    assert [id(p) for p in compiled.parameters()] == [id(p) for p in net.parameters()]
    assert [n for n, _ in compiled.named_modules()] == [n for n, _ in net.named_modules()]
    compiled.eval()
    assert not net.training and not net.body.training
    compiled.double()
    assert net.head.weight.dtype == torch.float64
    compiled.zero_grad()
    assert compiled.apply(lambda m: None) is compiled


def test_results(pair):
    net, compiled = pair
    reference = copy.deepcopy(net)
    for scale in (1.0, 2.0):
        assert_same(compiled(X, scale=scale), reference(X, scale=scale))
    assert_same(net.state_dict(), reference.state_dict())  # BatchNorm's statistics, the number of batches


def test_hooks(pair):
    net, compiled = pair
    reference = copy.deepcopy(net)
    events = {"ours": [], "reference": []}
    for module, key in ((compiled, "ours"), (reference, "reference")):
        module.register_forward_pre_hook(lambda m, args, key=key: events[key].append("pre"))
        module.register_forward_hook(lambda m, args, out: out * 2)
        module.head.register_forward_hook(lambda m, args, out, key=key: events[key].append(tuple(out.shape)))
        module.register_full_backward_hook(lambda m, gi, go, key=key: events[key].append("backward"))
    for module in (compiled, reference):
        for _ in range(2):
            x = X.clone().requires_grad_(True)
            module(x).sum().backward()
    assert events["ours"] == events["reference"]
    assert_same(net.head.weight.grad, reference.head.weight.grad)


def test_removed_hook(pair):
    net, compiled = pair
    reference = copy.deepcopy(net)
    compiled(X), reference(X)
    handle = compiled.register_forward_hook(lambda m, args, out: out + 100)
    assert_same(compiled(X), reference(X) + 100)
    handle.remove()
    assert_same(compiled(X), reference(X))


def test_copies(pair):
    net, compiled = pair
    twin = copy.deepcopy(compiled)
    assert isinstance(twin, kiln.OptimizedModule) and isinstance(twin, Net) and twin._orig_mod is not net
    with torch.no_grad():
        twin.head.weight.zero_()
    assert net.head.weight.abs().sum() > 0
    assert_same(twin.eval()(X), twin._orig_mod(X))


def test_pickle(pair):
    net, compiled = pair
    back = pickle.loads(pickle.dumps(compiled))
    assert isinstance(back, kiln.OptimizedModule) and isinstance(back, Net)
    assert_same(back.eval()(X), copy.deepcopy(net).eval()(X))


def test_as_a_child(pair):
    net, compiled = pair
    parent = nn.Sequential(compiled, nn.Softmax(1))
    assert list(parent.state_dict())[0] == "0.body.0.weight"
    reference = nn.Sequential(copy.deepcopy(net), nn.Softmax(1))
    assert_same(parent(X), reference(X))
    assert_same(kiln.compile(parent)(X), reference(X))


def test_compiling_a_compiled_module(pair):
    net, compiled = pair
    again = kiln.compile(compiled)
    assert again._orig_mod is net
    assert_same(again.eval()(X), net.eval()(X))


def test_in_place():
    torch.manual_seed(0)
    net, reference = Net(), None
    reference = copy.deepcopy(net)
    counter = CompileCounter()
    assert kiln.compile_in_place(net, backend=counter) is net
    assert type(net) is Net
    assert_same(net(X), reference(X))
    assert counter.frame_count == 1
    twin = copy.deepcopy(net)
    assert_same(twin(X), reference(X))
    pickle.loads(pickle.dumps(net))


def test_bound_forward_and_method_of_a_module():
    torch.manual_seed(0)
    net = Net().eval()
    assert_same(kiln.compile(net.forward)(X, 2.0), net(X, 2.0))


def test_forward_of_a_compiled_module():
    class Plain(nn.Module):
        def forward(self, x, scale=2.0):
            return x.sin() * scale

    counter = CompileCounter()
    module = Plain()
    compiled = kiln.compile(module, backend=counter)
    called = []
    module.register_forward_hook(lambda *args: called.append(len(args)))
    for _ in range(2):
        assert_same(compiled.forward(X, scale=3.0), X.sin() * 3)
    assert counter.frame_count == 1 and called == []
    assert inspect.signature(compiled.forward) == inspect.signature(module.forward)
    assert type(compiled).forward is Plain.forward
    assert_same(kiln.compile(lambda x: compiled.forward(x) + 1, fullgraph=True)(X), X.sin() * 2 + 1)
    Plain.forward = lambda self, x: x + 5
    assert_same(compiled.forward(X), X + 5)
    assert_same(compiled(X), X + 5)
    module.forward = lambda x: x + 6
    assert_same(compiled.forward(X), X + 6)


def test_decorated_forward():
    class Decorated(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 2)

        @kiln.compile
        def forward(self, x):
            return self.fc(x).relu()

    a, b = Decorated(), Decorated()
    for m in (a, b):
        assert_same(m(X), m.fc(X).relu())


class WithSlots(nn.Module):
    registry = []

    def __init_subclass__(cls, tag=None, **kwargs):
        WithSlots.registry.append((cls.__name__, tag))

    def __call__(self, x):
        return super().__call__(x) + 1

    def forward(self, x):
        return x * 2

    def __len__(self):
        return 0


def test_unusual_class():
    m = WithSlots()
    before = list(WithSlots.registry)
    compiled = kiln.compile(m)
    assert WithSlots.registry == before  # the wrapper's class is not announced
    assert len(compiled) == 0
    assert_same(compiled(X), X * 2 + 1)


def test_optimizer_through_the_wrapper_and_training_converges():
    torch.manual_seed(0)
    net = Net(16)
    compiled = kiln.compile(net)
    optimizer = torch.optim.Adam(compiled.parameters(), lr=0.05)
    target = torch.randn(2, 2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(compiled(X), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 10


def test_shared_parameters_and_buffers():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4, bias=False)
            self.b = nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            self.steps += 1
            return self.b(self.a(x)) * self.steps

    torch.manual_seed(0)
    net = Tied()
    reference = copy.deepcopy(net)
    compiled = kiln.compile(net)
    for _ in range(3):
        for m in (compiled, reference):
            m.zero_grad()
            m(X).sum().backward()
    assert_same(net.a.weight.grad, reference.a.weight.grad)
    assert_same(net.steps, reference.steps)


def test_state_written_in_forward():
    class Stateful(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0
            self.last = None
            self.history = []

        def forward(self, x):
            self.calls += 1
            self.last = x * self.calls
            self.history.append(self.last.shape)
            return self.last + 1

    with kiln.config.patch(recompile_limit=20):
        net, reference = Stateful(), Stateful()
        compiled = kiln.compile(net)
        for _ in range(3):
            assert_same(compiled(X), reference(X))
        assert (net.calls, net.history) == (3, reference.history)
        assert_same(net.last, reference.last)


def test_compiled_parts_are_captured_through():
    net = Net()
    plain = copy.deepcopy(net)
    net.body = kiln.compile(net.body)
    kiln.compile_in_place(net.head)
    doubled = kiln.compile(lambda x: x * 2)

    def f(x, n):
        return doubled(n(x))

    assert kiln.explain(f)(X, net).graph_break_count == 0
    plain(X)  # the statistics move
    compiled = kiln.compile(f)
    for _ in range(2):
        assert_same(compiled(X, net), plain(X) * 2)
    assert_same(net.body[1].running_mean, plain.body[1].running_mean)
    with torch.no_grad():
        net.head.weight.mul_(2), plain.head.weight.mul_(2)
    assert_same(compiled(X, net), plain(X) * 2)


def test_compiled_parts_keep_their_own_backend():
    counter = CompileCounter()
    inner = kiln.compile(lambda x: x * 2, backend=counter)
    assert_same(kiln.compile(lambda x: inner(x + 1) + 1)(X), (X + 1) * 2 + 1)
    assert counter.frame_count == 1


def test_writes_through_a_wrapper_show_on_the_module():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.count = 0

        def forward(self, x):
            self.count += 1
            return x * self.count

    module = Counts()
    wrapper = kiln.compile(module)

    def f(x):
        y = wrapper(x)
        wrapper.count += 10
        return y + module.count + module(x)

    compiled = kiln.compile(f)
    assert_same(compiled(X), X + 11 + X * 12)
    assert module.count == wrapper.count == 12
    assert_same(compiled(X), X * 13 + 23 + X * 24)


@pytest.mark.parametrize("kwargs", [{}, {"bidirectional": True}, {"proj_size": 3}, {"bias": False, "num_layers": 2}])
@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # eager has a library for LSTMs in float32
def test_recurrent_modules_train(kind, kwargs, dtype):
    if "proj_size" in kwargs and kind is not torch.nn.LSTM:
        pytest.skip("only an LSTM projects")
    torch.manual_seed(0)
    module = kind(4, 5, **kwargs).to(dtype)
    x = torch.randn(7, 3, 4, dtype=dtype)

    def gradients(function):
        module.zero_grad()
        out, _ = function(x)
        out.sum().backward()
        return [out.detach(), *[p.grad for p in module.parameters()]]

    for a, b in zip(gradients(module), gradients(kiln.compile(module)), strict=True):
        torch.testing.assert_close(b, a)


def test_module_of_fx():
    """Its class is made by __new__, for each module anew."""
    torch.manual_seed(0)
    net = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    x = torch.ones(2, 3)
    compiled = kiln.compile(net, fullgraph=True)
    assert isinstance(compiled, torch.fx.GraphModule)
    assert_same(compiled(x), net(x))
    assert_same(copy.deepcopy(compiled)(x), net(x))
    assert_same(kiln.compile(lambda x: net(x) * 2)(x), net(x) * 2)


@pytest.mark.parametrize("move", [lambda m, x: m.to(x.device), lambda m, x: m.float(), lambda m, x: m.cpu()])
def test_moving_a_module_to_where_it_is(move):
    """Its parameters' data are written with themselves."""
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()
    other = nn.Linear(3, 4)

    def f(x):
        move(net, x)
        other.weight.data = other.weight.data
        return net(x) + other(x)

    x = torch.randn(2, 3)
    assert breaks(f, x) == 0
    torch.testing.assert_close(kiln.compile(f)(x), f(x))


def test_new_data_for_a_parameter():
    net = nn.Linear(3, 3)

    def f(x):
        net.weight.data = net.weight.data * 1.5
        return net(x)

    x, start = torch.randn(2, 3), net.weight.detach().clone()
    expected = f(x), net.weight.detach().clone()
    net.weight.data = start
    assert_same((kiln.compile(f)(x), net.weight.detach()), expected)


@pytest.mark.parametrize("norm_first", [False, True])
def test_an_encoder_layer_gives_rows_whatever_it_is_given(norm_first):
    """Its fast path makes a contiguous result of a transposed input, and random numbers are drawn in memory's order."""
    layer = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True, norm_first=norm_first).eval()

    def f(x):
        y = layer(x)
        return y, y + torch.randn_like(y)

    x = torch.randn(5, 4, 6).transpose(0, 1)
    with torch.no_grad():
        torch.manual_seed(0)
        expected = f(x)
        torch.manual_seed(0)
        assert_same(kiln.compile(f)(x), expected, rtol=1e-5, atol=1e-5)


def ones_below(n):
    return torch.log(torch.tril(torch.ones(n, n)))


MASKS = {
    "causal": nn.Transformer.generate_square_subsequent_mask(6),
    "made in the call": None,
    "not causal": torch.eye(6).log().roll(1, 0),
    "truths": torch.ones(6, 6).triu(1).bool(),
}


@pytest.mark.parametrize("training", [False, True])
def test_what_an_attention_mask_is_for_is_asked_within_the_graph(training):
    """nn.TransformerEncoder compares its mask with a causal one."""
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False).train(training)
    x = torch.linspace(-1, 1, 6 * 3 * 8).reshape(6, 3, 8).sin()

    def f(x, mask):
        return net(x, ones_below(6) if mask is None else mask)

    compiled = kiln.compile(f, fullgraph=True)
    for mask in MASKS.values():
        results = []
        for g in (f, compiled):
            torch.manual_seed(0)
            results.append(g(x, mask))
        assert_same(*results)


def wide(module):
    torch.manual_seed(0)
    for p in module.parameters():
        nn.init.normal_(p, std=0.2)
    return module.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_encoder_layers_in_inference(activation, norm_first, dtype):
    """PyTorch calls one operator for the layer then, which is spelled out, also with a mask."""
    layer = nn.TransformerEncoderLayer(
        24, 4, 40, batch_first=True, activation=activation, norm_first=norm_first, dtype=dtype
    )
    module = wide(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    x = torch.randn(2, 7, 24, dtype=dtype)
    mask = torch.zeros(7, 7, dtype=torch.bool)
    mask[2, 3] = True
    with torch.no_grad():
        expected, masked = module(x), module(x, mask=mask)
        compiled = kiln.compile(module, fullgraph=True)
        for want, options in ((expected, {}), (masked, {"mask": mask})):
            with torch.profiler.profile() as profile:
                assert_same(want, compiled(x, **options), rtol=1e-4, atol=1e-4)
            assert all(e.name != "aten::_transformer_encoder_layer_fwd" for e in profile.events())


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention_in_inference(need_weights, average):
    attention = wide(nn.MultiheadAttention(24, 4, batch_first=True))
    x, y = torch.randn(2, 7, 24), torch.randn(2, 5, 24)

    @torch.no_grad()
    def f(x, y):
        options = {"need_weights": need_weights, "average_attn_weights": average}
        return attention(x, x, x, **options), attention(x, y, y, **options)

    assert breaks(f, x, y) == 0
    assert_same(f(x, y), kiln.compile(f)(x, y), rtol=1e-4, atol=1e-5)


class WithCompiledParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.act = kiln.compile(torch.nn.functional.relu)
        self.scale = kiln.compile(math.prod)  # of C

    def forward(self, x):
        return self.act(self.linear(x)) * self.scale((2, 3))


@kiln.compile
def compiled_by_name(x):
    return x + 1


def test_compiled_callables_are_copied_as_what_they_wrap():
    module, x = WithCompiledParts(), torch.randn(3, 2)
    for copied in (copy.deepcopy(module), copy.copy(module), pickle.loads(pickle.dumps(module))):
        assert isinstance(copied.act, type(module.act))
        assert_same(copied(x), module(x))
    module = nn.Linear(2, 2)
    module.forward = kiln.compile(module.forward, fullgraph=True)
    copied = copy.deepcopy(module)
    with torch.no_grad():
        copied.weight.zero_()
    assert copied(x).tolist() == copied.bias.expand(3, 2).tolist()
    assert module(x).tolist() != copied(x).tolist()
    assert pickle.loads(pickle.dumps(compiled_by_name)) is compiled_by_name
    assert copy.deepcopy(compiled_by_name) is compiled_by_name


def test_callables_that_come_and_go_do_not_count_together():
    def train(k):
        @kiln.compile
        def step(x):
            return x * k + 1

        for x in (torch.ones(3), torch.ones(3, 3)):
            assert_same(step(x), x * k + 1)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for k in range(20):
            train(k if k % 2 else k + 0.5)


def test_names_of_another_function_on_a_compiled_one():
    """As functools.wraps puts them; what is compiled stays the same."""

    def reference(x):
        """What it does."""

    compiled = functools.update_wrapper(kiln.compile(lambda x: x + 1), reference)
    x = torch.ones(2)
    disabled = functools.update_wrapper(kiln.disable(lambda x: x + 1), reference)
    assert disabled.__wrapped__ is reference
    assert_same(disabled(x), x + 1)
    assert compiled.__doc__ == "What it does." and compiled.__wrapped__ is reference
    assert_same(compiled(x), x + 1)
    assert_same(kiln.compile(lambda x: compiled(x) * 2)(x), (x + 1) * 2)


def small():
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 1))


def penalty(c, x):
    return c(x).sum() + sum(p.pow(2).sum() for p in c.parameters())


def inner_steps(c, x):
    for _ in range(2):
        gradients = torch.autograd.grad(c(x).pow(2).mean(), list(c.parameters()))
        with torch.no_grad():
            for p, g in zip(c.parameters(), gradients):
                p -= 0.05 * g
    return c(x)


def walked(c, x):
    names = [name for name, _ in c.named_modules()] + [type(m).__name__ for m in c.children()]
    c.train()
    c.zero_grad()
    return c(x), names, len(list(c.modules()))


@pytest.mark.parametrize("f", [penalty, inner_steps, walked])
def test_new_modules_in_each_call(f):
    """Which modules are one, not where they lie, matters to the walks over a module's parts."""
    torch.manual_seed(0)
    net, compiled = small(), kiln.compile(f)
    for _ in range(12):
        a, x = copy.deepcopy(net), torch.randn(4, 2)
        b = copy.deepcopy(a)
        assert_same(compiled(a, x), f(b, x))
        assert_same(a.state_dict(), b.state_dict())
    assert len(compiled._entries) <= 2


@pytest.mark.parametrize("shared_first", [False, True])
def test_modules_that_are_one_in_another_call(shared_first):
    class Pair(nn.Module):
        def __init__(self, shared):
            super().__init__()
            self.a = nn.Linear(2, 2)
            self.b = self.a if shared else nn.Linear(2, 2)

    def f(pair, x):
        return len(list(pair.modules())), len(list(pair.parameters())), pair.b(pair.a(x))

    compiled, x = kiln.compile(f), torch.randn(3, 2)
    for shared in (shared_first, not shared_first, shared_first, not shared_first):
        pair = Pair(shared)
        assert_same(compiled(pair, x), f(pair, x))
    compiled = kiln.compile(f)
    for tied in (shared_first, not shared_first, shared_first, not shared_first):
        pair = Pair(False)
        if tied:
            pair.b.weight = pair.a.weight
        assert_same(compiled(pair, x), f(pair, x))


@pytest.mark.parametrize(
    "look",
    [
        lambda s: [m.tag for m in s],
        lambda s: [m.tag for m in list(s)] + [len(s)],
        lambda s: [m.tag for m in tuple(s)],
        lambda s: [s.pop().tag, s.pop().tag],
        lambda s: next(iter(s)).tag,
        lambda s: [m.tag for m in s | {1}] if not s else [m.tag for m in s | set()],
        lambda s: sorted(m.tag for m in s),
        lambda s: [m.tag for m in (lambda first, *rest: (first, *rest))(*s)],
        lambda s: [m.tag for m in s.copy()],
        lambda s: [m.tag for m in frozenset(s)],
        lambda s: {m: m.tag for m in s}.__len__(),
        lambda s: [[m.tag for m in x] for x in [s]],
    ],
)
def test_the_order_of_a_set_of_new_objects(look):
    """It hangs on where the objects lie: another one for each call."""

    def f(items, x):
        seen = set()
        for m in items:
            if m not in seen:
                seen.add(m)
        return x * 2, look(seen)

    compiled, kept = kiln.compile(f), []
    for _ in range(10):
        items = [nn.ReLU() for _ in range(6)]
        for k in torch.randperm(6).tolist():
            items[k].tag = k
        kept.append(items)
        assert_same(compiled(items, torch.ones(2)), f(items, torch.ones(2)))


class Gated(torch.jit.ScriptModule):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    @torch.jit.script_method
    def forward(self, x):
        return x * self.weight


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", ["script", "trace", "script_method"])
def test_modules_of_torchscript(kind):
    def make():
        torch.manual_seed(0)
        if kind == "script":
            return torch.jit.script(Net().body)
        return torch.jit.trace(Net().eval(), X) if kind == "trace" else Gated()

    module, other = make(), make()
    compiled = kiln.compile(other)
    for _ in range(2):
        x, y = (X.clone().requires_grad_() for _ in range(2))
        module(x).sum().backward()
        compiled(y).sum().backward()
        assert_same(y.grad, x.grad)
    assert_same(dict(compiled.state_dict()), dict(module.state_dict()))
    assert_same([p.grad for p in compiled.parameters()], [p.grad for p in module.parameters()])
    assert not compiled.eval().training and not other.training


def test_a_compiled_module_is_exported(pair):
    model, compiled = pair
    model.eval(), compiled.eval()
    assert_same(torch.export.export(compiled, (X,)).module()(X), model(X))


def test_code_and_defaults_are_those_of_the_function():
    def f(x, a=3, *, k=2):
        return x * a + k

    compiled = kiln.compile(f)
    for name in ("__code__", "__defaults__", "__kwdefaults__", "__closure__", "__globals__"):
        assert getattr(compiled, name) is getattr(f, name)
    method = Net().helper
    assert kiln.compile(method).__code__ is Net.helper.__code__


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_exported_module_is_one_graph(pair, dynamic):
    model, _ = pair
    sizes = ({0: torch.export.Dim("rows", min=2, max=8)},) if dynamic else None
    exported = torch.export.export(model.eval(), (X,), dynamic_shapes=sizes).module()
    compiled = kiln.compile(exported, fullgraph=True)
    assert_same(compiled(X), model(X), rtol=1e-5, atol=1e-6)
    if dynamic:
        assert_same(compiled(torch.cat([X, X])), model(torch.cat([X, X])), rtol=1e-5, atol=1e-6)
