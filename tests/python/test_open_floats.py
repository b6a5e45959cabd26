"""Floats that are computed of open sizes, and ints that are made of those: one capture for many sizes."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kiln
from helpers import SIZES, rows
from helpers import check_sizes as check
from kiln.testing import CompileCounterWithBackend, assert_same


def test_scalars_of_tensors():
    def f(x):
        n, m = x.shape
        a = x / math.sqrt(n) + x * (1 / n) - x * n**-0.5
        b = x.sum() / (n / m) + 0.5 * n
        return a, b, (x / n).clamp(min=-1 / n, max=n / 4), x.masked_fill(x > 0, -n / 2), torch.where(x > 0, x, n / 3)

    check(f)


def test_in_place():
    def f(x):
        n = x.shape[0]
        y = x.clone()
        y *= n / 3
        y += 1 / n
        y[0] = 0
        return y.div_(n * 1.0).sub_(n**0.5)

    check(f)


def test_factories():
    def f(x):
        n = x.shape[0]
        return torch.full((n,), n / 3), x.new_full((2, n), 1 / n), torch.full_like(x, n * 0.25)

    check(f)


def test_ints_of_floats():
    """Of masked autoencoders, crops, strides and schedules."""

    def f(x):
        n = x.shape[0]
        keep = int(n * (1 - 0.75))
        ceiled, floored = math.ceil(n / 2), math.floor(n * 0.3)
        rounded, cut = round(n * 0.6), math.trunc(n**0.5)
        return (
            x[:keep],
            torch.zeros(ceiled, floored + 1),
            torch.ones(rounded, cut),
            x[int(n / 2) :],
            x.view(int(n * 1.0), 6),
        )

    check(f)


@pytest.mark.parametrize("divisor", [2, 3, 7, 2.0])
def test_quotients_are_those_of_ints(divisor):
    def f(x):
        n = x.shape[0]
        return torch.arange(math.ceil(n / divisor)), torch.arange(math.floor(n / divisor)), x[: int(n / divisor)]

    check(f, sizes=range(2, 23))


def test_halves_round_to_even():
    check(lambda x: (x + 1, torch.zeros(round(x.shape[0] / 2), round(x.shape[0] * 1.5))), sizes=range(2, 12))


def test_functions_of_math():
    def f(x):
        n = x.shape[0]
        s = math.log(n) + math.log2(n) * math.log10(n) - math.exp(-n) + math.tanh(n / 9) + math.fabs(-n)
        s += math.log(n, 3) + math.pow(n, 0.25) + math.sin(n) * math.cos(n) + math.log1p(n) + math.expm1(1 / n)
        return x * s, x + math.atan(n), x - math.sinh(1 / n)

    check(f)


def test_python_sees_a_float():
    def f(x):
        h = x.shape[0] / 2
        return x + 1, isinstance(h, float), type(h) is float, isinstance(h, int), bool(h), h != "a", h is None

    check(f)


def test_floats_that_leave():
    def f(x):
        n = x.shape[0]
        a = n / 2
        return (
            x * a,
            a,
            {"ratio": n / x.shape[1], "root": [math.sqrt(n), a]},
            -a,
            abs(-a),
            n**0.5,
            float(n),
            a // 1,
            a % 3,
        )

    check(f)


def test_floats_in_texts():
    check(lambda x: (x + 1, f"{x.shape[0] / 2:.1f} of {x.shape[0]}", str(x.shape[0] * 0.5)))


def test_branches_on_floats():
    def f(x):
        if x.shape[0] / 2 > 3.25:
            return x + 1
        return x - 1

    check(f, entries=2)
    check(lambda x: x + 1 if math.sqrt(x.shape[0]) == 3.0 else x.cos(), entries=2)
    check(lambda x: x * max(x.shape[0] / 4, 1.5) + min(1.0, x.shape[0] / 5), entries=3)


def test_what_needs_the_float_gets_it():
    def f(x):
        h = x.shape[0] / 2
        return x + 1, {h: "a"}, hash(h), h.is_integer(), h.as_integer_ratio(), round(h, 1), divmod(h, 2)

    check(f, entries=len(SIZES))


def test_what_raises_raises():
    def f(x):
        n = x.shape[0]
        return x * math.log(n - 4)

    compiled = kiln.compile(f, dynamic=True)
    for n in (8, 7, 4, 3, 9):
        (x,) = rows(n)
        try:
            expected = f(x)
        except ValueError as e:
            with pytest.raises(ValueError, match=str(e)):
                compiled(x)
        else:
            assert_same(compiled(x), expected)
    quotient = kiln.compile(lambda x: x * (1 / (x.shape[0] - 4)), dynamic=True)
    for n in (8, 4, 5, 4):
        (x,) = rows(n)
        if n == 4:
            with pytest.raises(ZeroDivisionError, match="division by zero"):
                quotient(x)
        else:
            assert_same(quotient(x), x * (1 / (n - 4)))


def test_powers_of_sizes():
    check(lambda x: (x * x.shape[0] ** 2, torch.zeros(x.shape[0] ** 2 - 1), x.shape[0] ** 3, x.shape[0] ** 0))


def test_torch_functions_of_sizes():
    def f(x):
        n = x.shape[0]
        return (
            x * torch.sym_sqrt(n),
            x * torch.sym_float(n),
            x[: torch.sym_int(n / 2)],
            torch.sym_max(n, 4.5),
            torch.tensor(n / 2),
            torch.as_tensor(n),
        )

    check(f, entries=2)


def test_with_numbers_of_data():
    """An open size beside what item() gives."""

    def f(x):
        loss = x.square().mean().item()
        return x + 1, loss * x.shape[0], loss / (x.shape[0] / 2), loss > x.shape[0] / 100

    check(f)


def test_bits_are_those_of_python():
    def f(x):
        n = x.shape[0]
        return x + 1, n / 7 * 3 - n * 0.1, (n / 3) ** 1.7, (n * 0.1) // 0.03, (n * 0.1) % 0.03, -(n / 3) % 0.7, 1e-3 / n

    compiled = check(f, sizes=range(2, 40))
    (x,) = rows(31)
    assert compiled(x)[1:] == f(x)[1:]


class MaskedAutoencoder(nn.Module):
    """Keeps a share of the tokens, which it draws."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        batch, length, _ = x.shape
        keep = int(length * (1 - 0.75)) + 1
        noise = x.detach().sum(-1)
        order = torch.argsort(noise, dim=1)
        kept = torch.gather(self.embed(x), 1, order[:, :keep, None].expand(-1, -1, 8))
        scale = 1.0 / math.sqrt(keep)
        return (self.head(kept * scale) - x[:, :keep]).square().sum() / (batch * length * 0.5)


