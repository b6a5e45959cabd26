"""The elements or rows of a tensor that a mask selects (`x[mask]`), while a graph is captured: how many there are is known
when it runs. Captured code sees a Masked, which holds the whole tensor, with numbers that do no harm where the mask is
false. What is computed of each element stays one, what is computed of all of them leaves out the others, and what is
written back through the same mask is a where. Whatever else is asked of it ends the attempt; the next one decides the
number of elements, or breaks the graph at the mask."""

from __future__ import annotations

import math
import operator

import torch
import torch.nn.functional as F

from kiln import _C, _numbers


class Selection:
    """A mask, whose dims are the first ones of all that it selects from."""

    __slots__ = ("mask", "ndim", "sources")

    def __init__(self, mask, source):
        self.mask = mask.clone()  # it may be written in place later
        self.ndim = mask.dim()
        self.sources = (source,)

    def only(self, values, other):
        """`values` with the number `other` where the mask is false."""
        return torch.where(over(self.mask, values), values, other)


def over(mask, values):
    """The mask in as many dims as `values` has."""
    return mask.reshape(mask.shape + (1,) * (values.dim() - mask.dim()))


class Masked:
    """Stands for the tensor of those elements, `values` of shape [*mask, *rest] for one of shape [n, *rest]."""

    __slots__ = ("_alone", "_selection", "_unused", "_values")

    def __init__(self, values, selection, alone=True, unused=False):
        set_attribute = object.__setattr__
        set_attribute(self, "_values", values)
        set_attribute(self, "_selection", selection)
        set_attribute(self, "_alone", alone)  # shares memory with no other
        set_attribute(self, "_unused", unused)  # nothing has been computed of it yet

    @property
    def __class__(self):  # PyTorch's bindings ask for it before they take what they are given as a tensor
        specialize(self)

    def __getattr__(self, name):
        specialize(self)

    def __setattr__(self, name, value):
        specialize(self)

    @property
    def dtype(self):
        return self._values.dtype

    @property
    def device(self):
        return self._values.device

    @property
    def requires_grad(self):
        return self._values.requires_grad

    @property
    def ndim(self):
        return rank(self)

    @property
    def shape(self):
        return torch.Size((length(self), *rest(self)))


def is_masked(o):
    return _C._number("masked", o)


def specialize(masked):
    """Ends this attempt: in the next one the mask is an index as eager has it."""
    _numbers.specialize(masked._selection if is_masked(masked) else masked)


def select(x, mask, source):
    """`x[mask]`, the first selection by this mask."""
    return selected(x, mask, Selection(mask, source))


def selected(x, mask, selection):
    """`x[mask]` of a mask that is the selection's."""
    if x.shape[: selection.ndim] != selection.mask.shape:
        specialize(selection)
    filler = 1.0 if x.is_floating_point() else False if x.dtype is torch.bool else 0
    # The mask itself, not its copy: autograd keeps it, as eager's does.
    return Masked(torch.where(over(mask, x), x, filler), selection, unused=True)


def materialized(values, mask, differentiable):
    """What a Masked is when the captured part is left: a tensor of shape [n, *rest]."""
    with torch.set_grad_enabled(differentiable):
        return values[mask]


def rank(masked):
    return 1 + masked._values.dim() - masked._selection.ndim


def rest(masked):
    """The sizes behind the first."""
    return masked._values.shape[masked._selection.ndim :]


def length(masked):
    return masked._selection.mask.sum().item()


def first_of(args):
    for a in args:
        if is_masked(a):
            return a
    return None


def give_up(args, kwargs):
    specialize(first_of((*args, *kwargs.values())))


def of_first(handler):
    """A handler of calls whose first argument is a Masked; others end the attempt."""

    def run(function, args, kwargs):
        if len(args) == 0 or not is_masked(args[0]):
            give_up(args, kwargs)
        return handler(function, args, kwargs)

    return run


def whole(o, first):
    """An operand beside `first` as one of its values'."""
    if is_masked(o):
        if o._selection is not first._selection or rank(o) != rank(first):
            specialize(first)
        object.__setattr__(o, "_unused", False)
        return o._values
    if isinstance(o, torch.Tensor):
        # Its gradient would be made of elements that eager does not compute.
        if o.requires_grad or o.dim() > rank(first) or (o.dim() == rank(first) and o.shape[0] != 1):
            specialize(first)
        return o[0] if o.dim() == rank(first) and o.dim() > 1 else o  # a number would not promote
    if isinstance(o, (tuple, list)):
        specialize(first)
    return o


