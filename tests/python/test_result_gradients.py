"""Gradients of the results themselves: what a caller sees of a result from which other results are computed."""

import pytest
import torch
from torch import nn

import kiln
from kiln.testing import assert_same


class Net(nn.Module):
    """Features, what is made of them, and a loss of both."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.head = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x):
        features = torch.relu(self.norm(self.conv(x)))
        logits = self.head(features.mean((2, 3)))
        loss = logits.logsumexp(1).mean() + features.square().mean()
        return features, logits, loss


class Chain(nn.Module):
    """Each result is made of the one before."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x):
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1]).tanh() + states[-1])
        return tuple(states[1:])


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x):
        a = self.w * x
        return a, (a * 3).sum()


class Coder(nn.Module):
    """Two results are halves of a tensor that is none, and the third is made of them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encode, self.decode = nn.Linear(3, 4), nn.Linear(2, 3)

    def forward(self, x):
        mean, scale = self.encode(x).chunk(2, 1)
        return mean, scale, self.decode(mean + scale.exp() * 0.5)


class Views(nn.Module):
    """Views of the input, of another result, and of each other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        rows = x.flatten().view(2, 1, 3)
        hidden = self.layer(rows[:, 0]).tanh()
        first = hidden[0]
        part = first[1:]
        return rows, hidden, first, part, hidden.sum(0), part.exp() * rows.sum()


IMAGES = torch.linspace(-1, 1, 2 * 2 * 5 * 5).reshape(2, 2, 5, 5)
ROWS = torch.linspace(-1, 1, 6).reshape(2, 3)
NETS = {
    "plain": (Plain, ROWS),
    "chain": (Chain, ROWS),
    "net": (Net, IMAGES),
    "coder": (Coder, ROWS),
    "views": (Views, ROWS),
}


def both(name, use):
    """What `use(module, x)` gives in eager and compiled, with the parameters' gradients."""
    seen = []
    for compiled in (False, True):
        make, x = NETS[name]
        module = make()
        x = x.clone().requires_grad_()
        returned = use(kiln.compile(module) if compiled else module, x)
        seen.append((returned, x.grad, {k: p.grad for k, p in module.named_parameters()}))
    return seen


def total(results):
    return sum(r.sum() for r in results)


@pytest.mark.parametrize("which", ["first", "all", "last"])
@pytest.mark.parametrize("name", NETS)
def test_retained_gradients(name, which):
    def use(module, x):
        kept = []
        for _ in range(2):
            results = module(x)
            watched = {"first": results[:1], "all": results, "last": results[-1:]}[which]
            for r in watched:
                r.retain_grad()
            total(results).backward()
            kept += [r.grad for r in watched]
        return kept

    assert_same(*both(name, use))


@pytest.mark.parametrize("name", NETS)
def test_results_that_only_others_reach(name):
    """Class activation maps: the gradient of one result by another, which alone is differentiated."""

    def use(module, x):
        results = module(x)
        results[0].retain_grad()
        results[-1].sum().backward()
        return results[0].grad

    eager, compiled = both(name, use)
    assert eager[0] is not None
    assert_same(eager, compiled)


@pytest.mark.parametrize("name", NETS)
def test_hooks_see_and_change_the_whole_gradient(name):
    def use(module, x):
        results = module(x)
        seen = []

        def double(g):
            seen.append(g.clone())
            return g * 2

        handle = results[0].register_hook(double)
        total(results).backward(retain_graph=True)
        handle.remove()
        total(results).backward()
        return seen

    assert_same(*both(name, use))


@pytest.mark.parametrize("name", NETS)
def test_hooks_of_nodes(name):
    def use(module, x):
        results = module(x)
        seen = []
        results[0].grad_fn.register_prehook(lambda grads: seen.append(grads[0]))
        total(results).backward()
        return seen

    assert_same(*both(name, use))


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("name", ["plain", "chain", "coder", "views"])
def test_gradient_of_a_result_by_another(name, create_graph):
    def use(module, x):
        results = module(x)
        made = []
        for i in range(len(results) - 1):
            made += torch.autograd.grad(
                results[-1].sum(), results[: i + 1], retain_graph=True, create_graph=create_graph, allow_unused=True
            )
        made += torch.autograd.grad(total(results), [results[0], x, *module.parameters()], create_graph=create_graph)
        return made

    assert_same(*both(name, use))


def test_second_derivatives_through_a_changed_gradient():
    def use(module, x):
        results = module(x)
        handle = results[1].register_hook(lambda g: g.sin())
        (dx,) = torch.autograd.grad(total(results), x, create_graph=True)
        handle.remove()
        dx.square().sum().backward()
        return dx

    assert_same(*both("chain", use))


