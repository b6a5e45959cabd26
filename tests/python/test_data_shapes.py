"""Results whose shapes depend on the values of small integer tensors: decided as guards, one entry for each outcome."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kiln
from helpers import breaks, check
from kiln.testing import assert_same

MASK = torch.tensor([True, False, True, True, False])
OTHER = torch.tensor([False, True, True, False, True])  # as many are true
FEWER = torch.tensor([False, False, True, False, False])
COUNTS = torch.tensor([2, 0, 3, 1, 1])
X = torch.arange(20.0).reshape(5, 4)


def masked(x, mask):
    return x[mask] * 2, x[:, mask[:4]], x.masked_select(mask[:, None])


def positions(x, mask):
    grid = mask[:, None] & mask[None]
    pairs = grid.nonzero()
    return pairs, torch.where(grid), torch.argwhere(mask), torch.nonzero(mask, as_tuple=True), x[pairs[:, 0]]


def several_dims(x, mask):
    grid = mask[:, None] & mask[:4]
    return x[grid], x.unsqueeze(0)[:, grid], x.t()[None, :, mask]


def repeated(x, counts):
    return x.repeat_interleave(counts, 0), torch.repeat_interleave(counts), x.repeat_interleave(counts[:1], 1)


def parted(x, counts):
    return [part.sum(0) for part in x.repeat(2, 1)[:7].split(counts.tolist())]


def occurring(x, counts):
    values, inverse, times = torch.unique(counts, return_inverse=True, return_counts=True)
    return values, inverse, times, torch.unique_consecutive(counts), x[values]


def counted(x, counts):
    return torch.bincount(counts), torch.bincount(counts, minlength=6), x * 2


def sized(x, counts):
    for _ in range(int(counts.max())):
        x = x + 1
    return x.new_zeros(counts.max().item() + 1, 4).index_add(0, counts, x), x[: counts[0].item()]


def chained(x, mask):
    """The second number depends on the first."""
    chosen = mask.nonzero()[:, 0]
    later = chosen[chosen > 1]
    return x[later], x[: later.sum().item() % 5], x.new_ones(later.numel())


def in_tensors(x, counts):
    most = counts.max().item()
    sizes = torch.tensor([[most, x.shape[0]], [1, int(counts[0])]])
    return sizes, torch.as_tensor((most, 2.5)), x.new_tensor([most]), torch.tensor(most), x * sizes.sum()


def branching(x, mask):
    if mask.any():
        x = x * 2
    return x - 1 if torch.equal(mask, mask.flip(0)) else x + 1


@pytest.mark.parametrize("f", [masked, positions, several_dims, chained, branching])
@pytest.mark.parametrize("mask", [MASK, FEWER, torch.zeros(5, dtype=torch.bool), MASK & ~MASK | True])
def test_masks(f, mask):
    check(f, X, mask)
    assert breaks(f, X, mask) == 0


@pytest.mark.parametrize("f", [repeated, parted, occurring, counted, sized, in_tensors])
@pytest.mark.parametrize("counts", [COUNTS, COUNTS.flip(0), torch.tensor([1, 1, 4, 1, 0])])
def test_counts(f, counts):
    check(f, X, counts)
    assert breaks(f, X, counts) == 0


@pytest.mark.parametrize("f", [masked, positions, several_dims, chained, branching])
def test_one_function_many_masks(f):
    compiled = kiln.compile(f)
    for mask in (MASK, OTHER, FEWER, MASK, ~FEWER, OTHER, ~MASK, FEWER, MASK.flip(0)):
        torch.testing.assert_close(compiled(X, mask), f(X, mask), rtol=0, atol=0)


@pytest.mark.parametrize("f", [repeated, occurring, counted, sized])
def test_one_function_many_counts(f):
    compiled = kiln.compile(f)
    for shift in (0, 1, 3, 0, 2, 4, 1, 3):
        counts = torch.arange(5).roll(shift) % (shift + 1)
        torch.testing.assert_close(compiled(X, counts), f(X, counts), rtol=0, atol=0)


def test_as_many_others_take_the_same_entry():
    compiled = kiln.compile(lambda x, mask: x[mask] * 2)
    for mask, entries in ((MASK, 1), (OTHER, 1), (FEWER, 2), (MASK, 2), (FEWER, 2), (OTHER, 2)):
        assert torch.equal(compiled(X, mask), X[mask] * 2)
        assert len(compiled._entries) == entries


def test_what_is_always_different_breaks():
    compiled = kiln.compile(lambda x, i: x[: i.max().item()] * 2)
    long = torch.arange(60.0)
    for n in (1, 2, 3, 4, 5, 6, 7, 8, 3, 30, 40):
        assert torch.equal(compiled(long, torch.tensor([0, n])), long[:n] * 2)
    assert len(compiled._entries) == 5  # four of the values, and one with a break that serves all others


def test_a_mask_of_floats_breaks():
    def f(x):
        return x[x > 0.5].sort()[0] * 2

    check(f, torch.rand(50))
    assert breaks(f, torch.rand(50)) == 1


def test_counts_of_so_many_numbers_at_least():
    """Whatever they are: the largest is only asked whether it is larger than the least size."""

    def f(x, y, w):
        confused = torch.bincount(y * 5 + x.argmax(1), minlength=25).reshape(5, 5)
        return confused, torch.bincount(y, weights=w, minlength=9), torch.bincount(x.abs().long()[:, 0], minlength=50)

    compiled = kiln.compile(f, fullgraph=True)
    for dtype in (torch.float32, torch.float64, torch.int64, torch.float16):
        for n in range(2, 6):
            args = torch.randn(16, 5), torch.randint(0, n, (16,)), torch.rand(16).mul(5).to(dtype)
            torch.testing.assert_close(compiled(*args), f(*args))
    assert len(compiled._entries) == 4

    def confused(x, y):
        return torch.bincount(y * 5 + x.argmax(1), minlength=25)

    check(confused, torch.randn(16, 5), torch.randint(0, 5, (16,)))
    compiled = kiln.compile(confused)
    x = torch.randn(16, 5)
    for y in (torch.arange(16) % 5, torch.arange(16), torch.arange(16) % 3):
        assert torch.equal(compiled(x, y), confused(x, y))
    with pytest.raises(RuntimeError, match="non-negative"):
        compiled(x, -torch.arange(16))


def test_switched_off():
    def f(x, mask):
        return x[mask] * 2

    with kiln.config.patch(disable_passes="capture.data_branches,capture.masks"):
        assert breaks(f, X, MASK) == 1
        check(f, X, MASK)


def test_errors_are_eager_s():
    check(lambda n: torch.bincount(n), torch.tensor([1, -1, 2]))
    check(lambda x, n: x.repeat_interleave(n, 0), X, torch.tensor([1, -1, 2, 0, 0]))
    check(lambda x, mask: x[mask], X, torch.ones(4, dtype=torch.bool))
    compiled = kiln.compile(lambda n: torch.bincount(n))
    assert compiled(torch.tensor([1, 2, 2])).tolist() == [0, 1, 2]
    with pytest.raises(RuntimeError, match="non-negative"):
        compiled(torch.tensor([-1, 2, 2]))
    compiled = kiln.compile(lambda x, n: x.repeat_interleave(n, 0))
    for counts in ([1, 2, 0, 1, 1], [1, -2, 1, 0, 0], [4, -2, 1, 1, 1]):
        counts = torch.tensor(counts)
        if (counts < 0).any():
            with pytest.raises(RuntimeError, match="can not be negative"):
                compiled(X, counts)
        else:
            assert torch.equal(compiled(X, counts), X.repeat_interleave(counts, 0))


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, mask):
        y = self.layer(x)
        z = torch.zeros_like(y)
        z[mask] = y[mask] * 2
        z[~mask] = y.masked_select(~mask[:, None]).view(-1, 4)
        return z


def test_gradients_of_masks():
    torch.manual_seed(0)
    check(Masked(), X, MASK)
    assert breaks(Masked(), X, MASK) == 0


class GraphConvolution(nn.Module):
    """Kipf and Welling (2017), with self-loops added where there are none, as graph libraries do it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 8)

    def forward(self, x, edges):
        nodes = int(edges.max()) + 1
        edges = edges[:, edges[0] != edges[1]]
        loops = torch.arange(nodes)
        source, target = torch.cat([edges, torch.stack([loops, loops])], 1)
        degree = torch.zeros(nodes).scatter_add(0, target, torch.ones(target.numel()))
        weight = degree[source].rsqrt() * degree[target].rsqrt()
        return torch.zeros(nodes, 8).index_add(0, target, self.layer(x)[source] * weight[:, None])


