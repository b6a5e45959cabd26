"""Sizes that are told by slices, bounds of operators, and shapes that live across a graph break: open where eager takes any."""

import pytest
import torch

import kiln
from kiln.testing import CompileCounter, assert_same


def test_slices_that_select_all():
    def f(x):
        y = x * 2
        return torch.cat([torch.zeros_like(y[:, :1]), y[..., -8:], y[:, 0:64, None, :3].flatten(1, 2)], 2)

    counter = CompileCounter()
    compiled = kiln.compile(f, backend=counter)
    for n in (2, 3, 4, 5, 6):
        x = torch.randn(n, 1, 4)
        assert_same(compiled(x), f(x))
    assert counter.frame_count == 2

    def truncate(x):
        return x[:, :6] * 2, x[:, -6:] + 1

    compiled = kiln.compile(truncate)
    for n in (2, 3, 5, 6, 7, 8, 4, 9, 1):
        x = torch.randn(2, n)
        assert_same(compiled(x), truncate(x))
    assert len(compiled._entries) <= 5


def test_sizes_as_bounds_and_as_the_index_that_is_ignored():
    def f(x, target):
        n = x.size(1)
        clamped = target + 1
        clamped.clamp_(0, n)
        return torch.nn.functional.cross_entropy(x, clamped, ignore_index=n), clamped

    compiled = kiln.compile(f)
    for n in (12, 13, 14, 15, 16):
        x, target = torch.randn(4, n), torch.tensor([0, 40, n - 2, n - 1])
        assert_same(compiled(x, target), f(x, target))
    assert len(compiled._entries) == 2


SHAPES = {
    "size": lambda x: x.size(),
    "sliced": lambda x: x.shape[:-1],
    "number": lambda x: (16 - x.shape[1] % 16, x.shape[0]),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_that_live_across_a_break(shape):
    """The part before it computes nothing but sizes; behind it they are what another call's are not."""
    take = SHAPES[shape]

    def f(x):
        sizes = take(x)
        kiln.graph_break()
        return x.sum() + torch.ones(sizes), sizes

    compiled = kiln.compile(f)
    for i, (n, m) in enumerate([(2, 6), (3, 8), (4, 10), (5, 12), (6, 14), (7, 8)]):
        x = torch.randn(n, m)
        with kiln.explanation.recording() as seen:
            assert_same(compiled(x), f(x))
        assert type(compiled(x)[1]) is type(take(x))
        assert i < 2 or seen.entries == []


LISTS = {
    "a shape": lambda x: torch.as_tensor(x.shape[1:], dtype=torch.long),
    "a list of shapes": lambda x: torch.as_tensor([x.shape[1:], (x.size(0),)]),
    "tensors": lambda x: torch.as_tensor([((x[:, 0] > 0).sum(), x.shape[1]), (2, 3)], dtype=torch.long),
    "tensors of two dtypes": lambda x: torch.as_tensor((x.sum(), (x > 0).sum())),
    "tensor() of a shape": lambda x: torch.tensor([x.shape, x.shape]),
}


@pytest.mark.parametrize("made", LISTS)
def test_tensors_of_lists_of_sizes_and_tensors(made):
    make = LISTS[made]

    def f(x):
        return make(x), x + make(x).sum()

    compiled = kiln.compile(f, fullgraph=True)
    for n in (12, 13, 14, 15):
        x = torch.randn(n, n + 1)
        assert_same(compiled(x), f(x))
    assert len(compiled._entries) == 2


BRANCHES = {
    "compared": lambda x, lengths: x * 2 if lengths.max().item() < x.shape[1] else x + 1,
    "mask": lambda x, lengths: x * 2 if (lengths == x.shape[0]).any() else x + 1,
    "range": lambda x, lengths: x * 2 if torch.equal(lengths, torch.arange(1, x.shape[0] + 1)) else x + 1,
    "computed": lambda x, lengths: x * 2 if lengths.sum() == x.shape[0] * (x.shape[0] + 1) // 2 else x + 1,
}


@pytest.mark.parametrize("branch", BRANCHES)
def test_branches_on_data_that_are_compared_with_sizes(branch):
    f = BRANCHES[branch]
    compiled = kiln.compile(f)
    for n in (4, 5, 6, 7, 8):
        x = torch.randn(n, n + 1)
        for lengths in (torch.arange(1, n + 1), torch.full((n,), n + 2)):
            assert_same(compiled(x, lengths), f(x, lengths))
    # Each side for the first sizes, and for all.
    assert len(compiled._entries) <= 4


def test_assertions_and_divisions_that_are_told_sizes():
    def checked(x, lengths):
        assert lengths.max().item() <= x.shape[1], "longer than the input"
        return x * 2

    def divided(x, lengths):
        return x * (7 // (lengths.max().item() - x.shape[0]))

    for f in (checked, divided):
        compiled = kiln.compile(f)
        for n in (4, 5, 6, 7):
            x = torch.randn(n, n)
            assert_same(compiled(x, torch.tensor([1, n - 1])), f(x, torch.tensor([1, n - 1])))
        assert len(compiled._entries) == 2
        for n in (6, 8):
            bad = torch.tensor([1, n + 1 if f is checked else n])
            for g in (f, compiled):
                with pytest.raises(AssertionError if f is checked else ZeroDivisionError):
                    g(torch.randn(n, n), bad)


def test_an_attribute_that_is_only_asked_for_none():
    """Its sizes are not the program's business."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.deltas = self.cached = None

        def forward(self, x):
            if self.deltas is None or x.shape[0] == 0:
                return x * 3
            first = self.cached is not None
            return x + 1 if first else x * 2

    model = Model()
    compiled = kiln.compile(model)
    for n, deltas, cached in [(2, 0, 0), (3, 1, 0), (4, 2, 0), (5, 3, 0), (6, 4, 1), (7, 5, 2), (8, 0, 0), (9, 0, 0)]:
        model.deltas = torch.randn(deltas) if deltas else None
        model.cached = torch.randn(cached) if cached else None
        x = torch.randn(n)
        with kiln.explanation.recording() as seen:
            assert_same(compiled(x), model(x))
        assert n not in (4, 5, 7, 9) or seen.entries == []


def test_tensors_of_open_sizes_by_their_class():
    def f(x):
        return torch.Tensor(x.shape[0], 4).fill_(2) * x.sum()

    compiled = kiln.compile(f, fullgraph=True)
    for n in (2, 3, 4, 5):
        x = torch.randn(n)
        assert_same(compiled(x), f(x))
    assert len(compiled._entries) == 2
