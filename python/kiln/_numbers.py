"""Python floats whose value a captured graph does not know: those that change from call to call, and what item() gives.
Captured code sees a Number, whose arithmetic goes into the graph and gives what Python's gives, bit by bit."""

from __future__ import annotations

import math
import operator

import torch

from kiln import _C


def is_number(o):
    return _C._number("is", o)


def specialize(number):
    """Ends this attempt: in the next one the floats that `number` comes from are constants, and the item() calls that it
    comes from break the graph."""
    _C._number("specialize", number.sources)


def run_in_eager_if(condition, number):
    """Has a call for which `condition`, a bool tensor, holds run in eager: `number`'s arithmetic raises an exception then,
    or leaves the floats. It is asked before the graph runs, so it must depend on nothing but single elements."""
    _C._number("eager_if", condition, number.sources)


def value(tensor):
    """The float that a number is when the captured part is left."""
    return tensor.item() if isinstance(tensor, torch.Tensor) else tensor


def item(tensor, source):
    """What item() gives for a tensor of one element."""
    tensor = tensor.detach()
    # A copy: the tensor may be written in place later.
    tensor = tensor.clone() if tensor.dtype is torch.float64 else tensor.to(torch.float64)
    return Number(tensor.reshape(()) if tensor.dim() > 0 else tensor, (source,))


def joined(a, b):
    """The sources of both numbers."""
    return a.sources if a.sources == b.sources else a.sources + tuple([s for s in b.sources if s not in a.sources])


def is_constant(o):
    """An operand whose arithmetic with a float is that of floats; NumPy's scalars have their own."""
    return type(o) is float or type(o) is int or type(o) is bool


def constant(c):
    return torch.tensor(float(c), dtype=torch.float64)


class Number:
    """Stands for a float that the graph has as a 0-dim float64 tensor. What needs its value ends the attempt."""

    __slots__ = ("nonzero", "sources", "tensor")

    def __init__(self, tensor, sources, nonzero=False):
        self.tensor = tensor  # 0-dim, float64
        self.sources = sources  # of the floats and the item() calls that it was computed from
        self.nonzero = nonzero  # known to be no zero

    @property
    def __class__(self):  # isinstance(number, float)
        return float

    def __neg__(self):
        return Number(-self.tensor, self.sources, self.nonzero)

    def __pos__(self):
        return self

    def __abs__(self):
        return Number(self.tensor.abs(), self.sources, self.nonzero)

    def __truediv__(self, other):
        if is_number(other):
            check_divisor(other)
            return Number(self.tensor / other.tensor, joined(self, other))
        if not is_constant(other):
            return NotImplemented
        if other == 0:  # an exception
            specialize(self)
        return Number(self.tensor / float(other), self.sources)

    def __rtruediv__(self, other):
        if not is_constant(other):
            return NotImplemented
        check_divisor(self)
        # Of a tensor: a number divided by a tensor is a product with its reciprocal.
        return Number(constant(other) / self.tensor, self.sources)

    def __pow__(self, other, modulo=None):
        if modulo is not None:
            specialize(self)
        return power(self, other) if is_number(other) or is_constant(other) else NotImplemented

    def __rpow__(self, other, modulo=None):
        return power(other, self) if is_constant(other) else NotImplemented

    def __getattr__(self, name):
        specialize(self)


def check_divisor(number):
    if not number.nonzero:
        run_in_eager_if(number.tensor == 0, number)


def power(a, b):
    """a ** b. The exponent is always a tensor: for some numbers torch.pow has formulas of its own, and for a single
    element of float64 it otherwise calls the C library's pow, as Python does."""
    if not is_number(a):
        result = Number(torch.pow(float(a), b.tensor), b.sources)
    elif not is_number(b):
        result = Number(torch.pow(a.tensor, constant(b)), a.sources)
    else:
        result = Number(torch.pow(a.tensor, b.tensor), joined(a, b))
    # Python raises for overflow and for zero to a negative power, and gives complex numbers for roots of negative ones.
    run_in_eager_if((result.tensor.abs() < math.inf).logical_not(), result)
    return result