def test_graph_convolution_is_one_graph():
    torch.manual_seed(0)
    edges = torch.tensor([[0, 1, 2, 3, 4, 4, 2], [1, 1, 0, 2, 4, 3, 1]])
    model = GraphConvolution()
    check(model, X, edges)
    assert breaks(model, X, edges) == 0


def test_unique_rows_and_columns_keep_their_layout():
    x = torch.tensor([[[1, 1], [0, 1], [2, 1], [0, 1]], [[1, 1], [0, 1], [2, 1], [0, 1]]])

    def program(x):
        return (
            *torch.unique(x, return_inverse=True, return_counts=True, dim=1),
            torch.unique(x, dim=0),
            torch.unique(x, dim=-1) * 2,
            torch.unique_consecutive(x, dim=1) + 1,
            torch.unique(x.transpose(0, 2)),
        )

    want, got = program(x), kiln.compile(program)(x)
    assert [t.stride() for t in want] == [t.stride() for t in got]
    assert all(torch.equal(a, b) for a, b in zip(want, got))


SIZED_BY_TENSORS = {
    "pad": lambda x, n: F.pad(x, (0, n)) + 1,
    "view": lambda x, n: x.view(n, -1) * 2,
    "slice": lambda x, n: x[n:] * 2,
    "full": lambda x, n: torch.full((n,), 3.0) + x.sum(),
    "arange": lambda x, n: torch.arange(n) * x.sum(),
    "linspace": lambda x, n: torch.linspace(0, 1, n) + x.sum(),
    "narrow": lambda x, n: torch.narrow(x, 0, n, 2) * 2,
    "computed": lambda x, n: F.pad(x, (0, torch.ceil((x.shape[0] - n) / n + 1).to(torch.int64) - 1)),
    "times": lambda x, n: [x := x * 2 for _ in range(n)][-1],
}


