"""backward() as users call it: over some of the results, one result after another, into leaves with hooks."""

import weakref

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

import kiln
from kiln import _C
from kiln.testing import assert_same


class Two(nn.Module):
    """Two heads and what they share; the parameters of each are known by name."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(3, 2)

    def grads(self):
        return {name: p.grad for name, p in self.named_parameters()}


X = torch.linspace(-1, 1, 6).reshape(2, 3)


def apart(m, x):
    return m.a(x).tanh().sum(), m.b(x).exp().sum()


def shared(m, x):
    h = m.trunk(x).tanh()
    return m.a(h).sum(), m.b(h).sum()


def detached(m, x):
    h = m.trunk(x).tanh()
    return m.a(h).sum(), m.b(h.detach()).sum()


def shared_without_saved(m, x):
    h = m.trunk.bias + x
    return h.sum(), (h * 2).sum()


def hidden_and_result(m, x):
    h = m.trunk(x)
    return h.sum(), m.b(h.tanh()).sum()


def halves(m, x):
    u, v = m.trunk(x).tanh().unsafe_chunk(2, 0)
    return m.a(u.sin()).sum(), m.b(v.sin()).sum()


def same_twice(m, x):
    y = m.trunk.bias + x
    return (y, y)


def views_of_one(m, x):
    y = m.trunk.weight + 1
    return y[0], y[1]


PROGRAMS = [apart, shared, detached, shared_without_saved, hidden_and_result, halves, same_twice, views_of_one]


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("order", [(0,), (1,), (0, 1), (1, 0), (0, 0)])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_one_result_after_another(program, order, retain):
    def run(compile):
        m, log = Two(), []
        f = compile(lambda x: program(m, x))
        for _ in range(2):
            results = f(X)
            for i in order:
                try:
                    results[i].sum().backward(retain_graph=retain)
                except RuntimeError as error:
                    return log, str(error)[:50]
                log.append({name: None if g is None else g.clone() for name, g in m.grads().items()})
        return log, ""

    assert_same(run(lambda f: f), run(kiln.compile))


def test_many_losses_one_by_one():
    """More sets of losses than are compiled."""

    def run(compile):
        m = Two()
        f = compile(lambda x: [m.a(x * i).tanh().sum() for i in range(12)])
        for loss in f(X):
            loss.backward()
        losses = f(X)
        (losses[2] + losses[7]).backward()
        return m.grads()

    assert_same(run(lambda f: f), run(kiln.compile))


def test_unreached_results_add_nothing():
    """Zeros for the other result's gradient would become nan in x / 0."""

    def run(compile):
        x = torch.tensor([0.0, 1.0], requires_grad=True)
        _, safe = compile(lambda x: (x / x.detach(), x * 2))(x)
        safe.sum().backward()
        return x.grad

    assert_same(run(lambda f: f), run(kiln.compile))


@pytest.mark.parametrize("program", [apart, shared, detached, shared_without_saved], ids=lambda p: p.__name__)
def test_one_backward_inside_and_one_outside(program):
    def run(compile):
        m = Two()

        def step(x):
            first, second = program(m, x)
            first.backward()
            return first, second

        first, second = compile(step)(X)
        log = [first.requires_grad, second.requires_grad]
        for loss in (second, first):
            try:
                loss.backward()
            except RuntimeError as error:
                log.append(str(error)[:50])
                break
            log.append({name: None if g is None else g.clone() for name, g in m.grads().items()})
        return log

    assert_same(run(lambda f: f), run(kiln.compile))


def test_saved_tensors_go_when_nothing_can_read_them():
    alive = weakref.WeakSet()

    class Box:
        def __init__(self, tensor):
            self.tensor = tensor
            alive.add(self)

    def f(x, w):
        h = (x @ w).tanh()
        return h.sin().sum(), h.cos().sum(), x.exp()

    args = [torch.randn(3, 3, requires_grad=True) for _ in range(2)]
    compiled = _C._joint_compile(f, args, "min_cut")
    with torch.autograd.graph.saved_tensors_hooks(Box, lambda box: box.tensor):
        first, second, third = compiled(args)
    before = len(alive)
    first.backward()
    between = len(alive)
    assert 0 < between < before
    third.sum().backward()
    assert len(alive) == 0
    assert second.requires_grad


