"""Python floats and ints whose value a captured graph does not know: those that change from call to call, and what
item() gives.
Captured code sees a Number, whose arithmetic goes into the graph and gives what Python's gives, bit by bit."""

from __future__ import annotations

import math
import operator
import re

import torch

from kiln import _C
from kiln._sizes import Real, Size

# Magnitudes of ints up to which float64 is exact, and which int64 holds.
EXACT, LARGEST = 2**53, 2**63 - 1
LARGEST_SIZE = 2**48
# Of what is computed of ints that may be any.
LARGEST_RESULT = 2**62


def is_number(o):
    return _C._number("is", o)


def open_class(o):
    """int or float, if `o` is a number computed of open sizes, for which type() gives that class, too; None otherwise."""
    return _C._number("open_class", o)


def specialize(number):
    """Ends this attempt: in the next one the floats that `number` comes from are constants, and the item() calls that it
    comes from break the graph."""
    _C._number("specialize", number.sources)


def run_in_eager_if(condition, number):
    """Has a call for which `condition`, a bool tensor, holds run in eager: `number`'s arithmetic raises an exception then,
    or leaves the floats. It is asked before the graph runs, so it must depend on nothing but single elements."""
    _C._number("eager_if", condition, number.sources)


def decide(condition, number, numpy=None):
    """The truth of `condition`, a bool tensor, for a branch. A guard of its own tells calls for which it is another. A bool,
    or one of NumPy's for its floats."""
    return _C._number("decide", condition, number.sources, numpy)


def value(tensor, of_class=None):
    """The float or int that a number is when the captured part is left; a float of the class `of_class`."""
    number = tensor.item() if isinstance(tensor, torch.Tensor) else tensor
    return number if of_class is None or type(number) is of_class else of_class(number)


def item(tensor, source, bound):
    """What item() gives for a tensor of one element: a float, or an int if there is a `bound`."""
    dtype = torch.float64 if bound is None else torch.int64
    # A copy: the tensor may be written in place later.
    tensor = tensor.detach().to(dtype, copy=True)
    return Number(tensor.reshape(()) if tensor.dim() > 0 else tensor, (source,), bound=bound)


def joined(a, b):
    """The sources of both numbers."""
    return a.sources if a.sources == b.sources else a.sources + tuple([s for s in b.sources if s not in a.sources])


def of_numpy(value, numpy):
    """The constant `value` of NumPy's class, as an operand of other numbers."""
    return Number(constant(value), (), value != 0, numpy=numpy)


def sources_of(a, b):
    """Of those two operands that are numbers."""
    if not is_number(a):
        return b.sources
    return joined(a, b) if is_number(b) else a.sources


def is_constant(o):
    """An operand whose arithmetic is that of floats and ints; NumPy's scalars have their own."""
    return type(o) is float or type(o) is int or type(o) is bool


def is_int(o):
    """Of numbers and constants."""
    return o.bound is not None if is_number(o) else type(o) is not float


def numpy_of(a, b):
    """The class of a float that is computed of both, if it is NumPy's: it is as soon as one of them is."""
    if is_number(a) and a.numpy is not None:
        return a.numpy
    return b.numpy if is_number(b) else None


def bound_of(o):
    return o.bound if is_number(o) else abs(int(o))


def constant(c):
    return torch.tensor(float(c), dtype=torch.float64)


def as_operand(o):
    """A number's tensor, or the constant, as a float."""
    if not is_number(o):
        return float(o)
    return o.tensor if o.bound is None else o.tensor.to(torch.float64)


def number_of(a, b):
    """One of two operands that is a number."""
    return a if is_number(a) else b


def narrowed(o, bound, number):
    """The int `o` as one of at most `bound`, a power of two, in magnitude: if it is a number that may be larger, a call in
    which it is runs in eager. A larger constant ends the attempt with `number`."""
    if bound_of(o) <= bound:
        return o
    if not is_number(o):
        specialize(number)
    run_in_eager_if(o.tensor.to(torch.float64).abs() >= bound, o)
    return Number(o.tensor, o.sources, o.nonzero, bound, o.numpy)