@pytest.mark.parametrize("name", SIZED_BY_TENSORS)
def test_sizes_and_indices_that_are_tensors(name):
    f = SIZED_BY_TENSORS[name]
    assert breaks(f, X[:, 0][:4], torch.tensor(2)) == 0
    compiled = kiln.compile(f)
    for n in (2, 1, 2, 4):
        x = torch.arange(4.0 if name == "view" else 6.0)
        assert_same(f(x, torch.tensor(n)), compiled(x, torch.tensor(n)))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.quantile(x, 0.25, dim=1),
        lambda x: torch.quantile(x, torch.tensor([0.1, 0.8]), interpolation="nearest"),
        lambda x: torch.nanquantile(torch.where(x > 1, torch.nan, x), 0.4, dim=0, keepdim=True),
        lambda x: torch.cov(x) @ x,
        lambda x: torch.corrcoef(x + x.sin()),
    ],
)
def test_checks_inside_operators_that_constants_decide(f):
    assert breaks(f, X) == 0
    check(f, X, rtol=1e-5, atol=1e-5)


class Flagged(nn.Module):
    """Makes something at its first call, and keeps in a buffer that it did."""

    def __init__(self):
        super().__init__()
        self.register_buffer("made", torch.tensor(False))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        if not self.made:
            self.scale.copy_(1 / x.std(0))
            self.made.fill_(True)
        return x * self.scale


def test_a_flag_in_a_buffer():
    """A truth that is given as such is decided, as one that is computed is."""
    eager, compiled = Flagged(), kiln.compile(Flagged(), fullgraph=True)
    for _ in range(3):
        x = torch.randn(5, 4)
        assert_same(compiled(x), eager(x))
    assert_same(compiled.scale, eager.scale)

    def f(x, flag):
        return x + 1 if flag else x - 1

    chosen = kiln.compile(f, fullgraph=True)
    for flag in (True, False, True):
        assert_same(chosen(X, torch.tensor(flag)), f(X, torch.tensor(flag)))
    assert len(chosen._entries) == 2


def written(x, index, value, accumulate=False):
    return torch.ops.aten.index_put(x, index, value, accumulate)


@pytest.mark.parametrize(
    "store",
    [
        lambda x, rows, mask, v: written(x, [None, rows, mask], v[0, 0]),
        lambda x, rows, mask, v: written(x, [None, rows, mask], v[0, 0], accumulate=True),
        lambda x, rows, mask, v: written(x, [rows[:1], rows, mask], v[0]),
        lambda x, rows, mask, v: written(x[0].t(), [mask], v),
    ],
)
def test_where_to_write_may_depend_on_values_that_are_not_decided(store):
    """The result's shape does not, so the call stays in the graph, and raises what eager raises."""
    x, rows, v = torch.randn(1, 2, 3), torch.tensor([0, 1]), torch.randn(2, 2)
    for scores in ([1.0, 1.0, -1.0], [-1.0, 1.0, 1.0]):
        check(lambda x, s, v: store(x, rows, s > 0, v), x, torch.tensor(scores), v, fullgraph=True)
    check(lambda x, s, v: store(x, rows, s > 0, v), x, torch.ones(3), v)  # three of two