def test_second_derivative_of_one_result():
    def run(compile):
        x = X.clone().requires_grad_(True)
        cut, _ = compile(lambda x: ((x**3)[:, ::2], x.sin()))(x)
        (g,) = torch.autograd.grad(cut.sum(), x, create_graph=True)
        g.pow(2).sum().backward()
        return g.detach(), x.grad

    assert_same(run(lambda f: f), run(kiln.compile))


def test_many_gradients_at_once():
    def run(compile):
        m = Two()
        y, _ = compile(lambda x: (m.trunk(x).tanh(), m.a(x)))(X)
        seeds = torch.eye(6).view(6, 2, 3)
        (g,) = torch.autograd.grad(y, m.trunk.weight, seeds, is_grads_batched=True, retain_graph=True)
        (h,) = torch.autograd.grad(y.sum(), m.trunk.weight)
        return g, h

    assert_same(run(lambda f: f), run(kiln.compile))


def test_many_gradients_of_attention_at_once():
    """They do not lie in memory as the one gradient does for which the backward was made."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.randn(2, 3, 4, requires_grad=True)
    seeds = torch.randn(5, 2, 3, 4)

    def run(f):
        return torch.autograd.grad(f(x), x, seeds, is_grads_batched=True)

    def f(x):
        return attention(x, x, x)[0]

    assert_same(run(kiln.compile(f)), run(f), rtol=1e-4, atol=1e-6)


HOOKS = {
    "tensor": lambda m, x, log: m.weight.register_hook(lambda g: log.append(1) or g * 10),
    "post accumulate": lambda m, x, log: m.weight.register_post_accumulate_grad_hook(lambda p: log.append(2)),
    "node": lambda m, x, log: m.node.register_hook(lambda *a: log.append(3)),
    "node before": lambda m, x, log: m.node.register_prehook(lambda *a: log.append(4)),
    "input": lambda m, x, log: x.register_hook(lambda g: log.append(5) or g * 10),
}


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_of_leaves_run(kind, later):
    def run(compile):
        torch.manual_seed(0)
        m, log = nn.Linear(3, 2), []
        m.node = torch.autograd.graph.get_gradient_edge(m.weight).node
        x = X.clone().requires_grad_(True)

        def step(x):
            m.zero_grad()
            loss = m(x).pow(2).sum()
            loss.backward()
            return loss.detach()

        f = compile(step)
        if later:
            f(x)
        HOOKS[kind](m, x, log)
        return f(x), f(x), m.weight.grad, x.grad, log

    assert_same(run(lambda f: f), run(kiln.compile))


def test_hooks_run_for_grad_inside():
    def run(compile):
        w = X.clone().requires_grad_(True)
        f = compile(lambda x: torch.autograd.grad((w * x).sin().sum(), [w])[0])
        first = f(X)
        handle = w.register_hook(lambda g: g * 10)
        second = f(X)
        handle.remove()
        return first, second, f(X)

    assert_same(run(lambda f: f), run(kiln.compile))


def scaled(state, w):
    return (state + 1) * w


def cloned(state, w):
    return state.clone().detach() * w


def converted(state, w):
    return state.double().float().sin() * w


@pytest.mark.parametrize("program", [scaled, cloned, converted], ids=lambda p: p.__name__)
def test_inputs_written_before_the_backward(program):
    """What eager computed from a buffer and saved does not change with the buffer."""

    def run(function):
        state, w = X.clone(), X.clone().requires_grad_()
        y = function(state, w)
        state.zero_()
        y.sum().backward()
        return y, w.grad

    assert_same(run(program), run(kiln.compile(program)))


def test_inputs_that_eager_saves_are_checked():
    def program(state, w):
        return state * w

    for function in (program, kiln.compile(program)):
        state, w = X.clone(), X.clone().requires_grad_()
        y = function(state, w)
        state.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def penalty(x):
    """A gradient penalty, whole inside."""
    inside = x.clone().requires_grad_()
    y = (inside**3).sum()
    (g,) = torch.autograd.grad(y, inside, create_graph=True)
    return (g.norm(2, 1) - 1).square().mean(), g.detach()


def by_attribute(x):
    inside = x.detach()
    inside.requires_grad = True
    (inside.sin() * x).sum().backward()
    return inside.grad


def by_factory(x):
    inside = torch.ones(2, 3, requires_grad=True)
    (inside.exp() * x).sum().backward()
    return inside.grad


def result_depends(x):
    inside = torch.full((2, 3), 2.0, requires_grad=True)
    return inside * x


def leaf_and_result(x):
    inside = x.clone().requires_grad_()
    return inside, inside * 2


def leaf_alone(x):
    return x.clone().requires_grad_()


def leaf_with_gradient(x):
    inside = x.clone().requires_grad_()
    inside.square().sum().backward()
    return inside


LEAVES = [penalty, by_attribute, by_factory, result_depends, leaf_and_result, leaf_alone, leaf_with_gradient]


@pytest.mark.parametrize("program", LEAVES, ids=lambda p: p.__name__)
def test_leaves_made_inside(program):
    def run(function):
        out = function(X)
        for t in out if isinstance(out, tuple) else (out,):
            if t.requires_grad and not t.is_leaf:
                t.sum().backward()
        return out, [t.grad for t in (out if isinstance(out, tuple) else (out,)) if t.is_leaf]

    assert_same(run(program), run(kiln.compile(program)))


def test_leaves_made_inside_need_no_break():
    for program in (penalty, by_attribute, by_factory, result_depends, leaf_alone):
        kiln.compile(program, fullgraph=True)(X)


def forces(net, x):
    """Of an energy, as force fields and physics-informed networks compute them."""
    place = x.clone().requires_grad_(True)
    energy = net(place).tanh().sum()
    return energy, -torch.autograd.grad(energy, place, create_graph=True)[0]


def two_leaves(net, x):
    first = x.detach().requires_grad_(True)
    h = net(first)
    again = net(h.detach().requires_grad_(True))
    return h.sum() + again.sum(), torch.autograd.grad(again.sum() + h.sum(), first, create_graph=True)[0]


def penalty_step(net, x):
    """A critic's step with a gradient penalty."""
    mixed = (torch.rand(len(x), 1) * x.data + 0.5).requires_grad_(True)
    out = net(mixed)
    (g,) = torch.autograd.grad(out, mixed, torch.ones_like(out), create_graph=True, retain_graph=True)
    loss = (g.norm(2, dim=1) - 1).square().mean() - net(x).mean()
    loss.backward()
    return loss


