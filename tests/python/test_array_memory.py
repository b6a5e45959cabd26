"""torch.from_numpy of arrays that exist before the call: an input of the graph that has the array's memory."""

import numpy as np
import pytest
import torch

import kiln
from kiln.testing import assert_same


class Schedule:
    """As diffusion models keep their coefficients."""

    def __init__(self, n=100):
        self.betas = np.linspace(1e-4, 0.02, n)
        self.cumulative = np.cumprod(1 - self.betas)

    def noised(self, x, t):
        a = torch.from_numpy(self.cumulative).to(device=t.device)[t].float()
        while a.dim() < x.dim():
            a = a[..., None]
        return a.expand(x.shape).sqrt() * x


SHARED = np.arange(6.0)
MADE_AND_KEPT = {
    "attribute": lambda s, x, a: torch.from_numpy(s.betas)[:4] * x,
    "argument": lambda s, x, a: torch.from_numpy(a)[:4] * x,
    "global": lambda s, x, a: torch.from_numpy(SHARED)[:4] * x,
    "converted": lambda s, x, a: torch.as_tensor(a, dtype=torch.float32)[:4] * x,
    "converted to what it is": lambda s, x, a: torch.as_tensor(a, dtype=torch.float64)[:4].mul_(1.5) * x,
    "twice": lambda s, x, a: torch.from_numpy(a)[:4] * x + torch.from_numpy(a)[1:5],
    "returned": lambda s, x, a: (torch.from_numpy(a), x * 2),
    "written": lambda s, x, a: torch.from_numpy(a).mul_(2)[:4] * x,
    "leaf": lambda s, x, a: (torch.from_numpy(a).requires_grad_() * 2).sum() * x,
}


@pytest.mark.parametrize("name", MADE_AND_KEPT)
def test_arrays_from_outside(name):
    f = MADE_AND_KEPT[name]
    compiled = kiln.compile(f, fullgraph=True)
    s, x = Schedule(), torch.randn(4)
    for n in (6, 6, 7, 8, 9):
        a = np.arange(n) * 0.5
        b = a.copy()
        for _ in range(2):  # what was written in between is seen
            assert_same(compiled(s, x, a), f(s, x, b))
            np.testing.assert_array_equal(a, b)
            a += 1
            b += 1
            s.betas = s.betas * 1.5
    assert len(compiled._entries) <= 2


def test_what_shares_memory_with_the_result():
    def f(a):
        t = torch.from_numpy(a)
        return t, t * 2

    a = np.ones(3)
    t, _ = kiln.compile(f, fullgraph=True)(a)
    a[0] = 5
    assert t[0] == 5 and not t.requires_grad and not t._is_view()


def test_a_tensor_and_its_array_in_one_call():
    """A write through one input shows in the other."""

    def f(x, a):
        t = torch.from_numpy(a)
        t += 1
        return x * 2, t * 3

    compiled = kiln.compile(f)
    for g in (f, compiled, compiled):
        a = np.ones(3)
        first, second = g(torch.from_numpy(a), a)
        assert first.tolist() == [4.0] * 3 and second.tolist() == [6.0] * 3 and a.tolist() == [2.0] * 3
    a = np.ones(3)
    assert_same(compiled(torch.ones(3, dtype=torch.float64), a), f(torch.ones(3, dtype=torch.float64), np.ones(3)))


def test_diffusion_schedules():
    s = Schedule()
    compiled = kiln.compile(s.noised, fullgraph=True)
    for n in (2, 3, 4, 5):
        x, t = torch.randn(n, 3, 4, 4), torch.randint(0, 100, (n,))
        assert_same(compiled(x, t), s.noised(x, t))


REFUSED = {
    "read-only": lambda: np.broadcast_to(np.ones(1), (4,)),
    "objects": lambda: np.array([1, "a", None, 2], dtype=object),
    "steps back": lambda: np.arange(4.0)[::-1],
    "bytes": lambda: np.array(["a", "b", "c", "d"]),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_arrays_that_no_tensor_can_share(name):
    def f(x, a):
        try:
            return torch.from_numpy(a) * x
        except (TypeError, ValueError) as e:
            return x + 1, str(e)

    x, a = torch.ones(4), REFUSED[name]()
    assert_same(kiln.compile(f)(x, a), f(x, a))


def test_a_tensor_detached_without_gradients_is_no_view():
    """It stays without a gradient where the other is made a leaf that has one."""

    def f(x):
        y = x * 2
        return y, y.detach(), y.view(-1), y.data

    for g in (f, kiln.compile(f)):
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                y, detached, view, data = g(torch.ones(4))
            y.requires_grad_()
            assert not detached._is_view() and not detached.requires_grad and not data.requires_grad
            assert view._is_view() and view.requires_grad
            assert detached.data_ptr() == y.data_ptr()
