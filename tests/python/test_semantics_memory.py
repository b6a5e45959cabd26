"""Versions, layouts and views of tensors that compiled code writes to or passes on."""

import warnings

import pytest
import torch

import kiln
from helpers import check
from kiln.testing import assert_same

X = torch.arange(1.0, 10.0).reshape(3, 3)


def with_gaps():
    return torch.arange(36.0).reshape(6, 6)[::2, ::2]


def test_every_written_input_has_a_new_version():
    def f(a, b, c):
        a.transpose(0, 1).mul_(3)
        b.relu_()
        c.copy_(b)
        return a + 1

    compiled = kiln.compile(f)
    for _ in range(2):
        tensors = [X.clone(), with_gaps(), X.clone()]
        compiled(*tensors)
        assert [t._version > 0 for t in tensors] == [True] * 3


def test_a_backward_of_what_was_overwritten_is_an_error():
    def f(a, b):
        a.mul_(2)
        b.zero_()
        return a + b

    weight, a, b = X.clone().requires_grad_(), X.clone(), X.clone()
    losses = [(weight * a).sum(), (weight * b).sum()]
    kiln.compile(f)(a, b)
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize(
    "alias",
    [
        lambda a: a.reshape(-1),
        lambda a: a.contiguous().view(-1),
        lambda a: a.flatten(),
        lambda a: a.t().reshape(-1),
        lambda a: a.reshape(3, 3, 1).squeeze(-1).reshape(-1),
        lambda a: a.to(torch.float32).reshape(-1),
        lambda a: a[0].reshape(-1),
        lambda a: a.ravel(),
    ],
)
@pytest.mark.parametrize("make", [with_gaps, lambda: with_gaps().t(), lambda: X, X.t])
@pytest.mark.parametrize("write", [lambda a: a.sub_(a.mean()), lambda a: a.relu_(), lambda a: a.copy_(X * 2)])
def test_views_of_a_written_tensor_are_where_eager_has_them(alias, make, write):
    def f(a):
        write(a)
        part = alias(a)
        part[0] = 77
        return a + 0, part

    left, right = [torch.as_strided(torch.arange(50.0), a.shape, a.stride()) for a in (make(), make())]
    expected, actual = f(left), kiln.compile(f)(right)
    assert_same(expected, actual)
    assert_same(left, right)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.sum().flip(0),
        lambda x: x.sum().flip(-1) * 2,
        lambda x: x.sum().flip(()),
        lambda x: x.sum().roll(1),
        lambda x: x.sum().roll(1, 0),
        lambda x: x.sum().argmax(0),
        lambda x: x.sum().cumsum(-1),
        lambda x: x.sum().softmax(0),
    ],
)
def test_dims_of_numbers(f):
    check(f, X)
    check(f, X.clone().requires_grad_())


@pytest.mark.parametrize("leaf", [True, False])
def test_views_that_were_made_without_gradients(leaf):
    """They require gradients, and have no history: what is computed of them does not reach their base."""

    def f(a):
        b = a * 2
        with torch.no_grad():
            return a[::2], b.view(-1), b, a.detach()[0]

    def run(function):
        source = X.clone().requires_grad_()
        a = source if leaf else source * 1
        views = function(a)
        sum((v * 3).sum() for v in views).backward()
        return [(v.requires_grad, v.is_leaf, v._is_view()) for v in views], source.grad, [v.grad for v in views[:2]]

    assert_same(run(f), run(kiln.compile(f)))


def view_of_a_view(a):
    with torch.no_grad():
        part = a[:2]
    return part[..., 0], part * 2


def detached_and_written(a, b):
    c = a.detach()
    c.copy_(b)
    return c, a + 1


def view_of_what_was_written(a, b):
    part = a[..., 0]
    a.mul_(b)
    return part, a


@pytest.mark.parametrize("f", [view_of_a_view, detached_and_written, view_of_what_was_written])
def test_histories_of_views(f):
    def run(function):
        leaves = [X.clone().requires_grad_(f is view_of_a_view), X.clone().requires_grad_()]
        out = function(*leaves[: f.__code__.co_argcount])
        sum((t * 3).sum() for t in out if t.requires_grad).backward()
        return out, [t.grad for t in leaves]

    assert_same(run(f), run(kiln.compile(f)))


