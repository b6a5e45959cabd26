"""torch.autograd.Function in compiled code: outputs, gradients, errors and effects are eager's, and the usual ones are one graph."""

import pytest
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import kiln
from kiln.testing import assert_same, difference


class Square(Function):
    @staticmethod
    def forward(ctx, x, scale=3.0):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return scale * x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * ctx.scale * g * x, None


class OldName(Function):
    """Of a time when they were called variables."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, g):
        s = torch.sigmoid(ctx.saved_variables[0])
        return g * s * (1 + ctx.saved_variables[0] * (1 - s))


class Product(Function):
    """Saves an output; has setup_context, an integer output, and looks at needs_input_grad."""

    @staticmethod
    def forward(a, b):
        return a * b, a.exp(), (a > b).sum()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(ctx, g, ge, gc):
        a, b, e = ctx.saved_tensors
        return g * b + ge * e, g * a if ctx.needs_input_grad[1] else None


class StraightThrough(Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-0.5, 0.5)


class Plain(Function):
    @staticmethod
    def forward(ctx, x):
        sign = x.sign()
        ctx.mark_non_differentiable(sign)
        ctx.save_for_backward(sign)
        return x.abs(), sign

    @staticmethod
    def backward(ctx, g, gs):
        return g * ctx.saved_tensors[0] + gs


class Once(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].cos()


class Mixed(Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g


class Random(Function):
    @staticmethod
    def forward(ctx, x):
        return x * torch.rand_like(x)

    @staticmethod
    def backward(ctx, g):
        return g + torch.rand_like(g)


class Identity(Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        return -g


class View(Function):
    @staticmethod
    def forward(ctx, x):
        return x.view(-1)

    @staticmethod
    def backward(ctx, g):
        return g.view(3, 4) * 2


class OwnView(Function):
    """Gives a view of a tensor that nobody else sees."""

    @staticmethod
    def forward(ctx, x):
        return (x.t() * 2).t()[:, :4]

    @staticmethod
    def backward(ctx, g):
        return g * 7


class Pair(Function):
    @staticmethod
    def forward(ctx, x, y):
        return x, y

    @staticmethod
    def backward(ctx, a, b):
        return a * 2, b * 3


class Detached(Function):
    @staticmethod
    def forward(ctx, x):
        return x.detach()

    @staticmethod
    def backward(ctx, g):
        return g * -2


class Twice(Function):
    @staticmethod
    def forward(ctx, x):
        y = x * 2
        return y, y.detach()

    @staticmethod
    def backward(ctx, a, b):
        return a * 3 + b * 5


class WritesThroughAView(Function):
    @staticmethod
    def forward(ctx, x, count):
        ctx.save_for_backward(count)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        ctx.saved_tensors[0].view(-1).add_(1)
        return g * 2, None


class Dirty(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, g):
        return g * 2


class NoZeros(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, a, b):
        return (0 if a is None else a * 2) + (0 if b is None else b * 3)


def relu_after(x, w):
    return torch.relu(Square.apply(x @ w)) + Square.apply(x, 0.5)


def unused_output(x, w):
    product, exponential, count = Product.apply(x, w.t()[:3])
    return product.sum() * count


def both_outputs(x, w):
    product, exponential, count = Product.apply(x, w[:3])
    return product + exponential * 2


def no_gradient_for_one(x, w):
    return Product.apply(x, w[:3].detach())[0]


def in_a_module(x, w):
    class Layer(torch.nn.Module):
        def forward(self, x):
            return Once.apply(StraightThrough.apply(x * 3))

    return Layer()(x) @ w


def non_differentiable(x, w):
    a, sign = Plain.apply(x @ w)
    return a * sign


def under_autocast(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return Mixed.apply(x, w).float()


def random(x, w):
    return Random.apply(x @ w) * torch.rand(4)


def scaled_by(weight):
    class Scaled(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g @ weight

    return Scaled


Scaled = scaled_by(torch.arange(16.0).view(4, 4))


def tensor_that_only_the_backward_reads(x, w):
    return Scaled.apply(x @ w)


def of_saved_variables(x, w):
    return OldName.apply(x @ w)


def reverses_gradients(x, w):
    return torch.relu(Identity.apply(x * 2) @ w) + Identity.apply(w)[:3]


def view_of_an_intermediate(x, w):
    return View.apply(x @ w).exp()


def view_of_an_input(x, w):
    return View.apply(x).exp() * w.sum()


def view_of_its_own(x, w):
    return OwnView.apply(x @ w) * 2


def view_whose_base_is_written(x, w):
    y = x * 1
    z = Identity.apply(y) * w[:3]
    with torch.no_grad():
        y += 1
    return z + Identity.apply(y)


def returns_a_view(x, w):
    return View.apply(x @ w * 2)


ONE_GRAPH = [returns_a_view, reverses_gradients, view_of_an_intermediate, view_of_an_input, view_of_its_own, relu_after, unused_output, both_outputs, no_gradient_for_one, in_a_module, non_differentiable, under_autocast, random,
             tensor_that_only_the_backward_reads, of_saved_variables]  # fmt: skip


def returns_an_input_itself(x, w):
    return Identity.apply(x)


def returns_memory_of_its_input(x, w):
    return Detached.apply(x)


def returns_memory_of_another_tensor(x, w):
    y = x @ w
    return Detached.apply(y), y


def returns_memory_twice(x, w):
    return Twice.apply(x @ w)[1]


def returns_a_view_of_its_view(x, w):
    return View.apply(x * 2)[2:5]


def returns_two_inputs(x, w):
    a, b = Pair.apply(x, w[:3])
    return a.exp() * b


def writes_to_a_view(x, w):
    y = Identity.apply(x * 2)
    y += 1
    return y


def changes_its_input(x, w):
    return Dirty.apply(x * 1) @ w


def gradients_that_are_none(x, w):
    return NoZeros.apply(x @ w)[1]


def by_keyword(x, w):
    return Square.apply(x, scale=2.0)


def run(f, seed, how):
    torch.manual_seed(seed)
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    torch.manual_seed(seed)
    try:
        if how == "no_grad":
            with torch.no_grad():
                return f(x, w)
        out = f(x, w)
        out = out[0] * 3 + out[1] if isinstance(out, tuple) else out
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        return out.detach(), x.grad, w.grad, torch.rand(2)
    except (RuntimeError, TypeError) as error:
        return type(error).__name__


@pytest.mark.parametrize("how", ["grad", "no_grad"])
@pytest.mark.parametrize("program", ONE_GRAPH, ids=lambda f: f.__name__)
def test_one_graph(program, how):
    compiled = kiln.compile(program, fullgraph=True)
    for seed in range(2):
        assert not difference(run(compiled, seed, how), run(program, seed, how), 1e-5, 1e-6)


@pytest.mark.parametrize("how", ["grad", "no_grad"])
@pytest.mark.parametrize(
    "program",
    [
        returns_an_input_itself,
        returns_memory_of_its_input,
        returns_a_view_of_its_view,
        returns_two_inputs,
        writes_to_a_view,
        view_whose_base_is_written,
        returns_memory_of_another_tensor,
        returns_memory_twice,
        changes_its_input,
        gradients_that_are_none,
        by_keyword,
    ],
    ids=lambda f: f.__name__,
)
def test_what_stays_eager(program, how):
    compiled = kiln.compile(program)
    for seed in range(2):
        assert not difference(run(compiled, seed, how), run(program, seed, how), 1e-5, 1e-6)


@pytest.mark.parametrize("program", ONE_GRAPH, ids=lambda f: f.__name__)
def test_in_a_whole_step(program):
    def step(x, w):
        w.grad = None
        loss = program(x, w).pow(2).sum()
        loss.backward()
        with torch.no_grad():
            w -= 0.01 * w.grad
        return loss.detach()

    results = []
    for f in (step, kiln.compile(step, fullgraph=True)):
        torch.manual_seed(0)
        x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
        if program is no_gradient_for_one:
            w.grad = torch.zeros(4, 4)
            with pytest.raises(Exception):  # noqa: B017, PT011  w has no gradient: eager's error
                f(x, w)
            continue
        results.append(([f(x, w) for _ in range(3)], w.detach().clone(), w.grad, x.grad))
    if results:
        assert not difference(results[1], results[0], 1e-5, 1e-6)


def test_a_view_that_is_returned_cannot_be_written():
    w = torch.randn(4, 4, requires_grad=True)
    for f in (returns_a_view, kiln.compile(returns_a_view, fullgraph=True)):
        y = f(torch.randn(3, 4), w)
        assert y.grad_fn is not None
        with pytest.raises(RuntimeError, match="custom Function"):
            y += 1


def test_effects_of_the_backward_happen_when_it_runs():
    log = []

    class Logged(Function):
        @staticmethod
        def forward(ctx, x):
            log.append("forward")
            return x * 2

        @staticmethod
        def backward(ctx, g):
            log.append("backward")
            return g * 2

    compiled = kiln.compile(lambda x: Logged.apply(x).sum())
    x = torch.ones(3, requires_grad=True)
    for _ in range(2):
        out = compiled(x)
        assert log.pop() == "forward" and not log
        out.backward()
        assert log.pop() == "backward" and not log


def test_errors_of_the_backward_come_when_it_runs():
    class Broken(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            raise ValueError("no gradient today")

    class Short(Function):
        @staticmethod
        def forward(ctx, x, y):
            return x * y

        @staticmethod
        def backward(ctx, g):
            return g

    x = torch.ones(3, requires_grad=True)
    out = kiln.compile(lambda x: Broken.apply(x) + 1)(x)
    with pytest.raises(ValueError, match="no gradient today"):
        out.sum().backward()
    out = kiln.compile(lambda x: Short.apply(x, x) + 1)(x)
    with pytest.raises(RuntimeError, match="incorrect number of gradients"):
        out.sum().backward()


def test_a_saved_tensor_that_changes_is_an_error():
    def f(x):
        y = x * 1
        z = Square.apply(y)
        y.add_(1)
        return z.sum()

    for g in (f, kiln.compile(f)):
        x = torch.ones(3, requires_grad=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            g(x).backward()


def test_second_derivatives():
    def penalty(x, w):
        return Square.apply(x @ w).sum() + Product.apply(x, w[:3])[0].sum()

    results = []
    for f in (penalty, kiln.compile(penalty, fullgraph=True)):
        torch.manual_seed(0)
        x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
        (gx,) = torch.autograd.grad(f(x, w), x, create_graph=True)
        del f
        kiln.reset()
        gx.pow(2).sum().backward()
        results.append((gx.detach(), x.grad, w.grad))
    assert not difference(results[1], results[0], 1e-5, 1e-6)

    def in_the_graph(x, w):
        (gx,) = torch.autograd.grad(penalty(x, w), x, create_graph=True)
        return gx.pow(2).sum()

    assert not difference(run(kiln.compile(in_the_graph, fullgraph=True), 0, ""), run(in_the_graph, 0, ""), 1e-5, 1e-6)


def test_what_its_gradients_depend_on():
    """With create_graph=True a gradient requires grad if something that its backward read does."""

    def steps(x, w):
        first = [torch.autograd.grad(f(x, w).sum(), x, create_graph=True)[0] for f in functions]
        second = [torch.autograd.grad(g.sum(), (x, w), allow_unused=True) if g.requires_grad else None for g in first]
        return first, second, [g.requires_grad for g in first]

    functions = [
        lambda x, w: Square.apply(x),
        lambda x, w: StraightThrough.apply(x),
        lambda x, w: StraightThrough.apply(x) * w,
        lambda x, w: Product.apply(x, w)[0],
    ]
    seen = []
    for f in (steps, kiln.compile(steps)):
        torch.manual_seed(0)
        seen.append(f(torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)))
    assert seen[0][2] == [True, False, True, True]
    assert not difference(seen[1], seen[0], 1e-5, 1e-6)


def test_only_first_derivatives():
    def f(x):
        (g,) = torch.autograd.grad(Once.apply(x).sum(), x, create_graph=True)
        return g.sum()

    for g in (f, kiln.compile(f)):
        with pytest.raises(RuntimeError):
            g(torch.ones(3, requires_grad=True)).backward()


def test_changed_class_is_seen():
    class Times(Function):
        factor = 2.0

        @staticmethod
        def forward(ctx, x):
            return x * Times.factor

        @staticmethod
        def backward(ctx, g):
            return g * Times.factor

    compiled = kiln.compile(lambda x: Times.apply(x))
    for factor in (2.0, 5.0):
        Times.factor = factor
        x = torch.ones(3, requires_grad=True)
        out = compiled(x)
        out.sum().backward()
        assert_same((out.detach(), x.grad), (torch.full((3,), factor), torch.full((3,), factor)))


def test_backends_see_one_call():
    codes = []

    def backend(gm, inputs):
        codes.append(gm.code)
        return gm.forward

    compiled = kiln.compile(relu_after, backend=backend)
    assert not difference(run(compiled, 0, "grad"), run(relu_after, 0, "grad"), 1e-5, 1e-6)
    assert len(codes) == 1 and codes[0].count("Square_apply(") == 2 and "sigmoid" not in codes[0]


def test_forward_that_returns_a_parameter():
    weight = torch.nn.Parameter(torch.ones(3))

    class Weight(Function):
        @staticmethod
        def forward(ctx, x):
            return weight

        @staticmethod
        def backward(ctx, g):
            return g

    f = lambda x: Weight.apply(x) * 2  # noqa: E731
    for requires_grad in (False, True):
        x = torch.ones(3, requires_grad=requires_grad)
        expected, actual = f(x), kiln.compile(f)(x)
        assert_same(actual, expected)
        assert actual.requires_grad == expected.requires_grad


def test_defaults_with_setup_context():
    class Power(Function):
        @staticmethod
        def forward(x, n=2):
            return x**n

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(inputs[0])
            ctx.n = inputs[1]

        @staticmethod
        def backward(ctx, g):
            return g * ctx.n * ctx.saved_tensors[0] ** (ctx.n - 1), None

    f = lambda x: Power.apply(x).sum() + Power.apply(x, 3).sum()  # noqa: E731
    for g in (f, kiln.compile(f, fullgraph=True)):
        x = torch.full((3,), 2.0, requires_grad=True)
        g(x).backward()
        assert x.grad.tolist() == [16.0] * 3
        assert g(x.detach()).item() == 36
    with pytest.raises(TypeError):
        kiln.compile(lambda x: Power.apply())(x)
    with pytest.raises(TypeError):
        kiln.compile(lambda x: Power.apply(x, 2, 3))(x)


def test_a_backward_that_calls_a_custom_function_is_differentiated_by_its_backward():
    """Not by what that one's forward computes: the function runs in eager."""

    class Scaled(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 7

    class Square(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, g):
            return Scaled.apply(g) * ctx.saved_tensors[0]

    def f(x):
        return (Square.apply(x) ** 2).sum() + 1

    gradients = []
    for function in (kiln.compile(f), f):
        x = torch.linspace(0.1, 2, 5, requires_grad=True)
        (first,) = torch.autograd.grad(function(x), x, create_graph=True)
        gradients.append([first.detach(), torch.autograd.grad(first.sum(), x)[0]])
    assert_same(*gradients)


def test_writes_of_the_backward_happen_when_it_runs():
    compiled = kiln.compile(lambda x, count: WritesThroughAView.apply(x, count).sum())
    x, count = torch.ones(3, requires_grad=True), torch.zeros(2, 2)
    for i in range(3):
        out = compiled(x, count)
        assert count.sum() == 4 * i
        out.backward()
        assert count.sum() == 4 * (i + 1)


def test_assertions_of_a_backward_on_its_gradients():
    class Two(Function):
        @staticmethod
        def forward(ctx, x):
            a, b = x + 1, x * 2
            ctx.mark_non_differentiable(a)
            return a, b

        @staticmethod
        def backward(ctx, grad_a, grad_b):
            assert (grad_a == 0).all()
            assert (grad_b < 5).all(), "large"
            return grad_b * 2

    def f(x, scale):
        a, b = Two.apply(x)
        (b * scale).sum().backward()
        return a, b.detach(), x.grad

    compiled = kiln.compile(f)
    for g in (f, compiled):
        x = torch.ones(3, requires_grad=True)
        a, b, grad = g(x, 3.0)
        assert a.tolist() == b.tolist() == [2.0] * 3 and grad.tolist() == [6.0] * 3
        with pytest.raises(AssertionError, match="large"):
            g(torch.ones(3, requires_grad=True), 9.0)


def test_gradients_that_are_not_materialized():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, count):
            ctx.set_materialize_grads(False)
            more = count + 1
            ctx.mark_non_differentiable(more)
            ctx.save_for_backward(x)
            return x * 2, more

        @staticmethod
        def backward(ctx, grad, none):
            assert none is None
            (x,) = ctx.saved_tensors
            return None if grad is None else grad * x, None

    def f(x, count):
        y, count = Doubled.apply(x * 3, count)
        return y.sum(), count

    found = []
    for function in (f, kiln.compile(f, fullgraph=True)):
        x = torch.arange(3.0, requires_grad=True)
        y, count = function(x, torch.zeros(2))
        y.backward()
        found.append((y.detach(), count, x.grad))
    assert_same(*found)