def asked(function, a, b, bound):
    """The bound of the int function(a, b), which may be up to `bound`: a call in which it leaves int64 runs in eager."""
    if bound <= LARGEST:
        return bound
    # Half of it: float64 rounds.
    too_large = function(as_operand(a), as_operand(b)).abs() >= LARGEST_RESULT / 2
    run_in_eager_if(too_large, Number(None, sources_of(a, b)))
    return LARGEST_RESULT


def whole(tensor, a, b, bound):
    """An int computed from `a` and `b`."""
    result = Number(tensor, sources_of(a, b), bound=bound)
    if bound > LARGEST:
        specialize(result)
    return result


def real(tensor, a, b):
    """A float computed of `a` and `b`."""
    numpy = numpy_of(a, b)
    if numpy is None:
        return Number(tensor, sources_of(a, b))
    return finite(tensor, sources_of(a, b), numpy)  # NumPy warns of what is not


class Number:
    """Stands for a float that the graph has as a 0-dim float64 tensor, or an int that it has as one of int64. What needs its
    value ends the attempt."""

    __slots__ = ("bound", "nonzero", "numpy", "sources", "tensor")

    def __init__(self, tensor, sources, nonzero=False, bound=None, numpy=None):
        self.tensor = tensor  # 0-dim
        self.sources = sources  # of the floats, ints and item() calls that it was computed from
        self.nonzero = nonzero  # known to be no zero
        self.bound = bound  # an int: its magnitude is no larger. None: a float
        self.numpy = numpy  # np.float64, if it is one

    @property
    def __class__(self):  # isinstance(number, float)
        if self.numpy is not None:
            return self.numpy
        return float if self.bound is None else int

    def __neg__(self):
        if self.bound is not None:
            self = narrowed(self, LARGEST_RESULT, self)
        return Number(-self.tensor, self.sources, self.nonzero, self.bound, self.numpy)

    def __pos__(self):
        return self

    def __abs__(self):
        if self.bound is not None:
            self = narrowed(self, LARGEST_RESULT, self)
        return Number(self.tensor.abs(), self.sources, self.nonzero, self.bound, self.numpy)

    def __bool__(self):
        return decide(self.tensor != 0, self)

    def __getattr__(self, name):
        specialize(self)


class Text:
    """Stands for a str that `function` makes of `args`, numbers and sizes of the graph among them, or for a number that
    round() makes of one. It is made when the captured part is left, if anything is left that wants it; what needs it
    before ends the attempt."""

    __slots__ = ("args", "function", "sample")

    def __init__(self, function, args, sample):
        self.function = function  # of Python's own, without effects
        self.args = args  # numbers, sizes, texts, constants, tuples of such
        self.sample = sample  # what it is for some numbers

    @property
    def __class__(self):  # isinstance(text, str)
        return type(self.sample)


def need_text(self, *args):
    _C._number("text", self)


for _name in (
    *("hash", "eq", "ne", "lt", "le", "gt", "ge", "bool", "len", "iter", "contains", "getitem"),
    *("add", "radd", "mul", "rmul", "mod", "rmod", "str", "repr", "format"),
    *("sub", "rsub", "truediv", "rtruediv", "floordiv", "rfloordiv", "pow", "rpow", "divmod", "rdivmod"),
    *("neg", "pos", "abs", "float", "int", "index", "round", "trunc", "floor", "ceil", "complex"),
    *("getattr", "copy", "deepcopy", "reduce_ex", "reduce"),
):
    setattr(Text, f"__{_name}__", need_text)

# A number that is written as a character may be none.
CHARACTER = re.compile(r"%[^%a-z]*c|:[^{}]*c}|^[^%{]*c$")


def sample(o):
    """An argument of text() with some number in the place of one that is not known. TypeError for what has no such."""
    if type(o) is Number:
        return 1 if o.bound is not None else 0.5 if o.numpy is None else o.numpy(0.5)
    if type(o) is Text:
        return o.sample
    if type(o) is Size:
        return 1
    if type(o) is Real:
        return 0.5
    if type(o) is tuple:
        return tuple([sample(x) for x in o])
    if o is None or type(o) in (str, int, float, bool):
        return o
    raise TypeError


def text(function, *args):
    """The Text, or None if the str must be made now: what is made for other numbers may be an exception."""
    formats = [function.__self__] if type(getattr(function, "__self__", None)) is str else args
    if any(type(f) is str and CHARACTER.search(f) for f in formats):
        return None
    try:
        return Text(function, args, function(*[sample(a) for a in args]))
    except Exception:
        return None


