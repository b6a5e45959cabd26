"""Tensors of all dtypes, with numbers and 0-dim tensors: type promotion, integer arithmetic, reductions and their dtypes,
indexing by everything that indexes, comparisons, bits."""

import random

import torch

from helpers import check_calls

from .grammar import Grammar, function_of

DTYPES = [
    *[torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64],
    *[torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool],
]
SHAPE = (4, 6)
STEPS = Grammar(
    d=["0", "-1"],
    n=["2", "-3", "0.5", "True", "1.5", "7", "0", "1e3", "-0.0", "float('inf')", "255"],
    t=["torch." + str(d).split(".")[1] for d in DTYPES],
    dt=["", "", "", ", dtype=<t>"],
    i=["0", "-1", "1", "2"],
    slices=["1:", ":-1", "::2", "1:3", ":", "None", "...", "-2:"],
    index=[
        *["<i>", "<slices>", "<slices>, <i>", "<i>, <slices>", "..., <i>", "<slices>, None", "m", "~m", "j", "j, <i>"],
        *["<slices>, j[:3]", "m[:, 0]", "<slices>, m[0]", "[0, 2, 1]", "<i>, [1, 1]", "j[:, None], j[None, :3]", "j, j", "torch.tensor(1)"],
        *["j.int()", "j.to(torch.uint8) > 1", "j > 1", "(slice(None), 1)", "[True, False, True, True]", "..., [0, -1]", "None, m"],
    ],
    step=[
        # pointwise, of two tensors or a number
        *["$x + <x>", "$x * <x>", "$x - <x>", "$x / <x>", "$x // <x>", "$x % <x>", "$x ** 2", "$x ** 0.5", "<n> ** $x", "torch.pow($x, <x>)"],
        *["$x + <n>", "<n> - $x", "$x * <n>", "$x / <n>", "<n> / $x", "$x // <n>", "$x % <n>", "-$x", "$x == <x>", "$x < <n>", "$x >= <x>"],
        *["$x & <x>", "$x | <x>", "$x ^ <x>", "~$x", "$x << 1", "$x >> 1", "torch.logical_and($x, <x>)", "torch.logical_not($x)", "$x.bool()"],
        *["torch.maximum($x, <x>)", "torch.fmin($x, <x>)", "torch.where($x > 0, $x, <x>)", "torch.where($x.bool(), <n>, $x)", "$x.clamp(-1, 2)"],
        *["$x.clamp(min=0.5)", "torch.where(m, $x, <n>)", "torch.remainder($x, 3)", "torch.fmod($x, <x>)", "torch.div($x, <x>, rounding_mode='trunc')"],
        *["torch.div($x, 3, rounding_mode='floor')", "torch.add($x, <x>, alpha=2)", "torch.sub($x, 3, alpha=2)", "torch.addcmul($x, <x>, <x>, value=2)"],
        *["torch.lerp($x, <x>, 0.3)", "torch.rsub($x, 2)", "torch.floor_divide($x, 2)", "torch.true_divide($x, <x>)", "torch.hypot($x, <x>)"],
        *["torch.atan2($x, <x>)", "torch.copysign($x, <n>)", "torch.heaviside($x, <x>)", "torch.gcd($x, <x>)", "torch.nextafter($x, <x>)", "torch.ldexp($x, 2)"],
        *["torch.isclose($x, <x>)", "torch.isin($x, j)", "torch.xlogy($x, <x>)", "torch.logaddexp($x, <x>)", "torch.bitwise_left_shift($x, 2)"],
        # of one
        *["$x.sin()", "$x.exp()", "$x.abs()", "$x.sqrt()", "$x.sign()", "$x.floor()", "$x.round()", "$x.trunc()", "$x.ceil()", "$x.frac()", "$x.log1p()"],
        *["$x.reciprocal()", "$x.rsqrt()", "$x.sigmoid()", "$x.tanh()", "$x.erf()", "$x.square()", "$x.isnan()", "$x.isinf()", "$x.isfinite()", "$x.sgn()"],
        *["$x.signbit()", "$x.neg()", "$x.positive()", "$x.relu()", "$x.nan_to_num()", "$x.angle()", "$x.real", "$x.conj() * 1", "$x.expm1()", "$x.log2()"],
        *["$x.round(decimals=1)", "torch.nn.functional.silu($x)", "torch.nn.functional.softplus($x)", "$x.logit(0.1)", "$x.digamma()", "$x.lgamma()"],
        # dtypes
        *["$x.to(<t>)", "$x.to(<t>)", "$x.type(<t>)", "$x.long()", "$x.half()", "$x.float()", "$x.double()", "$x.to(<x>)", "$x.byte()", "$x.type_as(<x>)"],
        *["torch.full_like($x, 3<dt>)", "torch.zeros_like($x<dt>) + $x", "torch.arange(6<dt>) * $x", "torch.tensor([1, 2, 3, 4, 5, 6]<dt>) + $x"],
        *["torch.tensor(2<dt>) * $x", "torch.tensor(1.5<dt>) + $x", "$x.new_tensor([1.7, 2.2]).sum() + $x", "torch.full((6,), 2) * $x", "$x.new_ones(6) + $x"],
        *["$x.view(torch.int32)", "$x.view(torch.uint8)", "$x.view(torch.float32)", "torch.linspace(0, 1, 6<dt>) * $x", "torch.ones(4, 1<dt>) - $x"],
        # reductions, scans, sorting
        *["$x.sum()", "$x.sum(<d><dt>)", "$x.mean(<d>)", "$x.mean(<d>, dtype=torch.float64)", "$x.prod(<d><dt>)", "$x.amax(<d>)", "$x.min(<d>)[0]", "$x.max(<d>)[1]"],
        *["$x.argmin(<d>)", "$x.any(<d>)", "$x.all()", "$x.all(<d>, keepdim=True)", "$x.count_nonzero(<d>)", "$x.var(<d>)", "$x.std(<d>, correction=0)", "$x.norm()"],
        *["$x.cumsum(<d><dt>)", "$x.cumprod(<d>)", "$x.logsumexp(<d>)", "$x.softmax(<d><dt>)", "$x.cummax(<d>)[0]", "$x.sort(<d>, stable=True)[0]", "$x.median(<d>)[0]"],
        *["$x.argsort(<d>, stable=True)", "$x.aminmax()[1]", "$x.nansum(<d>)", "$x.nanmean(<d>)", "$x.norm(1, <d>)", "torch.linalg.vector_norm($x, 3, <d>)", "$x.diff(dim=<d>)"],
        *["$x.sum((0, -1)<dt>)", "$x.max()", "$x.unique()", "$x.bincount()", "$x.kthvalue(1, <d>)[0]", "$x.mode(<d>)[0]", "$x.topk(2, <d>)[0]", "$x.quantile(0.5, <d>)"],
        # indexing
        *["$x[<index>]"] * 8,
        *["put($x.clone(), (<index>), <n>)", "put($x.clone(), (<index>), <x>)", "put($x.clone(), (<index>), $x[0])"] * 3,
        *["$x.take(j)", "$x.index_select(<d>, j[:3])", "$x.masked_select(m)", "$x.masked_fill(m, <n>)", "$x.gather(-1, j.expand(2, 4))", "torch.take_along_dim($x, j[None], -1)"],
        *["$x.index_add(0, j, $x)", "$x.index_fill(<d>, j[:2], 2)", "$x.scatter(0, j[None, :2], <n>)", "$x.scatter_add(0, j[None, :2], $x)", "$x.nonzero()", "$x.argwhere()"],
        *["$x.scatter_reduce(0, j[None, :2], $x, 'amax')", "$x.put(j, $x.flatten()[:4])", "torch.searchsorted(torch.tensor([0, 1, 4]), $x)", "torch.bucketize($x, torch.tensor([0.5, 2.5]))"],
        # shapes, products
        *["$x.t()", "$x.reshape(-1)", "$x.flatten()[:6]", "$x.expand(4, 6)", "torch.cat([$x, <x>], <d>)", "torch.stack([$x, <x>])", "$x @ $x.t()", "torch.outer($x.flatten(), $x.flatten())[:4, :6]"],
        *["$x.squeeze()", "$x.flip(0)", "$x.roll(2, <d>)", "$x.repeat(1, 2)", "$x.tril()", "torch.nn.functional.pad($x, (1, 1), value=<n>)", "$x.unfold(-1, 2, 2)", "torch.dot($x.flatten(), $x.flatten())"],
        *["$x.item() + a", "int($x.item()) * b", "$x.numel() * a", "torch.meshgrid($x.flatten()[:2], j, indexing='ij')[0]", "torch.broadcast_to($x, (2, 4, 6))", "torch.result_type($x, <x>) == torch.float32 and a"],
        # in place
        *["add_to($x.clone(), <x>)", "add_to($x.clone(), <n>)", "$x.clone().mul_(<n>)", "$x.clone().copy_(<x>)", "$x.clone().fill_(<n>)", "$x.clone().div_(<x>)", "$x.clone().masked_fill_(m, <n>)"],
        *["$x.clone().clamp_(max=2)", "$x.clone().zero_()", "$x.clone().bitwise_not_()", "$x.clone().pow_(2)", "$x.clone().floor_divide_(2)", "torch.add($x, <x>, out=torch.empty(0, dtype=<t>))"],
    ],
)  # fmt: skip