def test_apply_is_compiled_itself():
    compiled = kiln.compile(Square.apply, fullgraph=True)
    for x in (torch.arange(3.0), torch.ones(2, 2)):
        given, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
        compiled(given).sum().backward()
        Square.apply(expected).sum().backward()
        assert_same(given.grad, expected.grad)


class Added(torch.autograd.Function):
    """Gives the second argument no gradient."""

    @staticmethod
    def forward(ctx, x, y):
        return x + y

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Eighths(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.round(x * 8)

    @staticmethod
    def backward(ctx, grad):
        return grad / 8


class Silent(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return None if grad is None else grad * 2


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_zeros_for_a_gradient_that_is_missing_behind_a_break(breaks, several):
    """Eager calls the backward of a custom function with zeros where a later one gave None."""

    def f(a, b, c):
        y, z = Eighths.apply(b * 3) * c, b * 2
        if breaks:
            kiln.graph_break()
        return (Added.apply(a * 2, y) * (z if several else 1)).sum()

    found = []
    for function in (f, kiln.compile(f)):
        inputs = [torch.arange(3.0) + i for i in range(3)]
        for t in inputs:
            t.requires_grad_()
        function(*inputs).backward()
        found.append([t.grad for t in inputs])
    assert found[0][2] is None and found[0][1] is not None
    assert_same(*found)


def test_none_for_a_gradient_that_is_missing_behind_a_break():
    def f(a, b):
        y, unused = b.sin(), Eighths.apply(b * 2)
        kiln.graph_break()
        return Added.apply(a * 2, y).sum(), unused

    def silent(a, b):
        y = Silent.apply(b)
        kiln.graph_break()
        return Added.apply(a * 2, y).sum(), None

    for function in (f, silent):
        found = []
        for run in (function, kiln.compile(function)):
            a, b = torch.arange(3.0, requires_grad=True), torch.ones(3, requires_grad=True)
            run(a, b)[0].backward()
            found.append((a.grad, b.grad))
        assert found[0][1] is None
        assert_same(*found)