@pytest.mark.parametrize("program", [forces, two_leaves, penalty_step], ids=lambda p: p.__name__)
def test_leaves_made_inside_a_network(program):
    def run(function):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 8), nn.Softplus(), nn.Linear(8, 3))
        opt = torch.optim.Adam(net.parameters(), 1e-2)
        results = []
        for _ in range(3):
            opt.zero_grad()
            out = function(net, torch.randn(2, 3))
            if program is not penalty_step:
                sum(t.square().sum() for t in out).backward()
            results.append((out, [p.grad.clone() if p.grad is not None else None for p in net.parameters()]))
            opt.step()
        return results

    assert_same(run(program), run(kiln.compile(program, fullgraph=True)), rtol=1e-4, atol=1e-5)


def test_a_layer_norm_between_transposes_of_equal_sizes():
    """As many positions as channels: what lies at the same place need not be the same view."""
    torch.manual_seed(0)
    m = nn.ModuleDict(
        {
            "conv": nn.Conv2d(3, 16, 4, 4),
            "first": nn.LayerNorm(16),
            "last": nn.LayerNorm(16),
            "linear": nn.Linear(16, 16),
        }
    ).double()
    weights = torch.randn(2, 16, 4, 4, dtype=torch.float64)

    def program(x):
        y = m["first"](m["conv"](x).flatten(2).transpose(1, 2)) + 1
        y = y + m["linear"](m["last"](y))
        return y.reshape(2, 4, 4, -1).permute(0, 3, 1, 2).contiguous()

    def run(function):
        m.zero_grad()
        y = function(torch.linspace(-1, 1, 2 * 3 * 256, dtype=torch.float64).sin().reshape(2, 3, 16, 16))
        (y * weights).sum().backward()
        return y, [p.grad.clone() for p in m.parameters()]

    assert_same(run(program), run(kiln.compile(program)))


