"""Calls that eager refuses are refused by compiled functions too, in eager's words; those that it takes are taken."""

import contextlib
import traceback

import pytest
import torch
from torch.nn import functional as F

import kiln
from helpers import check

L = torch.tensor


def R(*sizes):
    return torch.linspace(0.1, 0.9, max(torch.Size(sizes).numel(), 1)).reshape(sizes)


# (program, x, y)
REFUSED = [
    ("x.pow_(y)", L([4, 9]), L(0.5)),
    ("x.pow_(y)", L([2.0, 3]), L([1 + 1j, 2])),
    ("1 - x", L([True]), None),
    ("x - True", R(2), None),
    ("torch.rsub(x, y)", L([True]), L([2])),
    ("torch.sub(x, y)", L([1.0]), L([True])),
    ("torch.add(x, y, alpha=0.5)", L([1, 2]), L([1, 2])),
    ("torch.add(x, y, alpha=True)", R(2), R(2)),
    ("x.div(y, rounding_mode='zz')", R(2), R(2)),
    ("x.__setitem__(L([0, 1]), y)", R(3), R(2).double()),
    ("x.__setitem__(L([0, 1]), y)", R(3), R(3)),
    ("x.scatter_(0, L([0, 1]), y)", R(3), R(2).double()),
    ("x.scatter_add_(0, L([0, 1]), y)", R(3), R(2).double()),
    ("x.index_add_(0, L([0, 1]), y)", R(3), R(2).double()),
    ("x.fill_(y)", R(3), R(1)),
    ("x.fill_(float('inf'))", L([1]), None),
    ("x.masked_fill(y, 1)", R(2), L([1, 0], dtype=torch.uint8)),
    ("x.masked_fill(x > 0, y)", R(2), R(2)),
    ("F.binary_cross_entropy(x, y)", L([0.5, 1.5]), L([0.0, 1])),
    ("F.binary_cross_entropy(x, y)", L([0.5, 0.5]), L([0, 1])),
    ("F.huber_loss(x, y, delta=0)", R(2), R(2)),
    ("F.gelu(x, approximate='zz')", R(2), None),
    ("F.leaky_relu(x)", L([1, -2]), None),
    ("F.avg_pool2d(x, 2, divisor_override=0)", R(1, 1, 4, 4), None),
    ("F.conv2d(x, y, dilation=0)", R(1, 3, 4, 4), R(2, 3, 3, 3)),
    ("F.conv2d(x, y, stride=0)", R(1, 3, 4, 4), R(2, 3, 3, 3)),
    ("F.conv1d(x, y, stride=0)", R(1, 3, 4), R(2, 3, 3)),
    ("F.unfold(x, 2, stride=0)", R(1, 3, 4, 4), None),
    ("F.fold(x, (2, 2), 2, stride=0)", R(1, 4, 1), None),
    ("F.max_pool2d(x, 2, stride=-1)", R(1, 1, 4, 4), None),
    ("torch.native_group_norm(x, None, None, 1, 4, 2, 0, 1e-5)", R(1, 4, 2), None),
    ("torch.lerp(x, y, 0.5)", R(2), R(2).double()),
    ("torch.lerp(x, y, 0.5)", L([True]), R(1)),
    ("torch.floor(x)", L([True]), None),
    ("torch.round(x)", L([True]), None),
    ("x.cumsum_(0)", L([True]), None),
    ("x[1:].add_(x[:-1])", R(3), None),
    ("F.layer_norm(x, (2,), y)", R(2, 2), R(3)),
    ("x & y", R(2), R(2)),
    ("F.pixel_shuffle(x, 545460846592)", R(1, 4, 2, 2), None),  # its square wraps to 0
    ("F.fold(x, 8, 2**40)", R(2, 4), None),
    ("torch.linspace(0, 1j, 5, dtype=torch.float32)", R(1), None),
    ("torch.tensor([1], device='cuda:200')", R(1), None),
    ("torch.tensor([1, 'a'])", R(1), None),
    ("torch.slice_scatter(x, y, 2)", R(2, 2), R(2, 2)),
    ("torch.slice_scatter(x, y, 0, 1)", R(2, 2), R(2, 2)),
    ("torch.select_scatter(x, y[0], 2, 0)", R(2, 2), R(2, 2)),
    ("torch.select_scatter(x, y[0], 0, 2)", R(2, 2), R(2, 2)),
    ("torch.diagonal_scatter(x, y[0], 0, 0, 2)", R(2, 2), R(2, 2)),
    ("~x", R(2), None),
    ("torch.bitwise_left_shift(x, y)", R(2), R(2)),
    ("x.frac()", L([1]), None),
    ("torch.hypot(x, x)", L([1]), None),
    ("torch.addcdiv(x, x, x)", L([1]), None),
    ("F.elu(x)", L([1]), None),
    ("F.silu(x)", L([1]), None),
    ("F.softplus(x)", L([1]), None),
    ("F.gelu(x)", torch.ones(20000, dtype=torch.long), None),
    ("x.index_add(0, y, torch.ones(3, 3))", R(3, 3), L([0, 1, 2, 0])),
    ("x.index_add_(1, y, torch.ones(3, 3))", R(3, 3), L([0, 1])),
    ("x.scatter_add(1, y.expand(3, 4), torch.ones(3, 3))", R(3, 4), L([0, 1, 2, 0])),
    ("x.scatter(0, y.expand(3, 4).T, torch.ones(3, 3))", R(4, 4), L([0, 1, 2, 0])),
    ("torch.linalg.inv(x)", torch.zeros(3, 3), None),
    ("torch.linalg.solve(x, x)", torch.zeros(3, 3), None),
    ("torch.linalg.cholesky(x)", -torch.eye(3), None),
    ("torch.linalg.lu_factor(x)", torch.zeros(3, 3), None),
    ("torch.linalg.inv_ex(x, check_errors=True)[0] + 0", torch.zeros(3, 3), None),
    # An out= that does not take results of their dtype.
    ("torch.sum(x, 0, dtype=torch.float64, out=torch.empty(3))", torch.ones(3, 3), None),
    ("torch.max(x, 0, out=(torch.empty(3), torch.empty(3, dtype=torch.float64)))", torch.ones(3, 3), None),
    ("torch.searchsorted(x[0], x[0], out=torch.empty(3))", torch.ones(3, 3), None),
    ("torch.mm(x, x, out=torch.empty(3, 3, dtype=torch.float64))", torch.ones(3, 3), None),
    ("torch.cat([x, x], out=torch.empty(6, 3, dtype=torch.int32))", torch.ones(3, 3), None),
    ("torch.mean(x, 0, out=torch.empty(3, dtype=torch.int32))", torch.ones(3, 3), None),
    ("torch.argmax(x, 0, out=torch.empty(3, dtype=torch.int32))", torch.ones(3, 3), None),
    ("torch.where(x > 0, x, x, out=torch.empty(3, 3, dtype=torch.float64))", torch.ones(3, 3), None),
    ("torch.logcumsumexp(x, 0, out=torch.empty(3, 3, dtype=torch.int32))", torch.ones(3, 3), None),
]


