"""Batches of products too small for a library: geometry's rotations, filters' states, heads of few channels."""

import pytest
import torch

import kiln
from helpers import check
from kiln.testing import assert_same

SHAPES = [(2, 2, 2), (3, 3, 3), (4, 4, 4), (8, 8, 8), (16, 16, 16), (4, 16, 4), (16, 4, 16), (3, 64, 3), (2, 32, 64)]
SHAPES += [(64, 8, 8), (8, 8, 64), (8, 64, 8), (32, 32, 32), (5, 7, 9), (1, 1, 1), (2, 0, 3), (0, 3, 2)]


def operands(shape, layout, dtype):
    m, k, n = shape
    torch.manual_seed(m + k + n)
    x, y = torch.randn(24, m, k, dtype=dtype), torch.randn(24, k, n, dtype=dtype)
    if layout == "transposed":
        x, y = x.mT.contiguous().mT, y.mT.contiguous().mT
    if layout == "expanded":
        y = y[:1].expand(24, k, n)
    return x, y


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layout", ["plain", "transposed", "expanded"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape, layout, dtype):
    x, y = operands(shape, layout, dtype)
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-9}
    check(lambda x, y: (x.tanh() @ y + 1, (x @ y.exp()).sum(-1)), x, y, calls=1, **tolerance)


def test_half_types_round_once():
    for dtype in (torch.bfloat16, torch.float16):
        x, y = operands((4, 6, 4), "plain", dtype)
        assert_same(kiln.compile(torch.bmm)(x, y), torch.bmm(x, y), rtol=1e-2, atol=1e-2)


def test_products_of_integers():
    x, y = (t.mul(9).long() for t in operands((4, 4, 4), "plain", torch.float64))
    check(torch.bmm, x, y)


def test_a_filter_of_kalman():
    """Predict and correct, step by step, for many tracks at once."""

    def filtered(measured, transition, noise):
        state = torch.zeros(measured.shape[1], 4, 1)
        spread = torch.eye(4).expand(measured.shape[1], 4, 4)
        observe = torch.eye(4)[:2].expand(measured.shape[1], 2, 4)
        for seen in measured:
            state = transition @ state
            spread = transition @ spread @ transition.mT + noise * torch.eye(4)
            gain = spread @ observe.mT @ torch.linalg.inv(observe @ spread @ observe.mT + torch.eye(2))
            state = state + gain @ (seen[..., None] - observe @ state)
            spread = (torch.eye(4) - gain @ observe) @ spread
        return state, spread

    transition = (torch.eye(4) + torch.eye(4).roll(2, 1).triu() * 0.1).expand(30, 4, 4)
    args = torch.randn(6, 30, 2), transition, torch.tensor(0.1)
    check(filtered, *args, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_rows_that_do_not_follow_each_other_are_one_product(dtype, bias, capfd):
    """F.linear of such rows is a batch of products by one matrix, which a library takes one at a time."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(96, 80, bias=bias).to(dtype).requires_grad_(False)
    x = torch.randn(6, 5, 7, 96, dtype=dtype).transpose(1, 2)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    check(layer, x, grad=False, **tolerance)
    kiln.set_logs("output_code")
    try:
        kiln.compile(layer)(x)
    finally:
        kiln.set_logs("")
    text = capfd.readouterr().err
    assert "aten::bmm" not in text
    assert "aten::mm" in text or "aten::addmm" in text