def test_one_gradient_for_many_parameters():
    """Equal gradients are one value of the graph, and tensors of their own."""
    params = [torch.full((n,), 0.5, requires_grad=True) for n in (6, 6, 8, 8, 8)]

    def f(x):
        return x.flip(-1) + sum(p.sum() for p in params) * 0.01

    grads = []
    for function in (f, kiln.compile(f)):
        for p in params:
            p.grad = None
        function(torch.ones(5)).sum().backward()
        params[0].grad.mul_(2)
        grads.append([p.grad.clone() for p in params])
    assert_same(*grads)


class Averaged(torch.nn.Module):
    def __init__(self, features=6):
        super().__init__()
        self.scores = torch.nn.Linear(features, 1)
        self.register_buffer("mean", torch.zeros(features))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.scores((x - self.mean).tanh())


class WithViews(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scores = torch.nn.Linear(6, 1)

    def forward(self, x):
        return self.scores(x.tanh()), x.view(-1), x


DISCRIMINATORS = {
    "dropout": lambda n: n.Sequential(n.Linear(6, 16), n.LeakyReLU(0.2), n.Dropout(0.3), n.Linear(16, 1)),
    "batch norm": lambda n: n.Sequential(n.Linear(6, 16), n.BatchNorm1d(16), n.Tanh(), n.Linear(16, 1)),
    "images": lambda n: n.Sequential(
        n.Unflatten(1, (1, 2, 3)),
        n.Conv2d(1, 4, 3, padding=1),
        n.InstanceNorm2d(4, track_running_stats=True),
        n.SiLU(),
        n.Dropout2d(0.25),
        n.Flatten(),
        n.Linear(24, 1),
    ),
    "spectral norm": lambda n: n.Sequential(
        n.utils.parametrizations.spectral_norm(n.Linear(6, 16)), n.RReLU(), n.Linear(16, 1)
    ),
    "moving average": lambda n: Averaged(),
    "views": lambda n: WithViews(),
}


@pytest.mark.parametrize("name", DISCRIMINATORS)
def test_gradient_penalties_of_compiled_modules(name):
    """The penalty's gradient goes through the module's backward: random numbers and states are those of the call."""
    outcomes = []
    for compiled in (False, True):
        torch.manual_seed(0)
        module = DISCRIMINATORS[name](torch.nn)
        scores = kiln.compile(module) if compiled else module
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        steps = []
        for _ in range(3):
            x = torch.randn(8, 6).requires_grad_()
            out = scores(x)
            out = out[0] if isinstance(out, tuple) else out
            (g,) = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)
            loss = ((g.norm(2, dim=1) - 1) ** 2).mean() + out.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps.append([loss.detach(), torch.rand(2)])
        outcomes.append([steps, list(module.state_dict().values())])
    assert_same(*outcomes, rtol=1e-4, atol=1e-5)


def test_a_second_gradient_of_what_keeps_a_large_state_is_refused():
    module = Averaged(features=300_000)
    x = torch.randn(2, 300_000, requires_grad=True)
    out = kiln.compile(module)(x).sum()
    with pytest.raises(RuntimeError, match="too large to keep; it cannot be differentiated twice"):
        torch.autograd.grad(out, x, create_graph=True)