# Where 0 stands for an int of no matter, it must not divide.
DIVISIONS = {"floordiv", "mod", "ifloordiv", "imod", "floor_divide", "remainder", "fmod", "div", "divide", "truediv"}


def computed(function, args, kwargs, name):
    """The values of what `function` computes of each element."""
    first = first_of(args)
    if first is None or "out" in kwargs or kwargs.get("inplace", False) or is_any_true(args):
        give_up(args, kwargs)
    if name in DIVISIONS and not all_floating(args):
        specialize(first)
    args = [whole(a, first) for a in args]
    kwargs = {key: whole(value, first) for key, value in kwargs.items()}
    return function(*args, **kwargs)


def is_any_true(args):
    """Such as `inplace`."""
    for a in args:
        if a is True:
            return True
    return False


def all_floating(args):
    for a in args:
        if is_masked(a) and not a._values.is_floating_point():
            return False
    return True


def pointwise(function, args, kwargs):
    return result_of(computed(function, args, kwargs, function.__name__), first_of(args)._selection)


def result_of(values, selection):
    # Autograd may keep a result, too.
    return Masked(values, selection, unused=not values.requires_grad)


def operate(name, *args):
    """Python's operator of this name."""
    if name in OPERATORS:
        return result_of(computed(getattr(operator, name), args, {}, name), first_of(args)._selection)
    target = args[0]
    if name not in IN_PLACE or not is_masked(target):
        specialize(first_of(args))
    return write(IN_PLACE[name], target, args, {})


@of_first
def in_place(function, args, kwargs):
    """A method such as mul_()."""
    return write(getattr(torch, function.__name__[:-1]), args[0], args, kwargs)


def write(function, target, args, kwargs):
    # What autograd keeps must not change: nor what it kept for another operand.
    saves_none = len(args) == 2 and (function in SUMS or (function in PRODUCTS and is_constant(args[1:])))
    kept = not target._unused or (target._values.requires_grad and not saves_none)
    if (kept and torch.is_grad_enabled()) or not target._alone:
        specialize(target)
    values = target._values
    unused = target._unused
    result = computed(function, args, kwargs, function.__name__)
    if result.dtype is not values.dtype or result.shape != values.shape:
        specialize(target)
    set_attribute = object.__setattr__
    set_attribute(target, "_values", result)
    set_attribute(target, "_unused", unused)
    return target


def is_constant(args):
    """Of operands: whether no gradient is theirs."""
    for a in args:
        if isinstance(a, torch.Tensor) and a.requires_grad:
            return False
    return True


@of_first
def sharing(function, args, kwargs):
    """What may be the same tensor, or share its memory."""
    masked = args[0]
    if len(args) > 2 or not {"dtype"}.issuperset(kwargs):
        give_up(args, kwargs)
    unused = masked._unused
    values = computed(function, args, kwargs, function.__name__)
    if function.__name__ == "detach":
        return view(masked, values)
    if values.dtype is masked._values.dtype:
        object.__setattr__(masked, "_unused", unused)
        return masked
    return Masked(values, masked._selection)


def view(masked, values):
    object.__setattr__(masked, "_alone", False)
    return Masked(values, masked._selection, alone=False)


def dim_of(masked, dim):
    """The dim of its values that the dim `dim` of a Masked is, if that is no dim of the mask."""
    if type(dim) is not int or not -rank(masked) <= dim < rank(masked) or dim % rank(masked) == 0:
        specialize(masked)
    return masked._selection.ndim + dim % rank(masked) - 1


# Where the dim is among the arguments, if that is not behind the first; and what it is if it is not given.
DIMS = {"norm": (2, None), "normalize": (2, 1), "cosine_similarity": (2, 1)}


@of_first
def row_wise(function, args, kwargs):
    """What is computed along one dim: softmax, argmax."""
    place, dim = DIMS.get(function.__name__, (1, None))
    if "out" in kwargs or len(args) > place + 1:
        give_up(args, kwargs)
    dim = args[place] if len(args) > place else kwargs.get("dim", dim)
    masked = args[0]
    given = [whole(a, masked) for a in args[:place]]
    kwargs = {**{key: whole(value, masked) for key, value in kwargs.items()}, "dim": dim_of(masked, dim)}
    return Masked(function(*given, **kwargs), masked._selection)