def put(x, index, value):
    x[index] = value
    return x


def add_to(x, y):
    x += y
    return x


SCOPE = {"torch": torch, "put": put, "add_to": add_to}


def arguments(seed):
    """a, b, c, s (0-dim), of random dtypes; a mask m and indices j."""
    r, g = random.Random(seed), torch.Generator().manual_seed(seed)

    def one(shape):
        dtype = r.choice(DTYPES)
        values = torch.randint(0 if dtype == torch.uint8 else -3, 6, shape, generator=g)
        return (values if r.random() < 0.5 else values + torch.rand(shape, generator=g)).to(dtype)

    tensors = [one(shape) for shape in (SHAPE, SHAPE, r.choice([(6,), (4, 1), (1, 6), SHAPE]), ())]
    return [*tensors, torch.rand(SHAPE, generator=g) > 0.4, torch.randint(0, 4, (4,), generator=g)]


def program(seed):
    """A step that eager refuses is left out, as is one whose values nobody defines."""
    r = random.Random(seed)
    known = dict(zip("abcsmj", arguments(seed)))
    lines = []
    for number in range(r.randrange(3, 12)):
        name = f"v{number}"
        recent = [v for v in known if v not in "mj"][-4:]
        step = STEPS.text(r, "step", {"x": [*recent, *recent, "a", "b", "c", "s"]})
        try:
            value = eval(step, dict(SCOPE), known)
        except Exception:
            continue
        if not isinstance(value, torch.Tensor) or not 0 < value.numel() <= 2000 or undefined(step, value, known):
            continue
        known[name] = value
        lines.append(f"    {name} = {step}")
    made = [name for name in known if name not in "abcsmj"] or ["a"]
    results = r.sample(made, min(len(made), r.randrange(1, 5)))
    return "def f(a, b, c, s, m, j):\n" + "\n".join(lines) + f"\n    return [{', '.join(results)}]\n"


def undefined(step, value, known):
    """Whether results may differ without fault: floats out of an integer's range, NaN in comparisons and integers, sums
    of half types, rounding of values that other sums have given."""
    if not value.is_floating_point() and not value.is_complex():
        floats = [v for k, v in known.items() if k in step and (v.is_floating_point() or v.is_complex())]
        wild = [v for v in floats if not torch.isfinite(v).all() or v.abs().max() > 100] if floats else []
        if wild:
            return True
    if value.dtype == torch.complex32:  # nothing compares these
        return True
    return (value.is_floating_point() or value.is_complex()) and not bool(torch.isfinite(value).all())


def run(seed):
    function = function_of(program(seed), f"<dtypes {seed}>", dict(SCOPE))
    # Half types are rounded once for a chain of operators, and a program may end in another dtype.
    check_calls(function, [arguments(seed), arguments(seed)], rtol=2e-2, atol=2e-2)