def arithmetic(name):
    """A method for `name` and its reflected form, between numbers and floats; tensors never come here (see binary)."""
    function = getattr(operator, name)

    def method(self, other):
        if is_number(other):
            return Number(function(self.tensor, other.tensor), joined(self, other))
        return Number(function(self.tensor, float(other)), self.sources) if is_constant(other) else NotImplemented

    def reflected(self, other):
        return Number(function(float(other), self.tensor), self.sources) if is_constant(other) else NotImplemented

    return method, reflected


def refuse(name):
    """A method that needs the value."""

    def method(self, *args, **kwargs):
        specialize(self)

    method.__name__ = name
    return method


for _name in ("add", "sub", "mul"):
    _method, _reflected = arithmetic(_name)
    setattr(Number, f"__{_name}__", _method)
    setattr(Number, f"__r{_name}__", _reflected)
for _name in ("floordiv", "mod", "divmod", "rfloordiv", "rmod", "rdivmod", "eq", "ne", "lt", "le", "gt", "ge"):
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


def largest(*args):
    """max() of two."""
    return select(operator.gt, args)


def smallest(*args):
    """min() of two."""
    return select(operator.lt, args)


def first_number(args):
    return next(a for a in args if is_number(a))


def select(wins, args):
    number = first_number(args)
    if len(args) != 2 or not (is_number(args[1]) or type(args[1]) is float):
        specialize(number)
    if not (is_number(args[0]) or type(args[0]) is float):  # an int may come out
        specialize(number)
    a, b = [x.tensor if is_number(x) else x for x in args]
    # The larger of a positive constant and anything is no zero.
    nonzero = [not is_number(c) and wins(c, 0.0) for c in args]
    sources = joined(args[0], args[1]) if is_number(args[0]) and is_number(args[1]) else number.sources
    return Number(torch.where(wins(b, a), b, a), sources, nonzero[0] or nonzero[1])


def square_root(number):
    """math.sqrt."""
    run_in_eager_if(number.tensor < 0, number)
    return Number(number.tensor.sqrt(), number.sources)


def as_float(number):
    return number


def as_tensor(number, dtype=None, **others):
    """torch.tensor and torch.as_tensor."""
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not is_number(number) or len(others) > 0 or (dtype is not torch.float32 and dtype is not torch.float64):
        specialize(first_number((number, *others.values())))
    return number.tensor.to(dtype, copy=True)


# What takes numbers as they are; by the function that the program calls.
FUNCTIONS = {
    max: largest,
    min: smallest,
    math.sqrt: square_root,
    float: as_float,
    torch.tensor: as_tensor,
    torch.as_tensor: as_tensor,
}


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
        if name == "truediv":  # as torch.Tensor.__rdiv__ does it
            b = b.reciprocal()
            return b * operand(a, b)
        if name in ("add", "sub", "mul") or name in COMPARISONS:
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
    if name.startswith("_foreach_"):
        return call_each(name[9:], args, kwargs)
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
    if base == "pow" and not is_number(args[0]):  # some exponents have formulas of their own
        specialize(numbers[0])
    if base in ELEMENTWISE and len(kwargs) == 0:
        if name == "where":
            first = tensors[-1]
        return function(*[operand(a, first) if is_number(a) else a for a in args])
    specialize(numbers[0])


def call_each(name, args, kwargs):
    """A torch._foreach function with numbers in the last of its lists."""
    numbers = args[-1]
    base = name[:-1] if name.endswith("_") else name
    if len(kwargs) > 0 or base not in ("add", "sub", "mul", "div", "addcmul", "addcdiv"):
        specialize(first_number(numbers))
    results = []
    for first, *others, number in zip(*args, strict=True):
        method = getattr(first, name)
        results.append(method(*others, value=number) if base.startswith("addc") else method(number))
    return None if name.endswith("_") else results