@of_first
def reduction(function, args, kwargs):
    """sum, mean, and what is computed of all elements."""
    masked = args[0]
    if function.__name__ in ("sum", "mean", "any", "all") and (len(args) == 2 or "dim" in kwargs):
        if function.__name__ in OVER_ROWS and is_first(masked, (*args[1:], *kwargs.values())):
            return OVER_ROWS[function.__name__](masked)
        return row_wise(function, args, kwargs)
    if len(args) > 1 or len(kwargs) > 0:
        give_up(args, kwargs)
    object.__setattr__(masked, "_unused", False)
    return REDUCTIONS[function.__name__](masked)


def is_first(masked, dims):
    return len(dims) == 1 and type(dims[0]) is int and dims[0] in (0, -rank(masked))


def total(masked):
    return masked._selection.only(masked._values, 0).sum()


def total_of_rows(masked):
    return masked._selection.only(masked._values, 0).sum(tuple(range(masked._selection.ndim)))


def count_of(masked):
    """How many elements there are, of all dims, as a tensor."""
    count = masked._selection.mask.sum()
    return count * math.prod(rest(masked)) if rank(masked) > 1 else count


def mean(masked):
    return quotient(masked, total, count_of(masked))


def mean_of_rows(masked):
    return quotient(masked, total_of_rows, masked._selection.mask.sum())


def quotient(masked, summed, count):
    values = masked._values
    if not values.is_floating_point():
        specialize(masked)
    if values.dtype is torch.float64:
        return summed(masked) / count
    return (summed(Masked(values.float(), masked._selection)) / count).to(values.dtype)


OVER_ROWS = {"sum": total_of_rows, "mean": mean_of_rows}


def variance(masked):
    values = masked._values
    if values.dtype is not torch.float32 and values.dtype is not torch.float64:
        specialize(masked)
    count = count_of(masked)
    apart = masked._selection.only(values - mean(masked), 0.0)
    return (apart * apart).sum() / (count - 1).clamp(min=0)


def deviation(masked):
    """Where it is zero its gradient is zero, not infinite."""
    found = variance(masked)
    none = found == 0
    return torch.where(none, found.detach(), torch.where(none, 1.0, found).sqrt())


def extreme(masked, function, other):
    """The largest or smallest element. Without any the call raises an exception, in eager."""
    values = masked._values
    if not values.is_floating_point():
        specialize(masked)
    result = function(masked._selection.only(values, other))
    # Nor has another element any of its gradient.
    none = ~masked._selection.mask.any()
    if values.requires_grad:
        none = none | (result == other)
    _numbers.run_in_eager_if(none, masked._selection)
    return result


REDUCTIONS = {
    "max": lambda masked: extreme(masked, torch.max, -math.inf),
    "min": lambda masked: extreme(masked, torch.min, math.inf),
    "sum": total,
    "mean": mean,
    "var": variance,
    "std": deviation,
    "any": lambda masked: masked._selection.only(masked._values, 0).any(),
    "all": lambda masked: masked._selection.only(masked._values, 1).all(),
    "count_nonzero": lambda masked: torch.count_nonzero(masked._selection.only(masked._values, 0)),
}


def reduced(values, selection, how):
    """What a loss of this reduction is, of its elements."""
    masked = Masked(values, selection)
    if how == "none":
        return masked
    if how != "mean" and how != "sum":
        specialize(masked)
    return mean(masked) if how == "mean" else total(masked)


# Weights have means of their own, and older names for the reduction stand for it.
LOSS_OPTIONS = frozenset(("reduction", "beta", "delta"))


def loss(function, args, kwargs):
    """A loss of each element, of an input and a target."""
    first = first_of(args)
    for a in args:
        if not is_masked(a):
            give_up(args, kwargs)
    if len(args) != 2 or not LOSS_OPTIONS.issuperset(kwargs):
        give_up(args, kwargs)
    how = kwargs.get("reduction", "mean")
    if function is F.binary_cross_entropy:  # which looks whether all are probabilities
        args = [Masked(a._selection.only(a._values, 0.5), a._selection) for a in args]
    values = computed(function, args, {**kwargs, "reduction": "none"}, function.__name__)
    return reduced(values, first._selection, how)