def check_divisor(divisor, number):
    """Division by zero is an exception."""
    if not is_number(divisor):
        if divisor == 0:
            specialize(number)
    elif not divisor.nonzero:
        run_in_eager_if(divisor.tensor == 0, divisor)


def divide(a, b):
    check_divisor(b, a)
    if is_int(a) and is_int(b):  # Python rounds once
        a, b = [narrowed(o, EXACT, number_of(a, b)) for o in (a, b)]
    # The dividend is a tensor: a number divided by a tensor is a product with its reciprocal.
    return real((as_operand(a) if is_number(a) else constant(a)) / as_operand(b), a, b)


def quotient_operands(a, b):
    """Of // and %: whether both are ints, and their tensors."""
    check_divisor(b, a)
    if is_int(a) and is_int(b):
        a = narrowed(a, LARGEST_RESULT, number_of(a, b))
        return True, *[o.tensor if is_number(o) else torch.tensor(int(o)) for o in (a, b)]
    return False, *[as_operand(o) if is_number(o) else constant(o) for o in (a, b)]


def floor_divide(a, b):
    ints, x, y = quotient_operands(a, b)
    quotient = torch.div(x, y, rounding_mode="floor")
    return whole(quotient, a, b, min(bound_of(a), LARGEST_RESULT)) if ints else real(quotient, a, b)


def remainder(a, b):
    ints, x, y = quotient_operands(a, b)
    rest = torch.remainder(x, y)
    if ints:
        return whole(rest, a, b, bound_of(b))
    # Python gives a zero the divisor's sign.
    return real(torch.where(rest == 0, torch.copysign(torch.zeros_like(rest), y), rest), a, b)


def want_numbers(*operands):
    """What has an arithmetic or a conversion of its own (NumPy's scalars, fractions, strings) needs the value."""
    for o in operands:
        if not (is_number(o) or is_constant(o)):
            specialize(first_number(operands))


def quotient_and_remainder(a, b):
    """divmod()."""
    want_numbers(a, b)
    return floor_divide(a, b), remainder(a, b)


def finite(tensor, sources, numpy=None):
    """A float for which Python may raise an exception, and NumPy warn, instead of being infinite or NaN."""
    result = Number(tensor, sources, numpy=numpy)
    run_in_eager_if((tensor.abs() < math.inf).logical_not(), result)
    return result


def power(a, b, modulo=None):
    """a ** b. The exponent is always a tensor: for some numbers torch.pow has formulas of its own, and for a single
    element of float64 it otherwise calls the C library's pow, as Python does."""
    if modulo is not None:
        specialize(a if is_number(a) else b)
    if is_int(a) and is_int(b):
        if is_number(b):  # the sign of the exponent decides on the class
            specialize(b)
        if b > 62:
            specialize(a)
        if b >= 0:
            return whole(torch.pow(a.tensor, int(b)), a, b, asked(torch.pow, a, b, a.bound ** int(b)))
    exponent = as_operand(b) if is_number(b) else constant(b)
    # Python raises for overflow and for zero to a negative power, and gives complex numbers for roots of negative ones.
    return finite(torch.pow(as_operand(a), exponent), sources_of(a, b), numpy_of(a, b))


def arithmetic(name, bound):
    """What computes the operator `name`. `bound` is the result's, of ints."""
    function = getattr(operator, name)

    def compute(a, b):
        if not (is_int(a) and is_int(b)):
            return real(function(as_operand(a), as_operand(b)), a, b)
        for o in (a, b):
            if not is_number(o) and bound_of(o) > LARGEST:
                specialize(number_of(a, b))
        x, y = [o.tensor if is_number(o) else int(o) for o in (a, b)]
        return whole(function(x, y), a, b, asked(function, a, b, bound(bound_of(a), bound_of(b))))

    return compute


def known(other, number):
    """An operand of `number`: an open size, or a float computed of such, is a number as well."""
    if _C._number("numpy", other):
        specialize(number)
    if open_class(other) is int:
        return Number(torch.full((), other, dtype=torch.int64), number.sources, bound=LARGEST_SIZE)
    if open_class(other) is float:
        return Number(torch.full((), other, dtype=torch.float64), number.sources)
    return other


