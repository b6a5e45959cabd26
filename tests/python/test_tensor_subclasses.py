"""Subclasses of torch.Tensor made in Python: their __torch_function__, methods and attributes are followed."""

import warnings

import pytest
import torch
from torch import nn

import kiln
from helpers import tensors, training_step
from kiln.testing import CompileCounter, assert_same

NO_CLASSES = torch._C.DisableTorchFunctionSubclass


class Plain(torch.Tensor):
    kind = "plain"

    def twice(self):
        return self * 2

    @property
    def rows(self):
        return self.shape[0]


class Logged(torch.Tensor):
    log = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.log.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


class WithUnit(torch.Tensor):
    """Carries an attribute from operands to results."""

    @staticmethod
    def __new__(cls, data, unit="m"):
        made = torch.Tensor._make_subclass(cls, data)
        made.unit = unit
        return made

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, cls) and not hasattr(result, "unit"):
            result.unit = next(a.unit for a in args if isinstance(a, WithUnit))
        return result


class Handled(torch.Tensor):
    functions = {torch.mean: lambda t: t.as_subclass(torch.Tensor) * 7}

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return cls.functions[func](*args, **(kwargs or {})) if func in cls.functions else NotImplemented


class Operators(torch.Tensor):
    factor = 2

    def __add__(self, other):
        return super().__add__(other) * self.factor

    def __len__(self):
        return 17

    def __bool__(self):
        return False

    def sum(self, *args, **kwargs):
        return super().sum(*args, **kwargs) + 100


class Disabled(Operators):
    __torch_function__ = torch._C._disabled_torch_function_impl


class Says:
    """No tensor itself."""

    def __neg__(self):
        return self * 5


