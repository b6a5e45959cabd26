"""Functions that are made anew for each call (closures, lambdas): others of the same code are served by one entry, and
what is read of them, or which one it is, is guarded all the same."""

import functools
import warnings

import pytest
import torch
from torch import nn

import kiln
from kiln.testing import assert_same

X = torch.linspace(-1, 1, 6)
KNOWN = []


def compare(f, make, calls=6, most=3):
    """Calls f(X, make(n)) in eager and compiled, for n below `calls`; at most `most` entries."""
    compiled = kiln.compile(f)
    for n in range(calls):
        assert_same(f(X, make(n)), compiled(X, make(n)))
    assert len(compiled._entries) <= most
    return len(compiled._entries)


def scaled(n):
    t = torch.tensor(float(n))

    def scale(x):
        return x * t

    return scale


def by_float(n):
    return lambda x: x * (n + 0.5)


def with_default(n):
    return lambda x, factor=torch.tensor(n + 1.0): x * factor


def with_keyword(n):
    def f(x, *, factor=torch.tensor(n + 1.0)):
        return x * factor

    return f


def nested(n):
    inner = scaled(n)
    return lambda x: inner(x) + 1


@pytest.mark.parametrize("make", [scaled, by_float, with_default, with_keyword, nested], ids=lambda f: f.__name__)
def test_closures_are_served_by_one_entry(make):
    compare(lambda x, f: f(x) + f(x + 1), make)


def test_one_closure_in_two_places():
    def f(x, fs):
        return fs[0](x) + fs[1](x)

    compiled = kiln.compile(f)
    for n in range(4):
        same = scaled(n)
        assert_same(f(X, [same, same]), compiled(X, [same, same]))
    for n in range(4):
        fs = [scaled(n), scaled(n + 2)]
        assert_same(f(X, fs), compiled(X, fs))


def test_arguments_that_may_be_left_out():
    def make(n):
        def f(x, k=None, *, more=0):
            return (x if k is None else x * k) + more

        f.__defaults__ = (None, 2.0, n + 1, torch.tensor(n + 1.0))[n % 4 :][:1]
        f.__kwdefaults__ = {"more": n // 4}
        return f

    compare(lambda x, f: f(x), make, calls=8, most=8)
    compare(lambda x, f: f(x, 3), make, calls=8, most=8)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "f",
    [
        lambda x, f: x + 1 if f is KNOWN[0] else x - 1,
        lambda x, f: x + 1 if f in {KNOWN[0]: 1} else x - 1,
        lambda x, f: x + 1 if f == KNOWN[0] else x - 1,
        lambda x, f: x + {KNOWN[0]: 1.0}.get(f, 2.0),
        lambda x, f: x + 1 if [KNOWN[0]].count(f) else x - 1,
        lambda x, f: x + (1 if f.__name__ == "scale" else 2) * getattr(f, "factor", 3),
    ],
)
def test_which_function_it_is(f):
    KNOWN[:] = [scaled(0)]

    def make(n):
        if n == 3:
            return KNOWN[0]
        made = scaled(n)
        if n == 4:
            made.factor = 5.0
        if n == 5:
            made.__name__ = "another"
        return made

    compare(f, make, most=8)


def test_what_is_stored_on_a_closure():
    def f(x, f):
        f.seen = x.sum()
        return f(x), f.seen

    def make(n):
        made = scaled(n)
        made.seen = None
        return made

    compare(f, make, most=4)


def test_closures_behind_a_graph_break():
    """As optimizers with a closure have them."""

    def run(compile):
        torch.manual_seed(0)
        model = nn.Linear(6, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x, target):
            def closure():
                optimizer.zero_grad()
                loss = (model(x) - target).pow(2).mean()
                loss.backward()
                return loss

            return optimizer.step(closure)

        step = compile(step)
        return [step(X * n, torch.ones(2)).detach() for n in range(6)], list(model.parameters())

    assert_same(run(lambda f: f), run(kiln.compile), rtol=1e-5, atol=1e-6)


def test_functions_that_die_before_the_next_call():
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, f):
            return f(x)

        @staticmethod
        def backward(ctx, g):
            return g, None

    @kiln.disable(recursive=False)
    def call(x, n):
        return Scaled.apply(x, lambda y: y * n)

    compiled = kiln.compile(lambda x, n: call(x, n) + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the recompile limit
        for n in range(20):
            assert_same(X * n + 1, compiled(X, torch.tensor(float(n))))


def test_breaking_functions_that_are_given_on():
    @functools.wraps(scaled)
    def call(x, f):
        y = f(x)
        print(end="")
        torch._C._autograd._supported_activities()  # what breaks the graph
        return y + f(y)

    compiled = kiln.compile(call)
    for n in range(12):
        assert_same(call(X, scaled(n)), compiled(X, scaled(n)))
    assert len(compiled._entries) <= 3


def test_switched_off(monkeypatch):
    monkeypatch.setenv("KILN_DISABLE_PASSES", "capture.changing_functions")
    with kiln.config.patch(disable_passes="capture.changing_functions"):
        functions = [scaled(n) for n in range(4)]  # those that are gone have no entries
        assert compare(lambda x, f: f(x), functions.__getitem__, calls=4, most=4) == 4
