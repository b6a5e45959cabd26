"""PyTorch's higher-order operators: what they do is captured as the plain Python that says the same."""

import pytest
import torch
import torch.utils.checkpoint
from torch._higher_order_ops import associative_scan, scan
from torch._higher_order_ops import map as map_rows
from torch._higher_order_ops.foreach_map import foreach_map
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import kiln
from helpers import breaks, check, graphs, training_step
from kiln.testing import assert_same

X = torch.linspace(-1, 2, 20).reshape(5, 4)


def branches(x):
    y = torch.cond(x.sum() > 0, lambda x, w: (x * w).sin(), lambda x, w: x.cos() * w, (x * 2, torch.tensor(3.0)))
    return y + 1


@pytest.mark.parametrize("grad", [False, True])
def test_cond_takes_the_branch_of_each_call(grad):
    compiled = kiln.compile(branches)
    for sign in (1, -1, 1, 1, -1, -1, 1):
        x, y = ((X * sign).requires_grad_(grad) for _ in range(2))
        out, expected = compiled(x), branches(y)
        assert_same(out, expected)
        if grad:
            out.square().sum().backward()
            expected.square().sum().backward()
            assert_same(x.grad, y.grad)


def test_cond_of_a_number_is_no_branch_of_the_data():
    def f(x):
        return torch.cond(x.shape[0] > 3, lambda x: x.sin(), lambda x: x.cos(), (x,))

    assert graphs(f, X) == 1
    check(f, X, fullgraph=True)
    check(f, X[:2], fullgraph=True)


def test_cond_under_vmap_takes_the_branch_of_each_lane():
    def of(condition):
        return lambda x: torch.vmap(lambda x: torch.cond(condition(x), torch.sin, torch.cos, (x,)))(x)

    for condition in (lambda x: x.sum() > 2, lambda x: x[:1] > 0, lambda x: torch.tensor(True)):
        check(of(condition), X, fullgraph=True)


def test_cond_refuses_several_conditions():
    def f(x):
        return torch.cond(x > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    for g in (f, kiln.compile(f)):
        with pytest.raises(RuntimeError):
            g(X)


def test_cond_in_a_layer_below_a_break():
    class Gate(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x):
            print(end="")
            return torch.cond(x.mean() > 0, lambda x: self.a(x).relu(), lambda x: self.b(x), (x,))

    net = Gate()
    with torch.no_grad():
        for x in (X, -X, X - 0.4):
            assert_same(kiln.compile(net)(x), net(x))


class Branching(torch.nn.Module):
    def __init__(self, kind="layers"):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.a, self.b = kind, torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        first, second = self.branches()
        return torch.cond(x.sum() > 0, first, second, (x,)) * 2

    def branches(self):
        if self.kind == "layers":
            return lambda x: self.a(x).relu(), lambda x: self.b(x).tanh()
        if self.kind == "one layer":
            return lambda x: self.a(x), lambda x: x.clone()
        if self.kind == "infinite derivatives":  # where x.sum() is not positive
            return lambda x: (x - x.detach()).sqrt() * self.a.weight[0], lambda x: x * self.b.weight[0]
        inner = torch.cond, lambda x: x.sin() * self.a.bias, lambda x: self.b(x)
        return lambda x: inner[0](x[0, 0] > 0, inner[1], inner[2], (x,)), lambda x: x.exp() * self.b.bias


@pytest.mark.parametrize("kind", ["layers", "one layer", "infinite derivatives", "nested"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_gradients_of_both_branches(kind, dynamic):
    """PyTorch gives what the branch that was not taken reads gradients of zero, not none."""
    net = Branching(kind)
    compiled = kiln.compile(net, fullgraph=True, dynamic=dynamic)
    for x in (X, -X, X[:3] - 0.1, -X[:3]):
        if kind == "infinite derivatives" and x.sum() > 0:
            continue
        results = []
        for call in (net, compiled):
            net.zero_grad()
            given = x.clone().requires_grad_()
            out = call(given)
            out.square().sum().backward()
            results.append((out, [t.grad for t in (given, *net.parameters())]))
        assert_same(results[0], results[1], rtol=1e-5, atol=1e-5)
        assert all(g is not None and g.isfinite().all() for g in results[1][1][:1])


def test_a_whole_step_through_cond():
    results = []
    for compile in (lambda f: f, lambda f: kiln.compile(f, fullgraph=True)):
        net = Branching()
        opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

        step = compile(training_step(net, opt))
        results.append(([step(x) for x in (X, -X, X, X, -X)], list(net.parameters())))
    assert_same(results[0], results[1], rtol=1e-5, atol=1e-5)


def test_branches_of_a_checkpointed_call():
    net = Branching()

    def f(x):
        return torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False).sin()

    for x in (X, -X):
        check(f, x.clone().requires_grad_(), fullgraph=True, rtol=1e-5, atol=1e-5)


def test_an_expensive_branch_is_left_out_without_gradients():
    net, x = Branching(), X
    with torch.no_grad():
        assert breaks(net, x) == 1
        for given in (x, -x, x):
            assert_same(kiln.compile(net)(given), net(given))
            check(net, given, fullgraph=True, rtol=1e-5, atol=1e-5)
        assert breaks(Branching("nested"), x) == 1  # the inner one has a layer
        assert breaks(lambda x: torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x + 1, (x,)), x) == 0


def test_branches_with_effects_are_run_one_by_one():
    def draws(x):
        return torch.cond(x.sum() > 0, lambda x: x + torch.rand(4), lambda x: x * 1, (x,)) + torch.rand(4)

    assert breaks(draws, X) == 1
    for x in (X, -X):
        torch.manual_seed(1)
        expected = x * 1 if x.sum() <= 0 else x + torch.rand(4)
        expected = expected + torch.rand(4)
        torch.manual_seed(1)
        assert_same(kiln.compile(draws)(x), expected)


def test_results_of_cond_that_differ():
    def f(x):
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x[:1].clone(), (x,))

    with pytest.raises(kiln.exc.GraphBreakError, match="branch on the value of a tensor"):
        kiln.compile(f, fullgraph=True)(X)