def test_training_steps():
    torch.manual_seed(0)
    model = MaskedAutoencoder()
    other = copy.deepcopy(model)

    def train(model, optimizer, x):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other)]
    compiled = kiln.compile(train)
    for length in (8, 11, 16, 5, 8, 11, 23):
        x = torch.randn(3, length, 6)
        assert_same(compiled(model, optimizers[0], x), train(other, optimizers[1], x))
    assert_same(dict(model.state_dict()), dict(other.state_dict()))
    assert len(compiled._entries) == 2


def test_interpolation_by_a_factor():
    def f(x):
        h, w = x.shape[-2:]
        return F.interpolate(x, size=(int(h * 1.5), math.ceil(w / 2)), mode="bilinear"), F.adaptive_avg_pool2d(
            x, h // 2
        )

    check(f, make=lambda n: (torch.randn(1, 2, n, 6),))


def test_custom_backends():
    def f(x):
        n, m = x.shape
        return x / math.sqrt(n) + n / m, x[: int(n * 0.7)], torch.full((math.ceil(n / 2),), 1 / n), x * (n**0.5)

    for backend in ("eager", "aot_eager"):
        counter = CompileCounterWithBackend(backend)
        compiled = kiln.compile(f, backend=counter, dynamic=True)
        for n in SIZES:
            (x,) = rows(n)
            for _ in range(2):
                assert_same(compiled(x), f(x))
        assert counter.frame_count == 1


def test_conditions_are_written_in_words():
    """ "x.size(0)" in the place of the leaf that the tree has."""
    f = kiln.explain(lambda x: x[: math.ceil(x.shape[0] * 0.3)] if math.sqrt(x.shape[0]) < 2.5 else x - 1, dynamic=True)
    (entry,) = f(torch.randn(8, 6)).entries
    assert "not (sqrt(l_x_.size(0)) < 2.5)" in entry.guards