def operators(compute):
    """A method for an operator and one for its reflected form, between numbers and constants; tensors never come here
    (see binary). For any other operand both answer as Python's protocol wants it: the other's class is asked."""

    def method(self, other, *modulo):
        other = known(other, self)
        return compute(self, other, *modulo) if is_number(other) or is_constant(other) else NotImplemented

    def reflected(self, other, *modulo):
        other = known(other, self)
        return compute(other, self, *modulo) if is_number(other) or is_constant(other) else NotImplemented

    return method, reflected


def comparison(name):
    """A method that compares a number with another, or with a constant."""
    function = getattr(operator, name)

    def method(self, other):
        other = known(other, self)
        if not (is_number(other) or is_constant(other)):
            return NotImplemented
        if is_int(self) != is_int(other):
            self, other = [narrowed(o, EXACT, self) if is_int(o) else o for o in (self, other)]
        if is_int(self) and is_int(other):
            if not is_number(other) and bound_of(other) > LARGEST:
                specialize(self)
            condition = function(self.tensor, other.tensor if is_number(other) else int(other))
        else:
            condition = function(as_operand(self), as_operand(other))
        both = self if not is_number(other) else Number(None, joined(self, other))
        return decide(condition, both, numpy_of(self, other))

    return method


def refuse(name):
    """A method that needs the value."""

    def method(self, *args, **kwargs):
        specialize(self)

    method.__name__ = name
    return method


def refuse_bits(name):
    """A method that ints have, and floats have not."""

    def method(self, *args):
        if self.bound is None:
            return NotImplemented
        specialize(self)

    method.__name__ = name
    return method


OPERATORS = {
    "add": arithmetic("add", operator.add),
    "sub": arithmetic("sub", operator.add),
    "mul": arithmetic("mul", operator.mul),
    "truediv": divide,
    "floordiv": floor_divide,
    "mod": remainder,
    "divmod": quotient_and_remainder,
    "pow": power,
}
for _name, _compute in OPERATORS.items():
    _method, _reflected = operators(_compute)
    setattr(Number, f"__{_name}__", _method)
    setattr(Number, f"__r{_name}__", _reflected)
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Number, f"__{_name}__", comparison(_name))
for _name in ("and", "or", "xor", "lshift", "rshift"):
    setattr(Number, f"__{_name}__", refuse_bits(_name))
    setattr(Number, f"__r{_name}__", refuse_bits("r" + _name))