def test_a_gradient_handed_on_by_hand():
    """What pipelines do: the later part first, then the earlier part with the gradient in between."""

    def use(module, x):
        results = module(x)
        (g,) = torch.autograd.grad(results[-1].sum(), results[0], retain_graph=True)
        results[0].backward(g)
        return g

    for name in NETS:
        assert_same(*both(name, use))


def test_results_changed_in_place_keep_their_history():
    def use(module, x):
        a, b = module(x)
        a.mul_(2)
        a.retain_grad()
        (a.sum() + b).backward()
        return a.grad

    assert_same(*both("plain", use))


def test_unobserved_results_share_one_backward():
    """No gradient is made apart where nobody looks: one backward graph is compiled."""
    graphs = []

    def backward_compiler(gm, inputs):
        graphs.append(gm)
        return gm.forward

    def backend(gm, inputs):
        from kiln.aot import aot_module_simplified, make_boxed_func

        return aot_module_simplified(
            gm, inputs, fw_compiler=lambda g, i: make_boxed_func(g.forward), bw_compiler=backward_compiler
        )

    module = Chain()
    results = kiln.compile(module, backend=backend)(ROWS.clone().requires_grad_())
    total(results).backward(retain_graph=True)
    assert len(graphs) == 1
    results[0].retain_grad()
    total(results).backward()
    assert len(graphs) > 1


