"""Sizes that come up beyond the recompile limit, where each has an entry of its own: compiled once they have cost as much
in eager as a compile does."""

import time

import pytest
import torch

import kiln
from kiln.testing import CompileCounter, assert_same

LIMIT = 2


@pytest.fixture(autouse=True)
def limits():
    with kiln.config.patch(recompile_limit=LIMIT):
        yield


def entries(compiled):
    return {e["id"]: e["hits"] for e in compiled._entries}


def heavy(x):
    """Takes milliseconds, in eager and compiled: a compile pays soon."""
    for _ in range(20):
        x = torch.tanh(x @ x.t() @ x)
    return x


def filled(f):
    """`f` compiled, at its recompile limit."""
    compiled = kiln.compile(f, dynamic=False)
    with pytest.warns(UserWarning, match="recompile limit"):
        for n in range(LIMIT + 1):
            compiled(torch.ones(n + 2, 4))
    return compiled


def call_until(compiled, x, count, seconds=30):
    """Calls until there are `count` entries; the number of calls."""
    expected = compiled.__wrapped__(x)
    end = time.monotonic() + seconds
    calls = 0
    while len(compiled._entries) < count and time.monotonic() < end:
        assert_same(compiled(x), expected)
        calls += 1
    assert len(compiled._entries) == count
    return calls


def test_a_size_that_keeps_coming_is_compiled():
    compiled = filled(heavy)
    x = torch.randn(300, 200)
    assert call_until(compiled, x, LIMIT + 1) > 1  # not at once
    before = entries(compiled)
    for _ in range(3):
        assert_same(compiled(x), heavy(x))
    assert entries(compiled)[LIMIT] == before[LIMIT] + 3


def test_sizes_are_told_apart():
    """What one size has cost is no reason to compile another."""
    compiled = filled(heavy)
    call_until(compiled, torch.randn(300, 200), LIMIT + 1)
    compiled(torch.randn(301, 200))
    compiled(torch.randn(300, 201))
    assert len(compiled._entries) == LIMIT + 1


def test_what_differs_otherwise_stays_in_eager():
    def f(x, how):
        return heavy(x) if how != "none" else x

    compiled = kiln.compile(f, dynamic=False)
    x = torch.randn(200, 200)
    with pytest.warns(UserWarning, match="recompile limit"):
        for how in "abcdefgh":
            for _ in range(4):  # fewer than a second chance needs
                compiled(x, how)
    assert len(compiled._entries) == LIMIT


def test_calls_that_are_taken_to_differ_in_sizes():
    """Not all guards are looked at in each. A call that differs otherwise, too, is no reason to compile."""

    def f(x, more):
        return heavy(x) + 1 if more else heavy(x)

    compiled = kiln.compile(f, dynamic=False)
    with pytest.warns(UserWarning, match="recompile limit"):
        for n in range(LIMIT + 10):
            x = torch.randn(n + 2, 4)
            assert_same(compiled(x, False), f(x, False))
    x = torch.randn(300, 200)
    expected = f(x, True)
    for _ in range(30):  # fewer than a second chance needs
        assert_same(compiled(x, True), expected)
    assert len(compiled._entries) == LIMIT


def test_off():
    compiled = filled(heavy)
    x = torch.randn(200, 200)
    with kiln.config.patch(size_limit=0):
        start = time.monotonic()
        while time.monotonic() < start + 1:
            compiled(x)
    assert len(compiled._entries) == LIMIT


def test_the_oldest_entry_makes_room():
    with kiln.config.patch(size_limit=1):
        compiled = filled(heavy)
        a, b = torch.randn(300, 200), torch.randn(200, 300)
        call_until(compiled, a, LIMIT + 1)
        end = time.monotonic() + 30
        while LIMIT + 1 not in entries(compiled) and time.monotonic() < end:
            assert_same(compiled(b), heavy(b))
        # The two that were used last are there; of the first ones, the younger.
        assert sorted(entries(compiled)) == [1, LIMIT, LIMIT + 1]


def test_frames_below_are_compiled_for_one_size():
    counter = CompileCounter()

    def below(x):
        return x * 2

    def f(x):
        return below(x) + 1

    compiled = kiln.compile(f, backend=counter, dynamic=False)
    with pytest.warns(UserWarning, match="recompile limit"):
        for n in range(LIMIT + 6):
            x = torch.ones(n + 2)
            assert_same(compiled(x), f(x))
    assert counter.frame_count == LIMIT + 1


def test_training_of_sequences_of_many_lengths():
    torch.manual_seed(0)

    def make():
        torch.manual_seed(0)
        net = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        return net, torch.optim.SGD(net.parameters(), lr=0.01)

    def step(net, opt, x):
        opt.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        opt.step()
        return loss.detach()

    lengths = [20, 36, 52] * 150
    batches = [torch.randn(16, n, 64) for n in lengths]
    net, opt = make()
    expected = [step(net, opt, x) for x in batches]
    other, other_opt = make()
    compiled = kiln.compile(step, dynamic=False)
    with pytest.warns(UserWarning, match="recompile limit"):
        losses = [compiled(other, other_opt, x) for x in batches]
    assert len(compiled._entries) > LIMIT
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


def test_sizes_that_come_after_other_changes():
    """While calls differ in more than sizes, fewer and fewer of them are looked at; sizes are still found afterwards."""
    settings = []

    def f(x):
        return heavy(x) * len([*settings])

    compiled = kiln.compile(f, dynamic=False)
    with pytest.warns(UserWarning, match="recompile limit"):
        for n in range(LIMIT + 1):
            settings.append(n)
            compiled(torch.ones(3, 4))
    for n in range(40):
        settings.append(n)
        x = torch.ones(3, 4) * 0.1
        assert_same(compiled(x), f(x))
    del settings[LIMIT:]
    call_until(compiled, torch.randn(300, 200), LIMIT + 1)
