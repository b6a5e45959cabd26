"""Writes to parts of tensors: only the part is written, in the place of the old elements. random_programs.parts looks for
wrong results; this looks at what is computed."""

import math
import re

import pytest
import torch
from torch import nn

import kiln
from helpers import check, logged_loops

CACHE = (8, 64, 4, 16)
KEYS = (2, 8, 4, 16)


def nest_sizes(capfd, function, *args):
    lowered = logged_loops(capfd, function, *args)[0]
    return [math.prod(map(int, n.split(", "))) for n in re.findall(r"nest .* extents \[([\d, ]+)\]", lowered)]


def largest_nest(capfd, function, *args):
    """Points of the largest loop nest that `function` is lowered to."""
    return max(nest_sizes(capfd, function, *args))


def slice_of_slice(c, k, i):
    c[:2, 4:12] = k


def with_a_step(c, k, i):
    c[:2, 4:20:2] = k


def selected(c, k, i):
    c[3, :, 2] = k[0, 0, 0]


def diagonal(c, k, i):
    c.view(512, 64)[:64].diagonal().add_(1)
    c[0, :4].diagonal(1, 1, 0).fill_(2)
    c[:3].diagonal(-2, 1, 3).copy_(k[0, 0, :3, 0].unsqueeze(1).unsqueeze(2).expand(3, 4, 16))


def transposed(c, k, i):
    c[:2].transpose(1, 2)[:, :, 4:12] = k.transpose(1, 2)


def added(c, k, i):
    c[:2, 4:12] += k


def by_indices(c, k, i):
    c[:2, i] = k


def index_copied(c, k, i):
    c[:2].index_copy_(1, i, k)


def transposed_index_copied(c, k, i):
    c.transpose(1, 2)[:2].index_copy_(2, i, k.transpose(1, 2))


def scattered(c, k, i):
    c[:2].scatter_(1, i.view(1, -1, 1, 1).expand(KEYS), k)


def rows_added(c, k, i):
    c[:2].index_add_(1, i, k)
    c[:2].index_add_(1, i, k, alpha=-0.5)


def rows_put_and_added(c, k, i):
    c.index_put_((torch.tensor([[1], [1]]), i), k, accumulate=True)


def rows_filled(c, k, i):
    c.index_fill_(1, i[:2], 2.0)
    c.index_fill_(1, i[3], k.view(-1)[0])


def elements_put(c, k, i):
    c.put_(i * 7, k.view(-1)[:8])
    c.put_(-i, k.view(-1)[:8], accumulate=True)