def class_loss(function, args, kwargs):
    """A loss of rows of logits, or of logarithms of probabilities, and their classes."""
    first = first_of(args)
    if len(args) != 2 or not is_masked(args[0]) or not is_masked(args[1]):
        give_up(args, kwargs)
    of_rows, classes = args
    selection = of_rows._selection
    if classes._selection is not selection or rank(of_rows) != 2 or rank(classes) != 1:
        specialize(first)
    if classes._values.is_floating_point():
        specialize(first)
    for key in kwargs:
        if key == "weight" and kwargs[key] is not None and not kwargs[key].requires_grad:
            continue
        if key not in ("ignore_index", "label_smoothing", "reduction"):
            specialize(first)
    object.__setattr__(of_rows, "_unused", False)
    object.__setattr__(classes, "_unused", False)
    ignored = kwargs.get("ignore_index", -100)
    flat = of_rows._values.reshape(-1, of_rows._values.shape[-1])
    targets = selection.only(classes._values, ignored).reshape(-1)
    values = function(flat, targets, **kwargs)
    if kwargs.get("reduction", "mean") == "none":
        return Masked(values.reshape(selection.mask.shape), selection)
    return values


@of_first
def reshape(function, args, kwargs):
    """view() and its like, where they give the shape that is there."""
    masked = args[0]
    shape = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
    if len(kwargs) > 0 or len(shape) != rank(masked) or shape[0] != -1:
        give_up(args, kwargs)
    for wanted, there in zip(shape[1:], rest(masked), strict=True):
        if wanted != there:
            specialize(masked)
    return view(masked, masked._values)


@of_first
def flatten(function, args, kwargs):
    masked = args[0]
    if len(args) != 1 or len(kwargs) > 0 or rank(masked) != 1:
        give_up(args, kwargs)
    return masked


@of_first
def with_dim(function, args, kwargs):
    """unsqueeze() and squeeze() of a dim behind the first."""
    masked = args[0]
    if len(args) != 2 or len(kwargs) > 0 or type(args[1]) is not int:
        give_up(args, kwargs)
    dims = rank(masked) + (function.__name__ == "unsqueeze")
    if not -dims <= args[1] < dims or args[1] % dims == 0:
        specialize(masked)
    return view(masked, function(masked._values, masked._selection.ndim + args[1] % dims - 1))


@of_first
def gather(function, args, kwargs):
    """gather(dim, index) along a dim behind the first."""
    if len(args) != 3 or len(kwargs) > 0 or not is_masked(args[2]):
        give_up(args, kwargs)
    masked = args[0]
    places = masked._selection.only(whole(args[2], masked), 0)
    values = function(masked._values, dim_of(masked, args[1]), places)
    object.__setattr__(masked, "_unused", False)
    return Masked(values, masked._selection)


@of_first
def size(function, args, kwargs):
    masked = args[0]
    if len(kwargs) > 0:
        give_up(args, kwargs)
    if len(args) == 1:
        return masked.shape
    if args[1] == 0 or args[1] == -rank(masked):
        return length(masked)
    return masked._values.shape[dim_of(masked, args[1])]


@of_first
def numel(function, args, kwargs):
    masked = args[0]
    return length(masked) * math.prod(rest(masked))


def getitem(masked, key):
    """Behind a full slice, or an ellipsis for it, of the first dim."""
    if not isinstance(key, tuple) or len(key) < 2:
        specialize(masked)
    taken = 0
    for k in key[1:]:
        if k is not None and type(k) is not int and not isinstance(k, slice):
            specialize(masked)
        taken += k is not None
    if key[0] is not Ellipsis and not (isinstance(key[0], slice) and key[0] == slice(None)):
        specialize(masked)
    if taken >= rank(masked):
        specialize(masked)
    first = (Ellipsis,) if key[0] is Ellipsis else (slice(None),) * masked._selection.ndim
    return view(masked, masked._values[first + key[1:]])


def part(x, mask, key):
    """What `x[(mask, *key)]` is `[mask]` of, if these are integers and slices."""
    return x[(slice(None),) * mask.dim() + key]


def store(x, masked):
    """`x[mask] = masked` of the same mask."""
    values = masked._values
    if values.dtype is not x.dtype or values.shape != x.shape:
        specialize(masked)
    x.copy_(torch.where(over(masked._selection.mask, x), values, x))