@pytest.mark.parametrize("lists", [2, 1, 0])
def test_foreach_map(lists):
    def f(xs, ys):
        given = {2: (xs, ys), 1: (xs, 2.0), 0: (xs[0], ys[0])}[lists]
        return foreach_map(torch.add, *given)

    xs, ys = [X, X[0]], (X * 2, X[1])
    expected = {2: [X * 3, X[0] + X[1]], 1: [X + 2, X[0] + 2], 0: X * 3}[lists]
    assert_same(kiln.compile(f, fullgraph=True)(xs, ys), expected)


def test_regions_are_captured_with_what_is_around_them():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        @torch.compiler.nested_compile_region
        def forward(self, x):
            return self.linear(x).relu()

    net = torch.nn.Sequential(Layer(), Layer())
    assert graphs(net, X) == 1
    check(net, X, fullgraph=True, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("times", [0, 1, 3])
def test_while_loop(times):
    def f(x):
        def body(i, state):
            return i + 1, {"x": state["x"] * 2 + i}

        i, state = torch.while_loop(lambda i, state: i < times, body, (torch.tensor(0), {"x": x}))
        return i, state["x"] + 1

    i, x = kiln.compile(f)(X)
    expected = X
    for k in range(times):
        expected = expected * 2 + k
    assert int(i) == times
    assert_same(x, expected + 1)


LOOPS = {
    "map": lambda x: map_rows(lambda row, w: row * w.sum(), x, torch.tensor([1.0, 2.0])),
    "map of trees": lambda x: map_rows(lambda rows: {"sum": rows[0] + rows[1]}, (x, x.exp()))["sum"],
    "scan": lambda x: scan(lambda c, row: (c + row, (c * row).clone()), torch.zeros(4), x),
    "scan of trees": lambda x: scan(
        lambda c, col: ({"a": c["a"] * 0.5 + col}, c["a"].clone()), {"a": torch.zeros(5)}, x, dim=1, reverse=True
    ),
    "associative_scan": lambda x: associative_scan(lambda a, b: a * b, x, 0, combine_mode="generic"),
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("grad", [False, True])
def test_loops_over_rows(loop, grad):
    f = LOOPS[loop]
    x, y = (X.clone().requires_grad_(grad) for _ in range(2))
    out, expected = kiln.compile(f, fullgraph=True)(x), f(y)
    assert_same(out, expected)
    if grad:
        for result in (out, expected):
            sum(t.sum() for t in torch.utils._pytree.tree_leaves(result)).backward()
        assert_same(x.grad, y.grad)


Q, K, V = (torch.randn(2, 4, 32, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
SLOPES = torch.tensor([1.0, 0.5, 0.25, 0.125])
CAUSAL = create_block_mask(lambda b, h, i, j: i >= j, None, None, 32, 32, device="cpu", BLOCK_SIZE=16)
LATE = create_block_mask(lambda b, h, i, j: (i > 7) & (i >= j), None, None, 32, 32, device="cpu", BLOCK_SIZE=16)

ATTENTION = {
    "plain": lambda q, k, v: flex_attention(q, k, v),
    "scored": lambda q, k, v: flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + SLOPES[h] * (j - i)),
    "masked": lambda q, k, v: flex_attention(q, k, v, block_mask=CAUSAL),
    "rows without a key": lambda q, k, v: flex_attention(q, k, v, block_mask=LATE, return_aux=AuxRequest(lse=True)),
    "fewer heads of keys": lambda q, k, v: flex_attention(q, k[:, :2], v[:, :2], enable_gqa=True, scale=0.5),
    "other layout": lambda q, k, v: flex_attention(q.transpose(1, 2).contiguous().transpose(1, 2), k, v),
    "bfloat16": lambda q, k, v: flex_attention(q.bfloat16(), k.bfloat16(), v.bfloat16()),
}


@pytest.mark.filterwarnings("ignore:.*flex_attention called without")
@pytest.mark.parametrize("case", ATTENTION)
def test_flex_attention(case):
    f = ATTENTION[case]
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if case == "bfloat16" else {}
    assert_same(kiln.compile(f, fullgraph=True)(Q, K, V), f(Q, K, V), **tolerance)