@pytest.mark.parametrize("program,x,y", REFUSED, ids=range(len(REFUSED)))
def test_refused(program, x, y):
    f = eval("lambda x, y: " + program, {"torch": torch, "F": F, "L": L})
    with pytest.raises(Exception):  # noqa: B017
        f(x.clone(), y)
    check(f, x, y)


# What the second argument, [0, 9], makes raise. Nobody uses the result.
UNUSED = [
    lambda x, i: torch._assert_async((x > 100).all(), "too small"),
    lambda x, i: x[i],
    lambda x, i: x.clone().__setitem__(i, 1),
    lambda x, i: F.cross_entropy(x[:2], i),
    lambda x, i: F.embedding(i, x),
    lambda x, i: torch.linalg.cholesky(-x @ x.t()),
    lambda x, i: i // 0,
    lambda x, i: F.binary_cross_entropy(x + 100, x),
]


@pytest.mark.parametrize("checked", UNUSED, ids=range(len(UNUSED)))
@pytest.mark.parametrize("grad", [False, True])
def test_unused_results_are_checked(checked, grad):
    def f(x, i):
        checked(x, i)
        return x * 2

    with pytest.raises((RuntimeError, IndexError)):
        f(R(3, 3), L([0, 9]))
    check(f, R(3, 3).requires_grad_(grad), L([0, 9]))


def test_elements_that_are_left_out_are_checked():
    check(lambda x, i: x[i][0] + 1, R(3), L([0, 9]))
    check(lambda x, i: (x[i] * 2)[:1], R(3), L([0, 9]))
    check(lambda x, i, j: x[i][j], R(3), L([0, 9]), L([0]))
    check(lambda x, y: (x // y)[:1], L([4, 5]), L([2, 0]))


def test_unlike_dtypes_that_eager_takes():
    check(lambda x, y: F.mse_loss(x, y), torch.ones(2, requires_grad=True), torch.zeros(2).double())
    check(lambda x: x.scatter_(0, L([0, 1]), 1.5), L([1, 2, 3]))
    for x, y in ((R(2), R(2).double()), (R(2).double(), R(2)), (R(2).half(), R(2))):
        check(F.huber_loss, x, y)
        check(F.binary_cross_entropy_with_logits, x, y)


def test_trying_a_call_out_leaves_no_trace():
    """Calls are tried out on small tensors while they are captured: that draws no numbers and gives no warning."""
    gru = torch.nn.GRU(2, 2, num_layers=2, dropout=0.5)
    check(lambda x: (gru(x)[0], torch.rand(2)), R(3, 2), grad=False)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    kiln.compile(lambda x: F.layer_norm(x, (2,)) @ x)(R(2, 2))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.tril(x[0]),
        lambda x: x.view(7),
        lambda x: x @ x[:2],
        lambda x: torch.cat([x, x[0]]),
        lambda x: torch.nn.functional.conv1d(x, x),
        lambda x: x.exponential_(-0.5),
        lambda x: x.cauchy_(0.0, 0.0),
        lambda x: x.log_normal_(0.0, -1.0),
        lambda x: x.geometric_(2.0),
        lambda x: x.random_(3, 3),
        lambda x: x.uniform_(2, 1),
        lambda x: x.exponential_(2.0),  # is not refused
    ],
)
def test_a_program_that_reads_an_error_gets_eagers_words(call):
    def f(x):
        x = x * 2
        try:
            call(x)
        except RuntimeError as e:
            return x + 1, str(e)
        return x

    check(f, torch.ones(3, 3))