Number.__invert__ = refuse("invert")
for _name in (
    "hash",
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
    """max()."""
    return select(operator.gt, args)


def smallest(*args):
    """min()."""
    return select(operator.lt, args)


def class_of(o):
    return o.__class__ if is_number(o) else type(o)


def first_number(args):
    return next(a for a in args if is_number(a))


def select(wins, args):
    number = first_number(args)
    for a in args:
        if not (is_number(a) or type(a) is int or type(a) is float):
            specialize(number)
    if len(args) < 2:
        specialize(number)
    best = args[0]
    for a in args[1:]:
        best = winner(wins, best, a)
    return best


def winner(wins, a, b):
    """`a`, unless `b` wins."""
    if not (is_number(a) or is_number(b)) or class_of(a) is not class_of(b):  # either may come out
        return b if wins(b, a) else a
    number = number_of(a, b)
    bound = max(bound_of(a), bound_of(b)) if is_int(number) else None
    if bound is not None and any(not is_number(o) and bound_of(o) > LARGEST for o in (a, b)):
        specialize(number)
    x, y = [o.tensor if is_number(o) else o for o in (a, b)]
    # The larger of a positive constant and anything is no zero.
    nonzero = [not is_number(o) and wins(o, 0) for o in (a, b)]
    return Number(torch.where(wins(y, x), y, x), sources_of(a, b), nonzero[0] or nonzero[1], bound, number.numpy)


def square_root(number):
    """math.sqrt."""
    run_in_eager_if(number.tensor < 0, number)
    return Number(torch.ops.kiln.c_math(as_operand(number), "sqrt"), number.sources)


def c_math(name):
    """A function of math that calls the C library's function of that name."""

    def compute(number):
        return finite(torch.ops.kiln.c_math(as_operand(number), name), number.sources)

    return compute


natural_log = c_math("log")


def logarithm(*args):
    """math.log, with or without a base."""
    want_numbers(*args)
    if any(not is_number(x) and x <= 0 for x in args):
        specialize(first_number(args))
    parts = [natural_log(x) if is_number(x) else math.log(x) for x in args]
    return parts[0] if len(parts) == 1 else divide(*parts)


def float_power(a, b):
    """math.pow."""
    want_numbers(a, b)
    x, y = [as_float(o) if is_number(o) else float(o) for o in (a, b)]
    return power(x, y)


def absolute(number):
    """math.fabs."""
    return abs(as_float(number))


def test_of_floats(predicate, of_ints):
    """A question that an int's answer is known to."""

    def ask(number):
        return of_ints if number.bound is not None else decide(predicate(number.tensor), number)

    return ask


def rounded(function):
    """What makes an int of a float; `function` rounds in float64."""

    def compute(number, digits=None):
        if digits is not None:
            specialize(first_number((number, digits)))
        if number.bound is not None:
            return number
        run_in_eager_if((number.tensor.abs() < EXACT).logical_not(), number)
        return Number(function(number.tensor).to(torch.int64), number.sources, bound=EXACT)

    return compute


def key_in(container, number):
    """The key of a dict, or the item of a set, that the number equals, or None. Each comparison is a branch."""
    if len(container) > 32:
        specialize(number)
    for key in container:
        if is_constant(key):
            if number == key:
                return key
        elif type(key) is not str and key is not None:
            specialize(number)
    return None


def as_float(number):
    return number if class_of(number) is float else Number(as_operand(number), number.sources, number.nonzero)


def as_tensor(number, dtype=None, device=None, **others):
    """torch.tensor and torch.as_tensor."""
    if not is_number(number) or not is_cpu(device) or len(others) > 0:
        specialize(first_number((number, dtype, *others.values())))
    if dtype is None:
        of_python = torch.get_default_dtype() if number.bound is None else torch.int64
        dtype = of_python if number.numpy is None else torch.float64
    if dtype is torch.int64 and number.bound is not None:
        return number.tensor.clone()
    if dtype is not torch.float32 and dtype is not torch.float64:
        specialize(number)
    return as_operand(number).to(dtype, copy=True)


def is_cpu(device):
    """Whether such an argument is no other device."""
    return device is None or torch.device(device).type == "cpu"


def stored(subject, value):
    """What `subject[...] = value` stores of a number or an open size, as a tensor."""
    if not is_number(value):
        return torch.full((), value, dtype=subject.dtype, device=subject.device)
    if value.bound is None and subject.dtype is torch.float32:
        size = value.tensor.abs()
        run_in_eager_if((size > torch.finfo(torch.float32).max) & size.isfinite(), value)
    return as_tensor(value, subject.dtype)


# What takes numbers as they are; by the function that the program calls.
def filled(size, fill_value, *, dtype=None, **options):
    """torch.full of a number that the graph computes."""
    if not is_number(fill_value) or options.get("out") is not None:
        specialize(first_number((size, fill_value, dtype, *options.values())))
    if dtype is None:
        dtype = torch.get_default_dtype() if fill_value.bound is None else torch.int64
    return torch.empty(size, dtype=dtype, **options).fill_(fill_value.tensor)


C_MATH = ("exp", "expm1", "log1p", "log2", "log10", "sin", "cos", "tan", "tanh")

FUNCTIONS = {
    max: largest,
    min: smallest,
    math.sqrt: square_root,
    math.log: logarithm,
    math.pow: float_power,
    math.fabs: absolute,
    **{getattr(math, name): c_math(name) for name in C_MATH},
    math.isfinite: test_of_floats(lambda t: t.abs() < math.inf, True),
    math.isnan: test_of_floats(lambda t: t != t, False),
    math.isinf: test_of_floats(lambda t: t.abs() == math.inf, False),
    math.floor: rounded(torch.floor),
    math.ceil: rounded(torch.ceil),
    math.trunc: rounded(torch.trunc),
    round: rounded(torch.round),
    divmod: quotient_and_remainder,
    float: as_float,
    int: rounded(torch.trunc),
    torch.tensor: as_tensor,
    torch.as_tensor: as_tensor,
    torch.full: filled,
}


def operand(number, tensor, name=""):
    """`number` as the tensor that, with `tensor` as the other operand of the operator `name`, gives what the float or int
    would give: in the type that it is converted to."""
    dtype = tensor.dtype
    if dtype is torch.float64 or dtype is torch.complex128:
        return as_operand(number)
    if dtype is torch.float32 or dtype is torch.complex64:
        return number.tensor.to(torch.float32)
    if dtype in HALVES and name in SUMS | COMPARISONS:  # what is added, or compared, is rounded first
        return rounded_as(tensor, number.tensor)
    if dtype.is_floating_point or dtype.is_complex:  # half precision computes with more digits than it stores
        specialize(number)
    if number.bound is None:
        return number.tensor.to(torch.get_default_dtype())
    if dtype is torch.int32 and number.bound < 2**31:
        return number.tensor.to(torch.int32)
    if dtype is not torch.int64 and dtype is not torch.bool:  # it may not fit
        specialize(number)
    return number.tensor


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
    "remainder",
    "fmod",
    "floor_divide",
}
COMPARISONS = {"lt", "le", "gt", "ge", "eq", "ne"}
IN_PLACE = {"iadd": "add_", "isub": "sub_", "imul": "mul_", "itruediv": "div_"}


