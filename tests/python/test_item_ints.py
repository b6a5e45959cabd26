"""Ints that item() gives: computed with in the graph, in Python's way."""

import pytest
import torch

import kiln
from kiln.testing import assert_same

INTS = {
    "sum": lambda a, b: (a.item() + b.item()) * 3 - a.item(),
    "product": lambda a, b: (a.item() * b.item()) * (a.item() + 1),
    "quotient": lambda a, b: (a.item() - b.item()) / 3 + a.item() // 2,
    "power": lambda a, b: a.item() ** 2 + b.item() % 5,
    "signs": lambda a, b: (-a.item(), abs(b.item()), 7 - a.item()),
    "compared": lambda a, b: (max(3, 2, a.item(), b.item()), min(a.item(), b.item(), 2)),
}


@pytest.mark.parametrize("name", INTS)
def test_ints_of_any_size(name):
    """Python's ints have no bound: a call in which one leaves int64 runs in eager, all others in one graph."""
    f = INTS[name]
    compiled = kiln.compile(f, fullgraph=True)
    values = [0, 1, -7, 2**31, 2**53 + 1, 2**61 + 1, 2**62, -(2**62), 2**63 - 1, -(2**63), 3037000500, -3037000499]
    for x in values:
        for y in values:
            a, b = torch.tensor(x), torch.tensor(y)
            found, expected = compiled(a, b), f(a, b)
            assert found == expected and repr(found) == repr(expected), (x, y)
    assert len(compiled._entries) == 1


def test_counts_are_summed_and_divided():
    def accuracy(batches, y):
        correct = total = 0
        for x in batches:
            correct += (x.argmax(1) == y).sum().item()
            total += y.size(0)
        return correct / total, correct, min(correct, 5)

    def recall(x, y):
        hits, missed = ((x > 0) & y).sum().item(), ((x <= 0) & y).sum().item()
        return hits / (hits + missed + 1), x * 2

    counted, recalled = kiln.compile(accuracy, fullgraph=True), kiln.compile(recall, fullgraph=True)
    for n in (6, 7, 8, 9):
        batches, y = [torch.randn(n, 3) for _ in range(3)], torch.randint(0, 3, (n,))
        assert counted(batches, y) == accuracy(batches, y)
        x, y = torch.randn(n), torch.rand(n) > 0.5
        assert_same(recalled(x, y), recall(x, y))
    assert len(counted._entries) == len(recalled._entries) == 2