@pytest.mark.parametrize("inner", [False, True])
def test_what_no_result_depends_on_sees_no_backward(inner):
    """Not even with zeros: hooks behind an input that is only read in no_grad stay silent, and its gradient is None."""

    class Detached(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            if inner:
                x = self.head(x)
            with torch.no_grad():
                x = x + 1
            return self.head(self.body(x))

    seen = []
    for wrap in (lambda net: net, kiln.compile):
        net, calls = Detached(), []
        net.head.register_full_backward_hook(lambda m, grads, outputs, calls=calls: calls.append(len(grads)))
        module, x = wrap(net), ROWS[:, :3].clone().requires_grad_()
        module(module(x)).sum().backward()
        seen.append((calls, x.grad, net.head.weight.grad))
    assert seen[0][1] is None
    assert_same(*seen)


class Heads(nn.Module):
    """Results that depend on some of the parameters each."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.left, self.right = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, y):
        x = self.body(x).tanh()
        return self.left(x), self.right(x * y), y.exp()


USES = {
    "left": lambda net, x, y: net(x, y)[0].sum().backward(),
    "right": lambda net, x, y: net(x, y)[1].sum().backward(),
    "last": lambda net, x, y: net(x, y)[2].sum().backward(),
    "all": lambda net, x, y: sum(r.sum() for r in net(x, y)).backward(),
    "left of two calls": lambda net, x, y: (net(x, y)[0].sum() + net(y, x)[0].sum()).backward(),
    "left, then right": lambda net, x, y: (net(x, y)[0].sum() + net(y, x)[1].sum()).backward(),
    "of each other": lambda net, x, y: net(net(x, y)[2], net(x, y)[0])[1].sum().backward(),
    "used outside before": lambda net, x, y: (net.right(y).sum() + net(x, y)[0].sum()).backward(),
    "used outside after": lambda net, x, y: (net(x, y)[0] @ net.right(y).T + net.right.weight.sum()).sum().backward(),
    "some inputs": lambda net, x, y: net(x, y)[0].sum().backward(inputs=[net.left.weight, x]),
    "grad": lambda net, x, y: torch.autograd.grad(net(x, y)[0].sum(), [x, y, net.right.bias], allow_unused=True),
    "grad of what is not there": lambda net, x, y: torch.autograd.grad(net(x, y)[0].sum(), [net.right.bias]),
}


def twice(net, x, y):
    results = net(x, y)
    results[0].sum().backward(retain_graph=True)
    results[1].sum().backward(retain_graph=True)
    results[0].sum().backward()


@pytest.mark.parametrize("use", [*USES.values(), twice], ids=[*USES, "twice"])
@pytest.mark.parametrize("outside", [False, True])
def test_hooks_see_only_gradients_that_are_there(use, outside):
    """A hook on what the differentiated results do not depend on is not called, as in eager; with None it would fail."""
    seen = []
    for wrap in (lambda net: net, kiln.compile):
        net, calls = Heads(), []
        for name, p in net.named_parameters():
            p.register_hook(lambda g, name=name, calls=calls: (calls.append(name), g * 2)[1])
        leaves = [ROWS[:, :3].clone().requires_grad_() for _ in range(2)]
        x, y = leaves
        if outside:
            x, y = x * 1.5, y.sin()
        for name, t in (("x", x), ("y", y)):
            t.register_hook(lambda g, name=name, calls=calls: (calls.append(name), g + 1)[1])
        try:
            got = use(wrap(net), x, y)
        except RuntimeError as e:
            got = str(e).split(".")[0]
        seen.append((got, sorted(calls), [t.grad for t in leaves], [p.grad for p in net.parameters()]))
    assert_same(*seen)


def test_an_error_in_a_hook_leaves_the_graph_whole():
    """What got no gradient in the backward that failed gets its own in the next one."""

    def fail(g):
        raise ValueError("once")

    seen = []
    for wrap in (lambda net: net, kiln.compile):
        net = Heads()
        left, right, _ = wrap(net)(ROWS[:, :3], ROWS[:, :3] + 1)
        handle = net.left.bias.register_hook(fail)
        with pytest.raises(ValueError, match="once"):
            left.sum().backward(retain_graph=True)
        handle.remove()
        net.zero_grad()
        (left + right).sum().backward()
        seen.append([p.grad for p in net.parameters()])
    assert_same(*seen)


@pytest.mark.parametrize(
    "body",
    [
        lambda x, w: (x @ w).abs().sum(),
        lambda x, w: (x @ w).sgn().mul(x).sum(),
        lambda x, w: torch.nn.functional.l1_loss(x.view(2, 2).reshape(4) @ w, torch.ones(4)),
        lambda x, w: ((x @ w).abs().view(2, 2) @ w[:2]).abs().mean(),
    ],
    ids=["abs", "sgn", "l1_loss", "twice"],
)
def test_gradients_through_tensors_that_are_zero_without_memory(body):
    # The derivative of sgn() is such a tensor, and views of it took a functional tensor for a plain one.
    def step(x, w):
        (g,) = torch.autograd.grad(body(x, w), x, create_graph=True)
        (g.pow(2).sum() + body(x, w)).backward()
        return g.detach()

    found = []
    for f in (step, kiln.compile(step, fullgraph=True)):
        torch.manual_seed(0)
        x, w = torch.randn(4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
        found.append([f(x, w), x.grad, w.grad])
    for e, k in zip(*found, strict=True):
        torch.testing.assert_close(k, e)


def apart(a, b):
    return a.sin(), b.exp(), (b * a).cos()


def test_hooks_are_called_for_gradients_that_there_are():
    """In eager each result has a graph of its own: nothing arrives at one that is not differentiated."""
    seen = []
    for f in (apart, kiln.compile(apart)):
        log = []
        a, b = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0, 4.0], requires_grad=True)
        results = f(a, b)
        for number, t in enumerate(results):
            t.register_hook(lambda g, number=number: log.append((number, g.sum())))
        results[1].sum().backward(retain_graph=True)
        (results[0] + results[2]).sum().backward(retain_graph=True)
        sum(t.sum() for t in results).backward()  # the last that was made is the first
        seen.append([log, a.grad, b.grad])
    assert [number for number, _ in seen[0][0]] == [1, 2, 0, 2, 1, 0]
    assert_same(*seen)


def test_what_a_gradient_of_one_input_leaves():
    seen = []
    for f in (apart, kiln.compile(apart)):
        a, b = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0, 4.0], requires_grad=True)
        s, e, _ = f(a, b)
        (ga,) = torch.autograd.grad((s * e).sum(), a)  # does not go through e
        e.sum().backward()
        seen.append([ga, a.grad, b.grad])
    assert_same(*seen)


def test_gradients_of_freed_results():
    def f(a, b):
        x, y = a.sin(), b * 3
        x.exp().sum().backward()
        return x, y + x.detach()

    for wrapped in (f, kiln.compile(f)):
        a, b = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0, 4.0], requires_grad=True)
        x, y = wrapped(a, b)
        assert torch.autograd.grad(x.sum(), b, allow_unused=True) == (None,)
        with pytest.raises(RuntimeError, match="a second time"):
            torch.autograd.grad(x.sum(), a, allow_unused=True)
        assert torch.equal(torch.autograd.grad(y.sum(), b)[0], torch.tensor([3.0, 3.0]))


@pytest.mark.parametrize("grad", [True, False])
def test_second_derivatives_where_an_input_is_written(grad):
    """Of what it was before: through the write, which autograd does not see, the gradient reaches the input itself."""

    def f(a, b):
        x = a * 2
        (g,) = torch.autograd.grad((x * b).sin().sum(), b, create_graph=True)
        with torch.no_grad():
            a.mul_(0.5)
            b.add_(1)
        return x, g

    seen = []
    for wrapped in (f, kiln.compile(f)):
        a, b = torch.tensor([1.0, 2.0], requires_grad=grad), torch.tensor([3.0, 4.0], requires_grad=True)
        x, g = wrapped(a, b)
        results = [x, g.detach()]
        if grad:
            (first,) = torch.autograd.grad(x.sin().sum(), a, create_graph=True)
            first.square().sum().backward()
            results += [first.detach(), a.grad]
        seen.append([*[t.detach() for t in results], a.detach(), b.detach()])
    assert_same(*seen)


def test_second_derivatives_where_another_input_changed():
    seen = []
    for f in (apart, kiln.compile(apart)):
        a, b = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0, 4.0], requires_grad=True)
        s, _, _ = f(a, b)
        with torch.no_grad():
            b.zero_()
        (first,) = torch.autograd.grad(s.square().sum(), a, create_graph=True)
        first.square().sum().backward()
        seen.append([first.detach(), a.grad])
    assert_same(*seen)


def test_hooks_that_a_second_differentiation_would_pass_by():
    def f(a):
        x = a.tanh()
        return x, x.pow(3)

    for g in (f, kiln.compile(f)):
        a = torch.tensor([0.5, 1.0], requires_grad=True)
        x, y = g(a)
        x.register_hook(lambda g: g.clamp(-1, 1))
        (first,) = torch.autograd.grad((x + y).sin().sum(), a, create_graph=True)
        if g is f:
            first.square().sum().backward()
        else:
            with pytest.raises(RuntimeError, match="there are hooks on a result"):
                first.square().sum().backward()


def written(x, y):
    kiln.graph_break()
    x.mul_(y)
    loss = x.logsumexp((0, 1))
    kiln.graph_break()
    return x, loss


def written_view(x, y):
    rows = x[1]
    kiln.graph_break()
    rows.mul_(y[0])
    loss = (rows.sin() * rows).sum()
    kiln.graph_break()
    return x, rows, loss


def view_of_what_is_written(x, y):
    kiln.graph_break()
    x[0] *= y[1]
    row = x[0]
    loss = row.sin().sum()
    kiln.graph_break()
    return x, row, loss


WRITES = [written, written_view, view_of_what_is_written]


def asked(results):
    return torch.autograd.grad(results[-1], results[:-1])


def observed(results):
    for r in results[:-1]:
        r.register_hook(lambda g: g * 3)
        r.retain_grad()
    results[-1].backward()
    return [r.grad for r in results[:-1]]


def backward(results):
    results[-1].backward()


@pytest.mark.parametrize("use", [asked, observed, backward])
@pytest.mark.parametrize("leaf", ["x", "y", "both"])
@pytest.mark.parametrize("f", WRITES)
def test_results_of_what_is_written_in_place(f, leaf, use):
    """An argument has a new value, from which a result is computed: the gradient passes by the argument."""
    seen = []
    for g in (f, kiln.compile(f)):
        x, y = ROWS.clone(), ROWS.clone() + 2
        x.requires_grad_(leaf != "y")
        y.requires_grad_(leaf != "x")
        start = x * 2
        if start.requires_grad:
            start.retain_grad()  # moves on to the new value
        results = g(start, y)
        seen.append((use(results), x.grad, y.grad, start.grad if start.retains_grad else None))
    assert_same(*seen)


def two_losses(x, y):
    x, y = x * 2, y * 3
    kiln.graph_break()
    y = y + x.sin()
    x = x[0] * 2
    kiln.graph_break()
    return x.sum(), y.sum()


@pytest.mark.parametrize("accumulate", [False, True])
def test_what_is_not_on_the_way_is_not_used_up(accumulate):
    """The inputs that are asked for decide, in eager, which parts of the graph run and are freed."""
    seen = []
    for g in (two_losses, kiln.compile(two_losses)):
        x, y = (ROWS.clone().requires_grad_() for _ in range(2))
        first, second = g(x, y)
        if accumulate:
            second.backward(inputs=[y])
            first.backward(inputs=[x])
            seen.append((x.grad, y.grad))
        else:
            grads = [torch.autograd.grad(first, [y], allow_unused=True)]
            grads.append(torch.autograd.grad(second, [y]))
            grads.append(torch.autograd.grad(first, [x]))
            seen.append(grads)
    assert_same(*seen)


def freed_by_itself(x, y):
    z = x * y
    z.sin().sum().backward()
    rows, double = x.view(3, 2), z * 2
    row = double[0]
    return rows, double, row, (row * double * rows.view(2, 3)).sum()


@pytest.mark.parametrize("which", range(3))
def test_a_freed_way_is_no_missing_way(which):
    """Eager frees less, and has a gradient; None would say that there is none."""
    x, y = (ROWS.clone().requires_grad_() for _ in range(2))
    results = kiln.compile(freed_by_itself)(x, y)
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(results[-1], results[which], allow_unused=True)
