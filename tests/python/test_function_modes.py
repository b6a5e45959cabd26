"""TorchFunctionModes and `with torch.device(...)`, inside compiled functions and around them."""

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import kiln
from helpers import breaks, check
from kiln.testing import CompileCounter, assert_same

X = torch.linspace(-1, 1, 6).reshape(2, 3)


class Names(TorchFunctionMode):
    """Keeps the names of what is called, and subtracts where the program adds."""

    def __init__(self, change=True):
        super().__init__()
        self.names, self.change = [], change

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(getattr(func, "__name__", str(func)))
        if self.change and func is torch.add:
            func = torch.sub
        return func(*args, **(kwargs or {}))


class Scaled(TorchFunctionMode):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def __torch_function__(self, func, types, args=(), kwargs=None):
        r = func(*args, **(kwargs or {}))
        return r * self.factor if func is torch.sin else r


def device(x):
    with torch.device("cpu"):
        a, b, c = torch.arange(3), torch.zeros(2, 3), torch.tensor([1.0, 2.0, 3.0])
    return x + a + b * c, torch.full((2,), 3.0)


def observed(x):
    with Names() as mode:
        y = torch.add(x, 1) * 2
        z = y[0] + y.mT.shape[0]
        w = F.relu(F.linear(y, x))
    return y.sum() + z, w, mode.names, torch.add(x, 1)


def within_another(x):
    with Scaled(2.0), Names(), Scaled(3.0):
        return torch.sin(x), torch.add(x, x)


def left_by_an_exception(x):
    try:
        with Scaled(2.0):
            y = torch.sin(x)
            raise ValueError
    except ValueError:
        return y, torch.sin(x)


@pytest.mark.parametrize("f", [device, observed, within_another, left_by_an_exception])
def test_inside_one_graph(f):
    check(f, X)
    assert breaks(f, X) == 0


def over_a_break(x):
    with Scaled(2.0):
        y = torch.sin(x)
        kiln.graph_break()
        z = torch.sin(y)
    return y, z, torch.sin(x)


def device_over_a_break(x):
    with torch.device("cpu"):
        a = torch.arange(3)
        kiln.graph_break()
        b = torch.zeros(2, 3) + a
    return x + b, torch.ones(2)


@pytest.mark.parametrize("f", [over_a_break, device_over_a_break])
def test_a_break_inside_the_block(f):
    check(f, X, calls=3)
    assert torch.overrides._len_torch_function_stack() == 0


def test_each_mode_around_a_call_is_seen():
    """They are guarded by more than their number."""

    def f(x):
        return torch.sin(torch.add(x, 1)) * 2

    for compiled in (kiln.compile(f), kiln.compile(f, backend=CompileCounter())):
        torch.testing.assert_close(compiled(X), f(X))
        for make in (
            Names,
            lambda: Names(False),
            lambda: Scaled(2.0),
            lambda: Scaled(3.0),
            lambda: torch.device("cpu"),
        ):
            with make() as mode:
                expected = f(X)
                names = list(getattr(mode, "names", []))
            with make() as mode:
                actual = compiled(X)
                assert list(getattr(mode, "names", [])) == names
            torch.testing.assert_close(actual, expected)


def test_a_mode_left_active():
    mode = Scaled(2.0)

    def f(x):
        mode.__enter__()
        return torch.sin(x)

    compiled = kiln.compile(f)
    for g in (f, compiled, compiled):
        try:
            assert torch.equal(g(X), X.sin() * 2)
            assert torch.equal(torch.sin(X), X.sin() * 2)
        finally:
            mode.__exit__(None, None, None)
    assert torch.overrides._len_torch_function_stack() == 0


def test_backends_get_what_the_mode_makes_of_the_calls():
    counter = CompileCounter()
    check(within_another, X, fullgraph=True, backend=counter)
    assert counter.frame_count == 1


def test_a_mode_that_existed_before():
    def run(wrap):
        mode = Names()

        def f(x):
            with mode:
                y = torch.add(x, 1)
            return torch.add(y, 1), len(mode.names)

        g = wrap(f)
        return [g(X) for _ in range(3)], mode.names

    assert_same(run(kiln.compile), run(lambda f: f))


class Overrides:
    """No tensor, and has its own way with torch's functions."""

    def __init__(self, value):
        self.value = value

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return cls(func(*(a.value if isinstance(a, cls) else a for a in args), **(kwargs or {})))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.add(x, Overrides(x)).value,
        lambda x: F.softmax(Overrides(x), -1).value,
        lambda x: F.relu(Overrides(x)).value + torch.overrides.has_torch_function((x, Overrides(x))),
        lambda x: x + torch.overrides.has_torch_function_unary(Overrides(x)),
        lambda x: x + torch.overrides.has_torch_function_variadic(x, x),
    ],
    ids=["c", "python", "asked", "unary", "none"],
)
def test_an_object_with_its_own_torch_function(f):
    x = torch.randn(3)
    assert_same(kiln.compile(f)(x), f(x))


def test_gradients_under_a_mode():
    # Guards on .grad, and writes of it on leaving, are not the program's calls.
    def run(wrap):
        w = torch.ones(3, requires_grad=True)

        def f(x):
            if w.grad is not None:
                x = x + w.grad
            w.grad = None
            (w * x).sum().backward()
            return x * 2

        g = wrap(f)
        modes = [Names() for _ in range(3)]
        results = []
        for mode in modes:
            with mode:
                results.append(g(X[0, :3]))
        return results, [mode.names for mode in modes]

    assert_same(run(kiln.compile), run(lambda f: f))
