"""Attention of one query, as a decoder's step with a cache of keys has it."""

import pytest
import torch
import torch.nn.functional as F

import kiln
from helpers import check

INFINITY = float("inf")


def attend(q, k, v, mask=None, **options):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)


def operands(heads=4, shared=1, keys=37, width=16, dtype=torch.float32):
    torch.manual_seed(keys)
    q = torch.randn(2, heads * shared, 1, width, dtype=dtype)
    return q, *(torch.randn(2, heads, keys, width, dtype=dtype) for _ in range(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keys", [1, 2, 37, 300])
def test_lengths(keys, dtype):
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    with torch.no_grad():
        check(attend, *operands(keys=keys, dtype=dtype), grad=False, rtol=tolerance, atol=tolerance)


MASKS = {
    "bools": torch.arange(37) % 3 > 0,
    "numbers": torch.linspace(-3, 3, 37),
    "of each head": torch.linspace(-3, 3, 4 * 37).reshape(1, 4, 1, 37),
    "of each row": torch.where(torch.arange(37) < torch.tensor([[20], [31]]), 0.0, -INFINITY).reshape(2, 1, 1, 37),
    "no key at all": torch.full((2, 1, 1, 37), -INFINITY),
    "one row without a key": torch.tensor([0.0, -INFINITY]).reshape(2, 1, 1, 1).expand(2, 1, 1, 37),
    "no bool at all": torch.zeros(1, 37, dtype=torch.bool),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    mask = MASKS[name]
    mask = mask if mask.dim() > 1 else mask.reshape(1, 37)
    with torch.no_grad():
        check(attend, *operands(), mask, grad=False, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mask", [None, "of each row"])
def test_heads_that_share_keys(mask):
    q, k, v = operands(shared=3)
    with torch.no_grad():
        check(
            lambda q, k, v: attend(q, k, v, MASKS[mask] if mask else None, enable_gqa=True, scale=0.3),
            *(q, k, v),
            grad=False,
            rtol=1e-5,
            atol=1e-5,
        )


def test_other_layouts_and_causal():
    q, k, v = operands()
    k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v))
    with torch.no_grad():
        check(attend, q, k, v, grad=False, rtol=1e-5, atol=1e-5)
        check(lambda q, k, v: attend(q, k, v, is_causal=True), q, k, v, grad=False, rtol=1e-5, atol=1e-5)


def test_gradients():
    check(attend, *operands(), rtol=1e-4, atol=1e-5)
    check(attend, *operands(), MASKS["of each row"], rtol=1e-4, atol=1e-5)


def test_decoding_with_a_growing_cache():
    torch.manual_seed(0)
    project = torch.nn.Linear(32, 96)

    def step(x, keys, values):
        q, k, v = project(x).reshape(2, 1, 3, 4, 8).permute(2, 0, 3, 1, 4)
        keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        return attend(q, keys, values).transpose(1, 2).reshape(2, 1, 32), keys, values

    compiled = kiln.compile(step)
    with torch.no_grad():
        results = []
        for f in (step, compiled):
            x, keys, values = torch.linspace(-1, 1, 64).reshape(2, 1, 32), *torch.zeros(2, 2, 4, 3, 8)
            for _ in range(12):
                x, keys, values = f(x, keys, values)
            results.append((x, keys, values))
    for ours, eager in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)