HALVES = (torch.float16, torch.bfloat16)
PRODUCTS = {"mul", "truediv", "div", "multiply", "divide", "true_divide"}
SUMS = {"add", "sub", "subtract"}


def half_product(function, x, number):
    """A half-precision tensor times, or over, a number: ATen takes factors and divisors in float32."""
    return function(x.to(torch.float32), number.tensor.to(torch.float32)).to(x.dtype)


def rounded_as(x, number):
    """A 0-dim float64 or int64 tensor as ATen makes an element of `x` of a number."""
    return number.to(torch.float32).to(x.dtype) if x.dtype in HALVES else number.to(x.dtype)


def clamped(function, x, low=None, high=None):
    """clamp and its like, of which one bound is a number: both are tensors then, or none."""
    if not x.is_floating_point() or any(isinstance(bound, torch.Tensor) for bound in (low, high)):
        specialize(first_number((low, high)))
    bounds = [b if b is None else rounded_as(x, b.tensor if is_number(b) else constant(b)) for b in (low, high)]
    return function(x, *bounds)


def binary(name, a, b):
    """A binary operator between a tensor and a number."""
    if is_number(a):
        if name in IN_PLACE:  # a name is bound anew
            name = name[1:]
        if name == "truediv":  # as torch.Tensor.__rdiv__ does it
            b = b.reciprocal()
            return b * operand(a, b)
        if name in ("add", "sub", "mul") or name in COMPARISONS:
            if b.dtype in HALVES and name == "mul":
                return half_product(operator.mul, b, a)
            return getattr(operator, name)(operand(a, b, name), b)
        if name == "pow" and b.is_floating_point():
            return torch.pow(operand(a, b), b)
        specialize(a)
    if name in IN_PLACE:
        return getattr(a, IN_PLACE[name])(operand(b, a))
    if a.dtype in HALVES and name in PRODUCTS:
        return half_product(getattr(operator, name), a, b)
    if name in ("add", "sub", "mul", "truediv") or name in COMPARISONS:
        return getattr(operator, name)(a, operand(b, a, name))
    if name in ("mod", "floordiv") and a.is_floating_point():
        return getattr(operator, name)(a, operand(b, a))
    specialize(b)


