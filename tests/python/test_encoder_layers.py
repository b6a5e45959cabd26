"""nn.TransformerEncoder and nn.MultiheadAttention in inference, where eager has operators of their own, masks and padding
included."""

import pytest
import torch
from torch import nn

import kiln
from helpers import breaks
from kiln.testing import assert_same


def padding_of(lengths, size, aligned=True):
    mask = torch.arange(size) >= torch.tensor(lengths)[:, None]
    return mask if aligned else mask.flip(1)


def bands(size):
    return (torch.arange(size)[:, None] - torch.arange(size)).abs() > 2


def encoder(layers=2, norm=False, nested=True, **options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options)
    return nn.TransformerEncoder(layer, layers, nn.LayerNorm(8) if norm else None, enable_nested_tensor=nested).eval()


def check(f, *args, **kwargs):
    """Without a break, and NaN where eager has it."""
    with torch.no_grad():
        expected = f(*args, **kwargs)
        compiled = kiln.compile(f)
        for _ in range(2):
            assert_same(compiled(*args, **kwargs), expected, rtol=1e-4, atol=1e-5)
        assert breaks(lambda: f(*args, **kwargs)) == 0


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("options", [{}, {"norm": True}, {"activation": "gelu"}])
def test_padding(options, aligned):
    """Of batches whose padding is at the end eager makes nested tensors, and zeros of the padding."""
    net, x = encoder(**options), torch.randn(3, 7, 8)
    for lengths in ([7, 4, 2], [7, 7, 7], [1, 7, 3]):
        check(lambda x, m: net(x, src_key_padding_mask=m), x, padding_of(lengths, 7, aligned))
    as_floats = torch.zeros(3, 7).masked_fill(padding_of([7, 4, 2], 7, aligned), -torch.inf)
    check(lambda x, m: net(x, src_key_padding_mask=m), x, as_floats)


def test_one_capture_for_padding_of_either_kind():
    net, x = encoder(), torch.randn(3, 7, 8)
    compiled = kiln.compile(lambda x, m: net(x, src_key_padding_mask=m), fullgraph=True)
    with torch.no_grad():
        for aligned in (True, False, True):
            mask = padding_of([7, 4, 2], 7, aligned)
            assert_same(compiled(x, mask), net(x, src_key_padding_mask=mask), rtol=1e-4, atol=1e-5)
    assert len(compiled._entries) == 1


class OwnLayer(nn.Module):
    """Has nothing but what nn.TransformerEncoder always asks for."""

    def __init__(self):
        super().__init__()
        self.self_attn, self.mix = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 8)

    def forward(self, x, src_mask=None, is_causal=False, src_key_padding_mask=None):
        return x + self.mix(self.self_attn(x, x, x, key_padding_mask=src_key_padding_mask)[0])


def test_layers_of_other_classes():
    torch.manual_seed(0)
    net, x = nn.TransformerEncoder(OwnLayer(), 2).eval(), torch.randn(3, 7, 8)
    check(lambda x, m: net(x, src_key_padding_mask=m), x, padding_of([7, 4, 2], 7))
    check(net, x)


def test_frozen_layers_with_gradients_enabled():
    net, x = encoder().requires_grad_(False), torch.randn(3, 7, 8)
    padding = padding_of([7, 4, 2], 7)
    expected = net(x, src_key_padding_mask=padding)
    assert_same(kiln.compile(net, fullgraph=True)(x, src_key_padding_mask=padding), expected, rtol=1e-4, atol=1e-5)
    assert (expected[2, 2:] == 0).all()


@pytest.mark.parametrize("norm_first", [True, False])
def test_masks_of_layers(norm_first):
    net, x = encoder(nested=False, norm_first=norm_first), torch.randn(3, 7, 8)
    padding = padding_of([7, 4, 0], 7)
    check(lambda x, m: net(x, src_key_padding_mask=m), x, padding)
    check(lambda x, m: net(x, mask=m), x, bands(7))
    check(lambda x, m: net(x, mask=m), x, torch.randn(7, 7))  # adds nothing: any number masks
    check(lambda x, m, p: net(x, mask=m, src_key_padding_mask=p), x, bands(7), padding)
    of_heads = bands(7).expand(6, 7, 7).clone()
    of_heads[3, 2] = True
    check(lambda x, m: net(x, mask=m), x, of_heads)


@pytest.mark.parametrize("weights", [None, "mean", "heads"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masks_of_attention(weights, dtype):
    torch.manual_seed(0)
    attention, x = nn.MultiheadAttention(8, 2, batch_first=True).eval().to(dtype), torch.randn(3, 7, 8, dtype=dtype)
    options = {"need_weights": weights is not None, "average_attn_weights": weights == "mean"}
    padding, square = padding_of([7, 4, 0], 7), bands(7)
    square[3] = True  # a query with no key
    for masks in (
        {},
        {"key_padding_mask": padding},
        {"attn_mask": square},
        {"key_padding_mask": padding, "attn_mask": square},
    ):
        check(lambda x, m=masks: attention(x, x, x, **m, **options), x)


def test_gradients_take_the_other_path():
    net, x = encoder(), torch.randn(3, 7, 8)
    padding = padding_of([7, 4, 2], 7)
    expected = net(x, src_key_padding_mask=padding)
    assert_same(kiln.compile(net)(x, src_key_padding_mask=padding), expected, rtol=1e-4, atol=1e-5)
    assert (expected[2, 3:] != 0).all()


@pytest.mark.parametrize("dim", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_weight_norm(dim, dtype):
    torch.manual_seed(0)
    net = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 6, 3), dim=dim).to(dtype)
    x = torch.randn(2, 4, 9, dtype=dtype)
    results = []
    for run in (net, kiln.compile(net, fullgraph=True)):
        net.zero_grad()
        y = run(x)
        y.sin().sum().backward()
        results.append([y.detach(), *(p.grad for p in net.parameters())])
    tolerance = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    assert_same(results[1], results[0], **tolerance)
    old = nn.utils.weight_norm(nn.Linear(5, 3)).to(dtype)
    x = torch.randn(4, 5, dtype=dtype)
    assert_same(kiln.compile(old, fullgraph=True)(x).detach(), old(x).detach(), **tolerance)
