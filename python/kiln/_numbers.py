"""Python floats whose value changes from call to call, as captured code sees them: arithmetic that goes into the graph."""

from __future__ import annotations

import operator

import torch

from kiln import _C


def is_number(o):
    return _C._number("is", o)


def specialize(number):
    """Ends this attempt: the floats that `number` comes from are constants in the next one."""
    _C._number("specialize", number.sources)


def value(tensor):
    """The float that a number is when the captured part is left."""
    return tensor.item()


class Number:
    """Stands for a float that the graph gets as a 0-dim float64 tensor. What needs its value makes it a constant."""

    __slots__ = ("sources", "tensor")

    def __init__(self, tensor, sources):
        self.tensor = tensor  # 0-dim, float64
        self.sources = sources  # of the floats that it was computed from

    @property
    def __class__(self):  # isinstance(number, float)
        return float

    def __neg__(self):
        return Number(-self.tensor, self.sources)

    def __pos__(self):
        return self

    def __abs__(self):
        return Number(self.tensor.abs(), self.sources)

    def __getattr__(self, name):
        specialize(self)


def arithmetic(name):
    """A method for `name` and its reflected form, between numbers and floats; tensors never come here (see binary)."""
    function = getattr(operator, name)

    def method(self, other):
        if is_number(other):
            if name == "truediv":  # by zero is an exception
                specialize(other)
            return Number(function(self.tensor, other.tensor), self.sources + other.sources)
        if isinstance(other, (int, float)):
            if name == "truediv" and other == 0:
                specialize(self)
            return Number(function(self.tensor, other), self.sources)
        return NotImplemented

    def reflected(self, other):
        if isinstance(other, (int, float)):
            if name == "truediv":
                specialize(self)
            return Number(function(other, self.tensor), self.sources)
        return NotImplemented

    return method, reflected


def refuse(name):
    """A method that needs the value."""

    def method(self, *args, **kwargs):
        specialize(self)

    method.__name__ = name
    return method


for _name in ("add", "sub", "mul", "truediv"):
    _method, _reflected = arithmetic(_name)
    setattr(Number, f"__{_name}__", _method)
    setattr(Number, f"__r{_name}__", _reflected)
for _name in (
    "floordiv",
    "mod",
    "divmod",
    "pow",
    "rfloordiv",
    "rmod",
    "rdivmod",
    "rpow",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
):
    setattr(Number, f"__{_name}__", refuse(_name))
for _name in (
    "hash",
    "bool",
    "int",
    "float",
    "complex",
    "index",
    "round",
    "trunc",
    "floor",
    "ceil",
    "str",
    "repr",
    "format",
):
    setattr(Number, f"__{_name}__", refuse(_name))
for _name in ("array", "copy", "deepcopy", "reduce_ex", "reduce"):
    setattr(Number, f"__{_name}__", refuse(_name))


def operand(number, tensor):
    """`number` as the tensor that, with `tensor` as the other operand, gives what the float would give: in the type that
    the float is converted to."""
    dtype = tensor.dtype
    if dtype is torch.float64 or dtype is torch.complex128:
        return number.tensor
    if dtype is torch.float32 or dtype is torch.complex64:
        return number.tensor.to(torch.float32)
    if dtype.is_floating_point or dtype.is_complex:  # half precision computes with more digits than it stores
        specialize(number)
    return number.tensor.to(torch.get_default_dtype())


# Functions that take a tensor wherever they take a float, for operands of one type.
ELEMENTWISE = {
    "mul",
    "multiply",
    "div",
    "divide",
    "true_divide",
    "add",
    "sub",
    "subtract",
    "rsub",
    "lerp",
    "pow",
    "where",
}
COMPARISONS = {"lt", "le", "gt", "ge", "eq", "ne"}
IN_PLACE = {"iadd": "add_", "isub": "sub_", "imul": "mul_", "itruediv": "div_"}


def binary(name, a, b):
    """A binary operator between a tensor and a number."""
    if is_number(a):
        if name in IN_PLACE:  # a name is bound anew
            name = name[1:]
        if name in ("add", "sub", "mul", "truediv") or name in COMPARISONS:
            return getattr(operator, name)(operand(a, b), b)
        specialize(a)
    if name in IN_PLACE:
        return getattr(a, IN_PLACE[name])(operand(b, a))
    if name in ("add", "sub", "mul", "truediv") or name in COMPARISONS:
        return getattr(operator, name)(a, operand(b, a))
    specialize(b)


def call(function, args, kwargs):
    """A call of a torch function or method with a number among its arguments."""
    name = function.__name__
    base = name[:-1] if name.endswith("_") else name
    numbers = [a for a in (*args, *kwargs.values()) if is_number(a)]
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if len(tensors) == 0 or len(tensors) < len([a for a in args if not is_number(a)]):
        specialize(numbers[0])
    first = tensors[0]
    if len(kwargs) > 0:  # alpha and value scale in the type of the result
        for t in tensors:
            if t.dtype != first.dtype:
                specialize(numbers[0])
    if base in ("add", "sub") and len(tensors) == 2 and list(kwargs) == ["alpha"]:
        return function(first, tensors[1] * operand(kwargs["alpha"], tensors[1]))
    if base in ("addcmul", "addcdiv") and len(tensors) == 3 and list(kwargs) == ["value"]:
        scaled = tensors[1] * operand(kwargs["value"], tensors[1])
        update = scaled * tensors[2] if base == "addcmul" else scaled / tensors[2]
        return first.add_(update) if name.endswith("_") else first.add(update)
    if base in ELEMENTWISE and len(kwargs) == 0:
        if name == "where":
            first = tensors[-1]
        return function(*[operand(a, first) if is_number(a) else a for a in args])
    specialize(numbers[0])