OPERATORS = {
    *("add", "and_", "floordiv", "lshift", "mul", "mod", "or_", "pow", "rshift", "sub", "truediv", "xor"),
    *("lt", "le", "eq", "ne", "gt", "ge", "neg", "pos", "invert"),
}
IN_PLACE = {
    "iadd": torch.add,
    "isub": torch.sub,
    "imul": torch.mul,
    "itruediv": torch.div,
    "ipow": torch.pow,
    "iand": torch.bitwise_and,
    "ior": torch.bitwise_or,
    "ixor": torch.bitwise_xor,
}
SUMS = {torch.add, torch.sub}
PRODUCTS = {torch.mul, torch.div}

_POINTWISE = (
    *("abs", "absolute", "acos", "add", "arccos", "arcsin", "arctan", "arctan2", "asin", "atan", "atan2", "asinh"),
    *("bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "ceil", "clamp", "clamp_max", "clamp_min", "clip"),
    *("copysign", "cos", "cosh", "deg2rad", "div", "divide", "elu", "eq", "erf", "erfc", "exp", "exp2", "expm1"),
    *("floor", "floor_divide", "fmax", "fmin", "fmod", "frac", "ge", "gelu", "greater", "gt", "hardsigmoid"),
    *("hardswish", "hardtanh", "hypot", "isfinite", "isinf", "isnan", "le", "leaky_relu", "lerp", "less", "lgamma"),
    *("log", "log10", "log1p", "log2", "logaddexp", "logical_and", "logical_not", "logical_or", "logical_xor"),
    *("logit", "logsigmoid", "lt", "maximum", "minimum", "mish", "mul", "multiply", "nan_to_num", "ne", "neg"),
    *("negative", "pow", "rad2deg", "reciprocal", "relu", "relu6", "remainder", "round", "rsqrt", "rsub", "selu"),
    *("sgn", "sigmoid", "sign", "silu", "sin", "sinh", "softplus", "softsign", "sqrt", "square", "sub", "subtract"),
    *("tan", "tanh", "tanhshrink", "true_divide", "trunc", "xlogy", "zeros_like", "ones_like"),
)
_IN_PLACE = ("add_", "sub_", "mul_", "div_", "clamp_", "neg_", "abs_", "relu_", "exp_", "sqrt_", "pow_")
_SHARING = ("float", "double", "half", "bfloat16", "long", "int", "bool", "to", "contiguous", "detach")
_ROW_WISE = ("softmax", "log_softmax", "logsumexp", "argmax", "argmin", "amax", "amin", *DIMS)
_LOSSES = (
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"),
    "binary_cross_entropy_with_logits",
)
# What captured code does where one of these is given a Masked: a function of it, its arguments and its named ones.
FUNCTIONS = {}
for _names, _function in (
    (_POINTWISE + ("clone",), pointwise),
    (_IN_PLACE, in_place),
    (_SHARING, sharing),
    (_ROW_WISE, row_wise),
    (tuple(REDUCTIONS), reduction),
    (_LOSSES, loss),
    (("cross_entropy", "nll_loss"), class_loss),
    (("view", "reshape"), reshape),
    (("flatten",), flatten),
    (("unsqueeze", "squeeze"), with_dim),
    (("gather",), gather),
    (("size",), size),
    (("numel",), numel),
):
    for _name in _names:
        for _owner in (torch, torch.Tensor, F):
            if hasattr(_owner, _name):
                FUNCTIONS[getattr(_owner, _name)] = _function
FUNCTIONS[abs] = pointwise
FUNCTIONS[len] = lambda function, args, kwargs: length(args[0])


def method(function, of_tensor):
    def run(self, *args, **kwargs):
        if not is_masked(self):  # a break came between the look for the method and its call
            return of_tensor(self, *args, **kwargs)
        return function(of_tensor, (self, *args), kwargs)

    run.__name__ = of_tensor.__name__
    return run


for _name in dir(torch.Tensor):
    if not _name.startswith("_") and getattr(torch.Tensor, _name) in FUNCTIONS:
        setattr(Masked, _name, method(FUNCTIONS[getattr(torch.Tensor, _name)], getattr(torch.Tensor, _name)))


def refuse(self, *args):
    specialize(self)


for _name in (
    *("hash", "bool", "iter", "contains", "float", "int", "index", "complex", "round", "array", "str", "repr"),
    *("format", "copy", "deepcopy", "reduce_ex", "reduce", "reversed", "setitem", "delitem", "getitem", "abs"),
    *("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "invert", "add", "radd", "sub", "rsub", "mul", "rmul"),
    *("truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "pow", "rpow", "matmul", "rmatmul"),
):
    setattr(Masked, f"__{_name}__", refuse)
Masked.__len__ = length