@pytest.mark.parametrize("zeros", [0, 1, 2])
@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.cumprod(1),
        lambda x: torch.cat([torch.ones(3, 1), x], 1).cumprod(-1)[:, :-1],
        lambda x: x.prod(),
        lambda x: x.prod(1),
        lambda x: x.max(),
        lambda x: x.median(),
    ],
)
def test_gradients_whose_formulas_ask_for_data(f, zeros):
    """Whether there are zeros, or NaNs, among the numbers."""

    def step(x):
        y = f(x)
        (g,) = torch.autograd.grad((y * y.detach().cos()).sum(), x)
        return y.detach(), g

    torch.manual_seed(0)
    x = torch.randn(3, 5)
    x[0, :zeros] = 0
    x[2, 5 - zeros :] = 0
    kiln.reset()
    assert kiln.explain(step)(x.clone().requires_grad_()).graph_break_count == 0
    compiled = kiln.compile(step)
    assert_same(step(x.clone().requires_grad_()), compiled(x.clone().requires_grad_()), rtol=1e-5, atol=1e-6)


def scaled_by_numbers(x):
    return x.exp() * torch.tensor([1.0, 2.0, 3.0, 4.0])


def at_places(x):
    return x.exp()[torch.tensor([1, 2])]


def gradient_inside(x):
    return torch.autograd.grad((x * 2).exp().sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("f", [scaled_by_numbers, at_places, gradient_inside])
def test_a_second_gradient_of_what_makes_tensors_of_numbers(f):
    def twice(f):
        x = torch.full((4, 4), 0.5, requires_grad=True)
        (g,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        return torch.autograd.grad(g.sum(), x)

    assert_same(twice(kiln.compile(f)), twice(f), rtol=1e-5)


@pytest.mark.parametrize(
    "f", [scaled_by_numbers, gradient_inside, lambda x: torch.dropout(x.exp(), 0.5, True) * torch.rand(4)]
)
@pytest.mark.parametrize("by", ["is_grads_batched", "vmap"])
def test_many_gradients_at_once(f, by):
    """What was drawn in the forward is not drawn again."""

    def many(f):
        torch.manual_seed(3)
        x = torch.full((4, 4), 0.5, requires_grad=True)
        y = f(x)
        many_of = torch.arange(2.0 * y.numel()).reshape(2, *y.shape)
        if by == "vmap":
            g = torch.func.vmap(lambda v: torch.autograd.grad(y, x, v, retain_graph=True)[0])(many_of)
        else:
            (g,) = torch.autograd.grad(y, x, many_of, is_grads_batched=True)
        return y, g, torch.rand(2)

    assert_same(many(kiln.compile(f)), many(f), rtol=1e-5)


class Wrapped(torch.Tensor):
    """A tensor without memory around another one."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, strides=inner.stride())
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def unwrap(t):
            return t.inner if isinstance(t, cls) else t

        def wrap(t):
            return cls(t) if isinstance(t, torch.Tensor) else t

        results = function(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))
        return tree_map(wrap, results)


@pytest.mark.parametrize("kind", ["wrapped", "sparse", "zeros"])
@pytest.mark.parametrize("f", [lambda x: x * 2, lambda x: (x * x).sin()])
def test_gradients_that_only_operators_know(kind, f):
    make = {
        "wrapped": lambda: Wrapped(torch.arange(4.0)),
        "sparse": lambda: torch.arange(4.0).to_sparse(),
        "zeros": lambda: torch._efficientzerotensor(4),
    }[kind]
    plain = {"wrapped": lambda t: t.inner, "sparse": lambda t: t.to_dense(), "zeros": lambda t: t + 0}[kind]

    def gradient(f):
        x = torch.ones(4, requires_grad=True)
        (g,) = torch.autograd.grad([f(x)], [x], [make()])
        return type(g).__name__, g.layout, plain(g)

    assert_same(gradient(kiln.compile(f)), gradient(f))


def test_many_gradients_at_once_pass_through_convolutions():
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)).eval()
    x = torch.randn(2, 3, 8, 8)
    want = torch.autograd.functional.jacobian(net, x, vectorize=True)
    torch.testing.assert_close(torch.autograd.functional.jacobian(kiln.compile(net), x, vectorize=True), want)
    x.requires_grad_()
    y, other = kiln.compile(net)(x), net(x)
    grads = torch.randn(3, *y.shape)
    (got,) = torch.autograd.grad(y, x, grads, is_grads_batched=True)
    (want,) = torch.autograd.grad(other, x, grads, is_grads_batched=True)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