class Mixed(Says, torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl


def make(cls, rows=2):
    x = (torch.arange(3.0 * rows).reshape(rows, 3) / 5).as_subclass(cls)
    if cls is WithUnit:
        x.unit = "s"
    return x


def same(actual, expected):
    with NO_CLASSES():
        assert_same(actual, expected)
        assert_same([vars(t) for t in tensors(actual)], [vars(t) for t in tensors(expected)])


def writes(x):
    x.add_(1)
    x[0] = 5
    x.note = "written"
    return x.twice(), x


def branches(x):
    return (x * 2 if x else x * 3), len(x)


def in_a_context(x):
    with NO_CLASSES():
        y = x + 1
    with torch._C.DisableTorchFunction():
        return y, type(x * 2) is torch.Tensor, x + 1


PROGRAMS = {
    "results": (Plain, lambda x: (x + 1, torch.stack([x, x]), x.max(1), x.split(1), x.shape)),
    "functions": (Plain, lambda x: (nn.functional.softmax(x, -1), torch.nn.functional.linear(x, x))),
    "its own": (Plain, lambda x: (x.twice(), x.kind, x.rows, isinstance(x * 2, Plain), type(x))),
    "writes": (Plain, writes),
    "contexts": (Plain, in_a_context),
    "to tensors": (Plain, lambda x: (x.as_subclass(torch.Tensor) + 1, (x * 2).as_subclass(Operators) + 1)),
    "a vmap": (Plain, lambda x: torch.vmap(torch.sin)(x)),
    "logged": (Logged, lambda x: (x.sin() + x.size(0), torch.add(x, 1), len(x), x.dtype)),
    "units": (WithUnit, lambda x: ((x * 2).sin(), (x + 1).unit, WithUnit(x.as_subclass(torch.Tensor), "kg") / 2)),
    "handled": (Handled, lambda x: torch.mean(x)),
    "operators": (Operators, lambda x: (x + 1, x.sum(), x * 2)),
    "asked": (Operators, branches),
    "disabled": (Disabled, lambda x: (x + 1, torch.relu(x), x.sum(), branches(x))),
    "mixed": (Mixed, lambda x: (-x, x * 2)),
    "made": (torch.Tensor, lambda x: (Plain(x * 2), Plain([1.0, 2.0]), x.as_subclass(Logged).cos())),
}


@pytest.mark.parametrize("backend", ["kiln", "custom"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_graph(name, backend):
    cls, f = PROGRAMS[name]
    compiled = kiln.compile(f, fullgraph=True, backend="kiln" if backend == "kiln" else lambda gm, example: gm.forward)
    for _ in range(2):
        Logged.log.clear()
        expected_input, expected_log = make(cls), Logged.log
        expected = f(expected_input)
        expected_log = list(Logged.log)
        actual_input = make(cls)
        Logged.log.clear()
        actual = compiled(actual_input)
        assert Logged.log == expected_log
        same(actual, expected)
        same(actual_input, expected_input)


@pytest.mark.parametrize("backend", ["kiln", "custom"])
@pytest.mark.parametrize("cls", [Plain, Logged, WithUnit, Operators, Disabled])
def test_gradients(cls, backend):
    def f(x):
        return (x.sin() * x + 1).relu()

    def gradient(f):
        leaf = torch.linspace(-1, 1, 6).reshape(2, 3).requires_grad_()
        x = leaf.clone().as_subclass(cls)
        if cls is WithUnit:
            x.unit = "s"
        y = f(x)
        assert type(y) is (torch.Tensor if cls is Disabled else cls)
        with NO_CLASSES():
            y.as_subclass(torch.Tensor).square().sum().backward()
        return leaf.grad

    compiled = kiln.compile(f, backend="kiln" if backend == "kiln" else lambda gm, example: gm.forward)
    assert_same(gradient(compiled), gradient(f))


def test_one_graph_for_many_sizes():
    counter = CompileCounter()

    def f(x):
        return x.view(x.shape[0] * x.size(1)) / x.rows

    compiled = kiln.compile(f, backend=counter, fullgraph=True)
    for rows in (4, 6, 5, 9, 12):
        same(compiled(make(Plain, rows)), f(make(Plain, rows)))
    assert counter.frame_count == 2


def test_what_is_guarded():
    def f(x):
        return x + 1, getattr(x, "factor", None)

    compiled = kiln.compile(f)
    x = make(Operators)
    for change in (
        lambda: None,
        lambda: setattr(x, "factor", 9),
        lambda: delattr(x, "factor"),
        lambda: setattr(Operators, "factor", 3),
        lambda: setattr(Operators, "__torch_function__", classmethod(lambda *args, **kwargs: "patched")),
        lambda: delattr(Operators, "__torch_function__"),
        lambda: setattr(Operators, "factor", 2),
    ):
        change()
        same(compiled(x), f(x))
    for cls in (torch.Tensor, Plain, Logged, Operators):
        same(compiled(make(cls)), f(make(cls)))
    with NO_CLASSES():
        same(compiled(make(Plain)), f(make(Plain)))


def test_a_break_inside_a_context():
    def f(x):
        with NO_CLASSES():
            y = x + 1
            kiln.graph_break()
            y = y * x
        return y, x + 1

    same(kiln.compile(f)(make(Plain)), f(make(Plain)))
    assert torch._C._is_torch_function_enabled()


@pytest.mark.parametrize("message", ["no handler", "no common class"])
def test_errors(message):
    x, y = make(Handled), make(Plain)

    def f(x, y):
        return torch.sin(x) if message == "no handler" else make(Logged) + y

    with pytest.raises(TypeError) as expected:
        f(x, y)
    with pytest.raises(TypeError) as actual:
        kiln.compile(f)(x, y)
    assert str(actual.value) == str(expected.value)


class Weight(nn.Parameter):
    log = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.log.append(func.__name__)
        with NO_CLASSES():
            result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.Tensor.mul else result


def test_a_training_step_of_a_module_with_subclasses(recwarn):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.weight = Weight(torch.ones(3))
            self.register_buffer("scale", make(Plain, 1) + 1)

        def forward(self, x):
            return self.linear(x) * self.scale + self.weight * x

    def train(compile):
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

        step = compile(training_step(model, optimizer))
        Weight.log.clear()
        losses = [step(torch.ones(2, 3) * k) for k in range(4)]
        log = list(Weight.log)
        return [losses, log, [p.detach().as_subclass(torch.Tensor) for p in model.parameters()]]

    # Neither guards nor effects ask the class: it is called for what the program does.
    same(train(lambda step: kiln.compile(step, fullgraph=True)), train(lambda step: step))
    assert not recwarn.list


def test_classes_that_stay_in_eager():
    class Attributes(torch.Tensor):
        def __getattr__(self, name):
            if name == "answer":
                return 42
            raise AttributeError(name)

    def f(x):
        return x * x.answer

    with pytest.warns(UserWarning, match="a tensor of class Attributes"):
        same(kiln.compile(f)(make(Attributes)), f(make(Attributes)))


def test_the_end_of_a_stand_in_is_nobodys():
    def f():
        ended = []

        class Tensor(torch.Tensor):
            def __del__(self):
                ended.append(len(ended))

        t = Tensor(torch.ones(2))
        kiln.graph_break()
        before = list(ended)
        del t
        return before, ended

    compiled = kiln.compile(f)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert [compiled() for _ in range(3)] == [f()] * 3