def call(function, args, kwargs):
    """A call of a torch function or method with a number among its arguments."""
    name = function.__name__
    if name.startswith("_foreach_"):
        return call_each(name[9:], args, kwargs)
    base = name[:-1] if name.endswith("_") else name
    numbers = [a for a in (*args, *kwargs.values()) if is_number(a)]
    if name in ("full_like", "new_full") and is_number(args[-1]) and kwargs.get("requires_grad") is not True:
        made = torch.empty_like(args[0], **kwargs) if name == "full_like" else args[0].new_empty(args[1], **kwargs)
        return made.fill_(numbers[0].tensor)
    if name == "fill_" and len(args) == 2 and args[0].dtype in (torch.float32, torch.float64, torch.bfloat16):
        return args[0].fill_(numbers[0].tensor)
    if base == "masked_fill" and len(args) == 3 and is_number(args[2]) and args[0].is_floating_point():
        return function(args[0], args[1], args[2].tensor.to(args[0].dtype))
    if base in ("clamp", "clip") and set(kwargs) <= {"min", "max"} and isinstance(args[0], torch.Tensor):
        return clamped(function, args[0], *args[1:], **{{"min": "low", "max": "high"}[k]: v for k, v in kwargs.items()})
    if base in ("clamp_min", "clamp_max") and len(args) == 2 and isinstance(args[0], torch.Tensor):
        return clamped(lambda x, low, high: function(x, low), args[0], args[1])
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if len(tensors) == 0 or len(tensors) < len([a for a in args if not is_number(a)]):
        specialize(numbers[0])
    first = tensors[0]
    if base in ("add", "sub") and len(tensors) == 2 and list(kwargs) == ["alpha"]:
        scaled = tensors[1].to(torch.result_type(first, tensors[1]))  # the type that is computed in
        return function(first, scaled * operand(kwargs["alpha"], scaled))
    if (
        base in ("div", "divide")
        and list(kwargs) == ["rounding_mode"]
        and first.is_floating_point()
        and args[0] is first
    ):
        return function(first, operand(numbers[0], first), **kwargs)
    if len(kwargs) > 0:  # alpha and value scale in the type of the result
        for t in tensors:
            if t.dtype != first.dtype:
                specialize(numbers[0])
    if base in ("addcmul", "addcdiv") and len(tensors) == 3 and list(kwargs) == ["value"]:
        scaled = tensors[1] * operand(kwargs["value"], tensors[1])
        update = scaled * tensors[2] if base == "addcmul" else scaled / tensors[2]
        return first.add_(update) if name.endswith("_") else first.add(update)
    if base == "pow" and not is_number(args[0]):  # some exponents have formulas of their own
        specialize(numbers[0])
    if base in ELEMENTWISE and len(kwargs) == 0:
        if name in PRODUCTS and first.dtype in HALVES and len(args) == 2 and args[0] is first:
            return half_product(function, first, numbers[0])
        if base in ("remainder", "fmod", "floor_divide") and not (args[0] is first and first.is_floating_point()):
            specialize(numbers[0])
        if name == "where":
            first = tensors[-1]
        return function(*[operand(a, first, name) if is_number(a) else a for a in args])
    specialize(numbers[0])


# What scales a list of tensors, by function: the name of the number that all of them share.
FOREACH_SCALES = {"add": "alpha", "sub": "alpha", "addcmul": "value", "addcdiv": "value", "lerp": "weight"}
# Those of two operands, which a tensor's method of this name computes with a number.
FOREACH_BOUNDS = {
    "clamp_min": "clamp_min",
    "clamp_max": "clamp_max",
    "maximum": "clamp_min",
    "minimum": "clamp_max",
}


def call_each(name, args, kwargs):
    """A torch._foreach function with numbers in the last of its lists, or one number for all."""
    base = name[:-1] if name.endswith("_") else name
    lists = [a for a in args if isinstance(a, (list, tuple))]
    last = [*args, *kwargs.values()][-1]
    shared = is_number(last)
    by_name = list(kwargs) == [FOREACH_SCALES.get(base)]
    plain = base in FOREACH_SCALES or base in FOREACH_BOUNDS or base in ("mul", "div")
    plain = plain and (len(kwargs) == 0 or (by_name and shared))
    if not plain or len(lists) != len(args) - (1 if shared and not by_name else 0):
        specialize(first_number([*args, *kwargs.values(), *[item for each in lists for item in each]]))
    scaled = base.startswith("addc") or (by_name and base != "lerp")
    tensors, numbers = (lists, [last] * len(lists[0])) if shared else (lists[:-1], last)
    results = []
    for first, *others, number in zip(*tensors, numbers, strict=True):
        method = getattr(first, name.replace(base, FOREACH_BOUNDS.get(base, base)))
        results.append(method(*others, **{FOREACH_SCALES[base]: number}) if scaled else method(*others, number))
    return args[0] if name.endswith("_") else tuple(results)
