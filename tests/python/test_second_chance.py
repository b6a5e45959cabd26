"""What changed in each call up to the recompile limit, and then settles, is compiled in the end."""

import collections
import warnings

import torch

import kiln
from kiln.testing import CompileCounter

X = torch.arange(6.0)


def averaged(x, queue):
    """Another program for each length of the queue, until it is full."""
    queue.append(x.sin())
    return sum(queue) / len(queue)


def test_a_queue_that_is_full():
    ours, theirs = collections.deque(maxlen=12), collections.deque(maxlen=12)
    counter = CompileCounter()
    compiled = kiln.compile(averaged, backend=counter)
    counts = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for i in range(1000):
            torch.testing.assert_close(compiled(X + i, ours), averaged(X + i, theirs))
            counts.append(counter.frame_count)
    assert sum("recompile limit" in str(w.message) for w in seen) == 1
    limit = kiln.config.recompile_limit
    assert counts[40] == limit
    assert counts[-1] == limit + 1


def test_what_never_settles_is_tried_less_and_less():
    counter = CompileCounter()
    compiled = kiln.compile(lambda x, name: x + len(name), backend=counter)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        for i in range(2000):
            assert torch.equal(compiled(X, f"{i}"), X + len(str(i)))
    assert counter.frame_count <= kiln.config.recompile_limit + 6


def test_no_variants_beyond_the_limit():
    ours = collections.deque(maxlen=12)
    counter = CompileCounter()
    compiled = kiln.compile(averaged, backend=counter)
    with kiln.config.patch(size_limit=0), warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        for i in range(500):
            compiled(X + i, ours)
    assert counter.frame_count == kiln.config.recompile_limit