@pytest.mark.parametrize("change", [lambda z: F.elu_(z, -2.0), lambda z: F.leaky_relu_(z, -2.0)])
def test_a_gradient_that_eager_refuses(change):
    def f(x):
        z = x * 1
        return change(z)

    for g in (f, kiln.compile(f)):
        out = g(torch.linspace(-1, 1, 4).requires_grad_())
        with pytest.raises(RuntimeError, match="In-place"):
            out.sum().backward()


def test_results_that_out_casts():
    def f(x):
        wide = {"dtype": torch.float64}
        return (
            torch.add(x, x, out=torch.empty(3, 3, **wide)),
            torch.mean(x, 0, out=torch.empty(3, **wide)),
            torch.eq(x, x, out=torch.empty(3, 3)),
            torch.logical_and(x, x, out=torch.empty(3, 3)),
            torch.cat([x, x], out=torch.empty(6, 3, **wide)),
        )

    check(f, torch.linspace(-1, 1, 9).reshape(3, 3), grad=False)


def in_a_with(x):
    with contextlib.nullcontext():
        return x + int("a")


def in_no_grad(x):
    with torch.no_grad():
        y = x + 1
        return y.view(3, 7)


def with_finally(x):
    try:
        y = x * 2
        raise KeyError("k")
    finally:
        x = y


def raised_again(x):
    try:
        return x.view(3, 7)
    except RuntimeError as error:
        x = str(error)
        raise


def raised_from(x):
    try:
        return x.view(3, 7)
    except RuntimeError as error:
        raise ValueError("another") from error


def deep(x):
    with torch.no_grad():
        return [in_a_with(y) for y in (x, x + 1)]


def in_a_generator(x):
    def halves(x):
        with torch.no_grad():
            yield x[:2]
            raise ValueError("no more")

    return sum(y.sum() for y in halves(x))


def from_exit(x):
    @contextlib.contextmanager
    def scope():
        yield 1
        raise ValueError("at the end")

    with scope() as n:
        y = x + n
    return y


def in_a_loop(x):
    for n in (1, 2, 4, 3):
        try:
            x = x.view(n, -1) * 2
        finally:
            n += 1
    return x


@pytest.mark.parametrize(
    "f",
    [in_a_with, in_no_grad, with_finally, raised_again, raised_from, deep, in_a_generator, from_exit, in_a_loop],
    ids=lambda f: f.__name__,
)
def test_tracebacks_name_the_lines(f):
    def lines(f):
        with pytest.raises((ValueError, RuntimeError, KeyError)) as caught:
            f(torch.ones(4))
        found, error = [], caught.value
        while error:
            frames = traceback.extract_tb(error.__traceback__)
            found.append(
                (type(error), str(error), [(i.filename, i.name, i.lineno) for i in frames if i.name != "lines"])
            )
            error = error.__cause__ or error.__context__
        return found

    compiled = kiln.compile(f)
    expected = lines(f)
    for _ in range(2):
        assert lines(compiled) == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.hann_window(3, dtype=torch.int64),
        lambda: torch.kaiser_window(3, True, 12.0, dtype=torch.int64),
        lambda: torch.arange(0, 3, dtype=torch.bool),
        lambda: torch.arange(0, 3, dtype=torch.complex64),
        lambda: torch.linspace(0, 1, 3, dtype=torch.bool),
        lambda: torch.logspace(0, 1, 3, dtype=torch.bool),
        lambda: torch.tril_indices(3, 3, dtype=torch.uint8),
        lambda: torch.triu_indices(3, 3, dtype=torch.float32),
        lambda: torch.full((2,), 1 + 2j, dtype=torch.float32),
        lambda: torch.full((2,), 1 + 2j, dtype=torch.int64),
    ],
)
def test_what_a_factory_refuses_is_refused_where_nobody_uses_it(make):
    def f(x):
        try:
            make()
        except RuntimeError as error:
            return x + 1, type(error).__name__, str(error)
        return x - 1, None, None

    x = torch.zeros(2)
    want, got = f(x), kiln.compile(f)(x)
    assert want[1] is not None
    assert got[1:] == want[1:]
    assert torch.equal(got[0], want[0])