@pytest.mark.parametrize(
    "write",
    [
        lambda a: a.masked_fill_(a > 3, 0.5),
        lambda a: a.scatter_(0, torch.zeros(1, 3, dtype=torch.int64), 5.0),
        lambda a: a.index_fill_(0, torch.tensor([1]), 2.0),
        lambda a: a.index_add_(0, torch.tensor([1]), torch.ones(1, 3)),
        lambda a: a.masked_scatter_(a > 3, X * 2),
        lambda a: a.clamp_(1, 5),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_a_written_result_keeps_its_layout(write, grad):
    def f(a):
        b = a * 1.5
        write(b)
        return b, b.reshape(-1)

    check(f, X.t().clone(memory_format=torch.preserve_format).requires_grad_(grad))
    check(f, X.clone().t().detach().requires_grad_(grad))


@pytest.mark.parametrize(
    "write",
    [
        lambda a: a.detach().mul_(2),
        lambda a: a.detach()[0].fill_(0.5),
        lambda a: a.data.add_(1),
    ],
)
@pytest.mark.parametrize("make", [lambda x: x, lambda x: x * 1.5, lambda x: x[::2], lambda x: (x * 1.5).t()])
def test_writes_that_autograd_does_not_see(write, make):
    def f(a):
        b = a.sum(0)
        write(a)
        return b, a * 3

    def run(function):
        leaf = X.clone().requires_grad_()
        a = make(leaf)
        out = function(a)
        sum((t * 3).sum() for t in (*out, a)).backward()
        return out, leaf.grad, a.detach().clone()

    assert_same(run(f), run(kiln.compile(f)))


@pytest.mark.parametrize(
    "f",
    [
        lambda a: (torch.tanh(a), a.data.mul_(2)),
        lambda a: (lambda y: (y, y.data.masked_fill_(y > 0, 0.0)))(torch.tanh(a)),
        lambda a: (lambda y: (a.data.add_(1), y.data.mul_(2), y, y * 1))(torch.tanh(a)),
        lambda a: (a.data, torch.exp(a)),
        lambda a: (lambda y: (y.data, y))(torch.exp(a)),
    ],
)
def test_data_counts_its_writes_apart(f):
    """Writes through .data are no writes to the tensor, for autograd: neither a program's nor its caller's."""

    def run(function):
        leaf = X.clone().requires_grad_()
        a = leaf * 1.0
        out = function(a)
        before = [t._version for t in (a, *out)]
        for t in out:
            if not t.requires_grad:
                t.add_(1)
        changed = [t._version - n for t, n in zip((a, *out), before, strict=True)]
        sum((t * 3).sum() for t in (*out, a) if t.requires_grad).backward()
        return a._version, changed, [t.detach() for t in (a, *out)], leaf.grad

    assert_same(run(f), run(kiln.compile(f)))


@pytest.mark.parametrize(
    "views",
    [
        lambda x: x.unbind(0),
        lambda x: x.split(2),
        lambda x: x.chunk(2, 1),
        lambda x: list(x),
        lambda x: x.tensor_split(2),  # allowed: each part is a slice by itself
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_writes_to_one_of_several_views(views, grad):
    """Autograd refuses them, inside a compiled function and to what one returned."""

    def f(x):
        x = x * 2
        parts = views(x)
        parts[1].mul_(3)
        return x, parts

    def g(x):
        x = x * 2
        return x, views(x)

    def attempt(call):
        x = X.clone().requires_grad_(grad)
        try:
            out, parts = call(x)
            parts[0].add_(1)
        except RuntimeError as e:
            return str(e).partition(" is a view and is being modified inplace")[1]
        return out, parts, torch.autograd.grad(out.sum(), x) if grad else None

    for function in (f, g):
        assert_same(attempt(function), attempt(kiln.compile(function)))


def test_views_and_writes_behind_a_region_without_gradients():
    """The graph behind a break inside no_grad begins without gradients, and ends with them."""

    def views(a, b):
        with torch.no_grad():
            kiln.graph_break()
            early = a.t()
        a = a * 2
        return a, a.t(), a[0], early, b

    def write(a, b):
        with torch.no_grad():
            kiln.graph_break()
            a + 1
        b.mul_(a)
        return (b,)

    def without(a, b):
        with torch.no_grad():
            b = b + 1
            with torch.enable_grad():
                kiln.graph_break()
                a = a * 2
                part = a[0]
            return a, part, a[0], (a * 3)[0]

    for f in (views, write, without):
        outcomes = []
        for function in (f, kiln.compile(f)):
            a = X.clone().requires_grad_()
            results = function(a, X * a.detach().requires_grad_())
            assert torch.is_grad_enabled()
            sum(r.sum() for r in results if r.requires_grad and not r.is_leaf).backward()
            outcomes.append([results, a.grad])
        assert_same(*outcomes)


def test_views_made_without_gradients_over_a_break_after_a_write():
    def f(w, x, ask):
        with torch.no_grad():
            view = w.view(1, -1)
            row = view[0]
            row.add_(1, alpha=0.5)
            kiln.graph_break()
            view.mul_(2)
            w.copy_(view.reshape_as(w) + 1)
        loss = (w * x).sum()
        loss.backward()
        if ask:
            return loss, view * x.view(1, -1)
        return loss, view.detach(), row.detach()

    check(f, X.clone().requires_grad_(), X.clone(), False)
    for function in (f, kiln.compile(f)):
        w = X.clone().requires_grad_()
        with pytest.raises(RuntimeError, match="A view was created in no_grad mode and its base"):
            function(w, X.clone(), True)
        assert_same(w.grad, X)


def test_views_made_without_gradients_refuse_writes_with_them():
    def f(x, w):
        x = x * 1
        with torch.no_grad():
            view = x.view(-1)
        view.mul_(w)
        return x

    for function in (f, kiln.compile(f)):
        with pytest.raises(RuntimeError, match="created in no_grad mode and is being modified inplace"):
            function(X.clone(), torch.ones((), requires_grad=True))


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x[:, 1:].add_(x[:, :-1]),  # in the order of eager's loop
        lambda x: x[1:].add_(x[:-1]),  # an error
        lambda x: x.mul_(x[0]),
        lambda x: x[:, 1].mul_(x[:, 0]),  # no shared element
        lambda x: x.t().add_(x),
        lambda x: x.add_(x),
        lambda x: torch.mul(x, 2, out=x),
        lambda x: x.index_add_(0, torch.tensor([0, 1, 2]), x),
        lambda x: torch._foreach_add_([x[0], x[1]], [x[1], x[2]]),
    ],
)
@pytest.mark.parametrize("size", [3, 300])
def test_writes_to_what_is_read(write, size):
    def f(x):
        x = x + 1
        write(x)
        return x * 2

    check(f, torch.linspace(0, 1, 3 * size).reshape(3, size) if size > 3 else X)


def test_a_leaf_that_the_backward_does_not_need_may_change():
    def f(x):
        return torch.where(x > 0, x, x * 2)

    grads = []
    for function in (f, kiln.compile(f)):
        x = (X - 5).requires_grad_()
        y = function(x)
        with torch.no_grad():
            x.mul_(-1)
        y.sum().backward()
        grads.append(x.grad)
    assert_same(*grads)


def test_a_view_that_autograd_refuses_reaches_code_behind_a_break():
    """Its guards must not raise: the region without gradients would never be left."""

    def f(b, c):
        with torch.no_grad():
            a = c.split(2, 0)[0]
        with torch.no_grad():
            torch.add(b, 1, out=c)
        return a[..., 0]

    compiled = kiln.compile(f)
    for function in (f, compiled, compiled):
        with pytest.raises(RuntimeError, match="has been modified inplace with grad mode enabled"):
            function(torch.ones(1, 3), torch.ones(3, 3, 3, requires_grad=True))
        assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    "f",
    [
        lambda d, b: d[:2].mul_(b),
        lambda d, b: d.mul_(b),
        lambda d, b: d.t()[1].mul_(b),
        lambda d, b: d.view(-1)[:3].mul_(b).exp_(),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_what_the_backward_keeps_of_an_input_that_was_written(f, grad):
    """The backward reads the values from before the write, also those of a view."""

    def g(d, b):
        f(d, b)
        return d.sum(), d.sin()

    grads = []
    for function in (g, kiln.compile(g)):
        b, leaf = torch.tensor([0.3, 0.4, 0.5], requires_grad=True), X.clone().requires_grad_(grad)
        total, other = function(leaf * 1, b)
        (total + other.sum()).backward()
        grads.append((b.grad, leaf.grad))
    assert_same(*grads)


@pytest.mark.parametrize("alias", ["view", "transposed", "row", "both", "detached", "no_grad", "none"])
@pytest.mark.parametrize("kept", [True, False])
def test_a_result_that_is_written_before_the_backward(alias, kept):
    """Where eager keeps the result's memory for the backward this is an error, otherwise it changes nothing."""

    def f(x):
        kept_by_autograd = x.exp() if kept else x + 1
        h = kept_by_autograd if kept else kept_by_autograd.exp()
        y = kept_by_autograd
        if alias == "no_grad":
            with torch.no_grad():
                return y.view(-1), h.sum()
        results = {"view": y.view(-1), "transposed": y.t(), "row": y[0], "both": y.view(-1), "detached": y.detach()}
        return results.get(alias, y), y if alias == "both" else None, h.sum()

    def attempt(function):
        x = X.clone().requires_grad_()
        results = function(x)
        with torch.no_grad():
            results[0].mul_(3)
        try:
            results[-1].backward()
        except RuntimeError as e:
            return "modified by an inplace operation" in str(e)
        return x.grad

    assert_same(attempt(f), attempt(kiln.compile(f)))


def test_a_detached_alias_may_get_a_history_of_its_own():
    def f(x):
        alias = x.detach()
        alias.add_(x.max(0)[0])
        return alias, alias[1:]

    grads = []
    for function in (f, kiln.compile(f)):
        x = X.clone().requires_grad_()
        sum(r.sum() for r in function(x)).backward()
        grads.append((x.grad, x.detach()))
    assert_same(*grads)


def test_effects_before_a_write_that_autograd_refuses():
    def f(x, y):
        z = x.matmul(y)
        x.detach().mul_(1.5)
        x[1:] += 1
        return z

    left = []
    for function in (f, kiln.compile(f)):
        leaf = X.clone().requires_grad_()
        with pytest.raises(RuntimeError, match="a view of a leaf Variable"):
            function(leaf.view(3, 3), X)
        left.append(leaf.detach())
    assert_same(*left)


def test_memory_without_elements_that_is_read_first():
    def f(a, b, c):
        a += 1
        b = b[1:] * 2
        return b @ c, b

    check(f, torch.ones(3, 2), torch.ones(1, 3), torch.randn(216).as_strided((3, 3, 3), (72, 12, 2)))


def test_out_keeps_the_layout_of_what_is_written():
    def f(x):
        a = x.masked_fill(x > 5, 2.0)
        b = a * x
        torch.add(x, 1, out=a)
        return a, b

    check(f, X)
    check(f, X.t())


@pytest.mark.parametrize("change", [lambda c: c.t_(), lambda c: c.unsqueeze_(0), lambda c: c.transpose_(0, 1)])
@pytest.mark.parametrize("views", [True, False])
def test_gradients_of_what_is_reshaped_in_place(change, views):
    def f(x):
        y = x * 2
        view = y.transpose(0, -1) if views else None
        change(y)
        return (y, view) if views else (y.exp(),)

    check(f, X.clone().requires_grad_())


@pytest.mark.parametrize(
    "view", [lambda a: a.t(), lambda a: a.transpose(0, 1)[1:], lambda a: a[1:].t(), lambda a: a.view(-1)]
)
def test_a_result_keeps_its_layout_when_a_view_of_it_is_written(view):
    def f(x):
        a = x * 2
        v = view(a)
        v.scatter_(0, torch.zeros_like(v, dtype=torch.long), torch.ones_like(v))
        v.masked_fill_(v > 3, 0.5)
        return a, v

    check(f, X.clone().requires_grad_())
    if view(X).shape != (9,):
        check(f, X.t())


def given_other_memory(x):
    y = x.clone()
    with torch.no_grad():
        x.set_(torch.ones_like(x))
    return y, x * 2


def resized_like_another(x):
    x.resize_as_(torch.ones(5))
    return x.fill_(2.0)


def resized_in_inference(x):
    with torch.inference_mode():
        y = torch.ones(2, 3, requires_grad=True)
        return y.resize_(3), x + 1


def resized_result(x):
    return torch.empty(2, 2, out=torch.zeros(1)).copy_(x[:2, :2]) + 1


def diagonal_of_a_view(x):
    y = torch.stack([x, x + 1])[:, 1:]
    y[0].fill_diagonal_(5.0)
    z = torch.stack([x, x + 1])[:, 1]
    return y, z.fill_diagonal_(7.0, wrap=True)


def complex_halves(x):
    return torch.view_as_real(x.to(torch.complex32))


def nothing_to_iterate_over(x):
    return list(torch.tensor([])), [a for a in x[:0]], list(x[:, :0]), x[:0].split(2), x * 2


@pytest.mark.filterwarnings("ignore:.*ComplexHalf", "ignore:kiln.*runs in eager")
@pytest.mark.parametrize(
    "program",
    [
        given_other_memory,
        resized_like_another,
        resized_in_inference,
        resized_result,
        diagonal_of_a_view,
        complex_halves,
        nothing_to_iterate_over,
    ],
)
def test_unusual_memory(program):
    check(program, X.clone())


def swapped(p, q):
    before = p.clone()
    p.copy_(q)
    q.copy_(before)


COMPLEX = {
    "scaled": lambda p, q: p.mul_(0.9),
    "as real numbers": lambda p, q: (torch.view_as_real(p).mul_(0.9), p.sum()),
    "a part": lambda p, q: (p[1:].mul_(2), p.t().contiguous()),
    "transposed": lambda p, q: p.t().add_(1j).conj().resolve_conj(),
    "one of the other": lambda p, q: q.copy_(p.t().clone()).sum(),
    "swapped": swapped,
}


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("name", COMPLEX)
def test_complex_numbers(name, dtype):
    """No kernel knows them; they are copied by a call."""

    def f(p, q):
        COMPLEX[name](p, q)
        return p.abs(), q + 1

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing runs in eager
        check(f, torch.randn(4, 4, dtype=dtype), torch.randn(4, 4, dtype=dtype))


def test_complex_parameters_are_trained():
    def train(compiled):
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(4, 4, dtype=torch.cfloat))
        optimizer = torch.optim.AdamW([p], 0.1)

        def step(x):
            loss = (x @ p).abs().pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = kiln.compile(step, fullgraph=True) if compiled else step
        return [run(torch.randn(3, 4, dtype=torch.cfloat)) for _ in range(4)], p.detach()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(train(True), train(False), rtol=1e-4, atol=1e-5)


def test_writes_by_operators_on_lists_are_counted():
    def f(x, y):
        torch._foreach_add_([x], 1)
        torch._foreach_mul_([y, x], 2)
        torch._foreach_copy_([y], [x * 3])
        torch._foreach_zero_([x])

    check(f, X.clone(), X.clone())
    w, x = torch.ones(4, requires_grad=True), torch.ones(4)
    y = (w * x).sum()
    kiln.compile(lambda x: torch._foreach_add_([x], 1))(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_only_leaves_change_requires_grad():
    def f(x):
        x.requires_grad = True
        return x * 2

    x = torch.ones(3, requires_grad=True) * 1
    for function in (f, kiln.compile(f)):
        with pytest.raises(RuntimeError, match="leaf"):
            function(x)


@pytest.mark.parametrize("write", [lambda t: t.add_(1), lambda t: t[:2].zero_(), lambda t: t.sin_().mul_(2)])
def test_memory_that_is_shared_until_it_is_written(write):
    def f(t):
        write(t)
        return t * 2

    compiled = kiln.compile(f)
    for _ in range(2):
        original = torch.ones(4)
        clone = torch._lazy_clone(original)
        assert_same(compiled(clone), f(torch.ones(4)))
        assert original.tolist() == [1] * 4 and clone.tolist() != [1] * 4


def window_of_a_copy(x):
    y = x.clone()
    z = y.as_strided((3,), (1,), 0)
    z.add_(1)
    return y, z, (x * 1).as_strided((2, 2), (1, 2), 0) * 1


def window_of_what_is_written(x):
    x.mul_(2)
    return x.as_strided((3,), (1,), 0)


def written_window(x):
    x.as_strided((2,), (1,), 1).mul_(10)
    return x * 1


def resized_to_its_size(x):
    v = x.view(5, 2)[:, :1]
    v.resize_(v.shape)
    return v, v.stride()


@pytest.mark.parametrize("function", [window_of_a_copy, window_of_what_is_written, written_window, resized_to_its_size])
def test_memory_before_a_tensor(function):
    """An offset counts from where memory begins, and the argument may begin behind that: another one in each call."""
    compiled = kiln.compile(function)
    for start in (0, 5, 3):
        eager, own = torch.arange(20.0), torch.arange(20.0)
        assert_same(compiled(own[start : start + 10]), function(eager[start : start + 10]))
        assert_same(own, eager)
