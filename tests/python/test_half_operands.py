"""Numbers, 0-dim tensors and operands of other dtypes beside half types: ATen rounds most of them first, and so does kiln."""

import operator

import pytest
import torch
from torch.nn import functional as F

import kiln

HALF = [torch.bfloat16, torch.float16]
# Exact rounding is what is tested: results are equal bit for bit.
BINARY = {
    **{n: getattr(torch, n) for n in "add sub mul div fmod remainder floor_divide pow rsub xlogy".split()},
    **{n: getattr(operator, n) for n in "gt ge lt le eq ne".split()},
    "alpha": lambda x, s: torch.add(x, x, alpha=s),
    "reflected": lambda x, s: (s - x) * s / (x + 4),
    "lerp": lambda x, s: torch.lerp(x, x * 2, s),
    "addcmul": lambda x, s: torch.addcmul(x, x, x, value=s),
    "where": lambda x, s: torch.where(x > s, x, s),
    "clamp": lambda x, s: x.clamp(-s, s),
    "threshold": lambda x, s: F.threshold(x, s, s),
    "leaky_relu": F.leaky_relu,
    "in place": lambda x, s: x.clone().add_(s).mul_(s).sub_(s),
}


def values(dtype):
    """A multiple of every vector's length, since ATen rounds some tails otherwise; some equal the number once rounded."""
    torch.manual_seed(0)
    x = torch.randn(1024).to(dtype)
    x[::7] = 0.3
    return x


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("op", BINARY)
def test_numbers(op, dtype):
    x, f = values(dtype), BINARY[op]
    f = (lambda f: lambda x: f(x, 0.3))(f)
    assert torch.equal(kiln.compile(f, fullgraph=True)(x).nan_to_num(), f(x).nan_to_num())


@pytest.mark.parametrize("power", [-2, -1, 0.5, 2, 3, 2.3])
@pytest.mark.parametrize("dtype", HALF)
def test_powers(dtype, power):
    x = values(dtype).abs() + 0.1
    assert torch.equal(kiln.compile(lambda x: x**power)(x), x**power)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("other", [torch.float32, torch.float64, torch.int64, torch.uint8])
@pytest.mark.parametrize("op", ["add", "mul", "div", "fmod", "remainder", "maximum", "atan2", "gt", "eq"])
def test_operands_of_other_types(op, other, dtype):
    """257 and 0.3 have no bfloat16: a 0-dim tensor, on either side, and elements of integers become neighbours of theirs."""
    x, f = values(dtype) * 300, getattr(torch, op)
    number = torch.tensor(257 if other is torch.int64 else 3 if other is torch.uint8 else 0.3, dtype=other)
    cases = [(x, number), (number, x)]
    if not other.is_floating_point:
        cases.append((x, torch.arange(1, 1025).to(other).clamp(min=1)))
    for a, b in cases:
        expected = f(a, b)
        assert expected.dtype in (dtype, torch.bool)
        assert torch.equal(kiln.compile(lambda a, b: f(a, b))(a, b).nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("dtype", HALF)
def test_losses_that_round_every_step(dtype):
    x = values(dtype)
    for f in (
        lambda x: F.huber_loss(x, x * 2, reduction="none", delta=0.3),
        lambda x: F.smooth_l1_loss(x, x * 2, reduction="none", beta=0.3),
    ):
        try:
            expected = f(x)
        except RuntimeError:
            continue  # eager has no such kernel
        assert torch.equal(kiln.compile(f)(x), expected)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("expanded", [False, True])
def test_sums_at_indices(dtype, expanded):
    """scatter_add forms sums of half types in float32; index_add and index_put round each time."""
    torch.manual_seed(0)
    x = torch.randn(4, 256, 16).to(dtype)
    index = torch.randint(0, 5, (1, 256, 1)).expand(x.shape) if expanded else torch.randint(0, 5, x.shape)
    line = torch.randint(0, 5, (256,))
    for f in (
        lambda x: torch.ones_like(x).scatter_add(1, index, x),
        lambda x: torch.ones_like(x).index_add(1, line, x),
        lambda x: torch.ones_like(x)[0].index_put((line,), x[0], accumulate=True),
    ):
        assert torch.equal(kiln.compile(f)(x), f(x))