def scattered_and_added(c, k, i):
    c[:2].scatter_add_(1, (i // 2).view(1, -1, 1, 1).expand(KEYS), k)


def rows_read_and_written(c, k, i):
    c[:2, i] += k
    c[:2, i] = c[:2, i] * 0.5 + k
    return c[:2, i].sum()


def written_twice(c, k, i):
    c[:2, 4:12] = k
    c[:2, 12:20] = k + 1
    return c[:2, 8:16] * 2


def read_before(c, k, i):
    old = c[:2, 4:12].clone()
    c[:2, 4:12] = k
    return old


def other_part_read_before(c, k, i):
    old = c[5] * 2
    c[:2, 4:12] = k
    return old


@pytest.mark.parametrize(
    "function",
    [
        slice_of_slice,
        with_a_step,
        selected,
        diagonal,
        transposed,
        added,
        by_indices,
        index_copied,
        scattered,
        rows_added,
        rows_put_and_added,
        rows_filled,
        elements_put,
        scattered_and_added,
        rows_read_and_written,
        written_twice,
        read_before,
        other_part_read_before,
    ],
)
def test_only_the_part_of_an_argument_is_written(function, capfd):
    args = torch.randn(CACHE), torch.randn(KEYS), torch.arange(4, 12)
    check(function, *args)
    assert largest_nest(capfd, function, *args) <= math.prod(KEYS) * 8


def test_a_column_of_a_transposed_tensor():
    check(transposed_index_copied, torch.randn(CACHE), torch.randn(KEYS), torch.arange(4, 12))


def rows_of_a_temporary(x, i):
    out = torch.tanh(x) @ torch.ones(64, 64)
    for row in range(6):
        out[i[row]] = row
        out[row + 10, 3:5] *= 2
    return out.sum()


def test_a_temporary_is_not_copied_for_each_write(capfd):
    x, i = torch.randn(64, 64), torch.tensor([5, 3, 3, 60, 0, 1])
    check(rows_of_a_temporary, x, i)
    sizes = nest_sizes(capfd, rows_of_a_temporary, x, i)
    assert sum(n >= x.numel() for n in sizes) <= 3, sizes  # tanh, ones, the sum


class Attention(nn.Module):
    """One head that keeps its keys and values, written at computed places as transformers' StaticCache does."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(16, 48)
        self.register_buffer("keys", torch.zeros(2, 64, 16))
        self.register_buffer("values", torch.zeros(2, 64, 16))

    def forward(self, x, position):
        q, k, v = self.project(x).chunk(3, -1)
        self.keys.index_copy_(1, position, k)
        self.values.index_copy_(1, position, v)
        mask = torch.arange(64) <= position[:, None]
        return nn.functional.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask)


def test_a_cache_of_keys_and_values():
    torch.manual_seed(0)
    eager, own = Attention(), Attention()
    own.load_state_dict(eager.state_dict())
    compiled = kiln.compile(own)
    with torch.no_grad():
        for step in range(5):
            x, position = torch.randn(2, 1, 16), torch.tensor([step])
            torch.testing.assert_close(compiled(x, position), eager(x, position))
        torch.testing.assert_close(own.keys, eager.keys)
        with pytest.raises(IndexError) as expected:
            eager(x, torch.tensor([64]))
        with pytest.raises(IndexError) as got:
            compiled(x, torch.tensor([64]))
        assert str(got.value) == str(expected.value)
        torch.testing.assert_close(own.keys, eager.keys)


def raises_before(c, k, i):
    first = k.view(-1)[i * 1000]
    c[:2, 4:12] = k
    return first


def raises_behind(c, k, i):
    c[:2, 4:12] = k
    return k.view(-1)[i * 1000]


def raises_behind_a_change(c, k, i):
    c[:2, 4:12] += k
    return k.view(-1)[i * 1000]


LARGE = (64, 1024, 4, 16)  # too large to be copied before each call


@pytest.mark.parametrize("function", [raises_before, raises_behind, raises_behind_a_change])
def test_errors_find_the_argument_as_in_eager(function):
    check(function, torch.randn(LARGE), torch.randn(KEYS), torch.arange(8))


CHANGES = [added, rows_added, rows_put_and_added, rows_filled, elements_put, scattered_and_added, rows_read_and_written]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("wrong", [0, 3])
def test_nothing_is_written_where_an_index_is_wrong(change, wrong):
    """In the middle of the call, and at its end."""

    def function(c, k, i, j):
        c[1, j] += 1
        change(c, k, i)
        c[j] *= 2

    i, j = torch.arange(4, 12), torch.arange(4)
    i[wrong] = j[3 - wrong] = 1 << 20
    c, k = torch.randn(LARGE), torch.randn(KEYS)
    check(function, c, k, torch.arange(4, 12), torch.arange(4))
    check(function, c, k, torch.arange(4, 12), j)
    check(function, c, k, i, torch.arange(4))


@pytest.mark.parametrize("change", CHANGES)
def test_elements_are_put_back_where_something_else_raises(change, capfd):
    def function(c, k, i, j):
        change(c, k, i)
        change(c, k * 2, i + 3)
        return nn.functional.embedding(j, k[0, 0]).sum() + c[0, 0, 0, 0]

    c, k, i, j = torch.randn(LARGE), torch.randn(KEYS), torch.arange(4, 12), torch.arange(4)
    check(function, c, k, i, j)
    check(function, c, k, i, j + 1)
    assert largest_nest(capfd, function, c, k, i, j) <= math.prod(KEYS) * 8


@pytest.mark.parametrize("function", [written_twice, by_indices, index_copied, transposed, diagonal])
def test_the_switch(function, capfd):
    args = torch.randn(CACHE), torch.randn(KEYS), torch.arange(4, 12)
    with kiln.config.patch(disable_passes="lower.in_place"):
        check(function, *args)
        assert largest_nest(capfd, function, *args) >= math.prod(CACHE)


@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.index_add_(0, torch.tensor([0]), torch.ones(1, 6, 5)),
        lambda t: t.index_copy_(0, torch.tensor([0]), torch.ones(1, 6, 5)),
        lambda t: t.scatter_(0, torch.zeros(1, 6, 5, dtype=torch.long), 2.0),
        lambda t: t.scatter_add_(0, torch.zeros(1, 6, 5, dtype=torch.long), torch.ones(1, 6, 5)),
        lambda t: t.masked_scatter_(t > 0, torch.ones(240)),
        lambda t: t.masked_fill_(t > 0, 2.0),
        lambda t: t.cumsum_(0),
        lambda t: t.tril_(),
        lambda t: t.baddbmm_(torch.ones(8, 6, 2), torch.ones(8, 2, 5)),
    ],
)
def test_a_transposed_view_of_a_product_is_written(write):
    """Their functional forms give a row-major result, which is no view of the product's rows."""

    def function(x):
        product = x @ torch.ones(5, 5)
        write(product.transpose(0, 1))
        return product, product.view(-1) + 1, x * 2

    check(function, torch.randn(6, 8, 5))
    check(lambda x: (write(x.transpose(0, 1)), x * 2)[1], torch.randn(7, 9, 6)[1:, 1:, 1:])
