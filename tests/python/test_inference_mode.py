"""torch.inference_mode() in captured code: no graph break, and what is made in it is an inference tensor."""

import numpy as np
import pytest
import torch
from torch import nn

import kiln
from helpers import breaks
from kiln.testing import CompileCounter, assert_same


def kinds(tree):
    """Values, and which of the tensors are inference tensors."""
    flat, _ = torch.utils._pytree.tree_flatten(tree)
    return [(t.is_inference(), t.requires_grad, t.is_leaf) if isinstance(t, torch.Tensor) else t for t in flat]


def check(f, *args, expected_breaks=0, calls=3):
    expected = f(*args)
    compiled = kiln.compile(f)
    for _ in range(calls):
        found = compiled(*args)
        assert_same(found, expected, rtol=1e-5, atol=1e-5)
        assert kinds(found) == kinds(expected)
    assert not torch.is_inference_mode_enabled()
    assert breaks(f, *args) == expected_breaks
    return compiled


X = torch.linspace(-1, 1, 24).reshape(4, 6)
NET = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 3))


def test_a_block():
    def f(x):
        with torch.inference_mode():
            y = NET.eval()(x)
            return y, torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    check(f, X)


def test_a_decorated_function_without_breaks():
    @torch.inference_mode()
    def f(x):
        return {"y": NET.eval()(x), "view": x.sin().view(-1), "made": torch.ones(3)}

    check(f, X)
    compiled = kiln.compile(f, fullgraph=True)
    assert compiled(X)["y"].is_inference()


def test_inside_and_outside_meet():
    def f(x, w):
        before = (x @ w).relu()
        with torch.inference_mode():
            scale = x.abs().amax()
            with torch.enable_grad():
                more = (w * 2).sum()
        return before / scale.item(), scale, more, before + 1

    check(f, X, torch.ones(6, 2, requires_grad=True))


def test_gradients_beside_it():
    w = torch.ones(6, 2, requires_grad=True)

    def f(x):
        loss = (x @ w).sin().sum()
        with torch.inference_mode():
            norm = w.norm()
        return loss, norm

    compiled = kiln.compile(f)
    for run in (f, compiled):
        w.grad = None
        loss, norm = run(X)
        loss.backward()
        assert norm.is_inference() and not loss.is_inference()
        if run is f:
            expected = w.grad
    assert_same(w.grad, expected, rtol=1e-5, atol=1e-5)
    assert breaks(f, X) == 0


def test_saving_what_it_made_is_an_error():
    w = torch.ones(6, requires_grad=True)

    def f(x):
        with torch.inference_mode():
            y = x + 1
        return y * w

    for run in (f, kiln.compile(f)):
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            run(X)


def test_writes():
    def f(x):
        with torch.inference_mode():
            y = x * 2
            y[0] = 3
            x.add_(1)
            y += x
        return y

    for run in (f, kiln.compile(f)):
        x = X.clone()
        version = x._version
        y = run(x)
        assert y.is_inference() and not x.is_inference()
        assert x._version == version + 1
        if run is f:
            expected = [y, x]
    assert_same([y, x], expected)

    def late(x):
        with torch.inference_mode():
            y = x * 2
        y.add_(1)
        return y

    for run in (late, kiln.compile(late)):
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode"):
            run(X)


def test_views_of_what_was_there():
    def f(x):
        with torch.inference_mode():
            return x[1:], x * 2

    compiled = kiln.compile(f)
    for run in (f, compiled):
        view, made = run(X)
        assert not view.is_inference() and made.is_inference()
        assert view.data_ptr() == X[1:].data_ptr()
        with pytest.raises(RuntimeError, match="A view was created in inference mode"):
            run(X.clone().requires_grad_())[0].add_(1)


def test_outputs_that_share_memory():
    @torch.inference_mode()
    def f(x):
        y = x * 2
        return y, y[1:], y.t()

    a, b, c = kiln.compile(f)(X)
    assert a.is_inference() and b.is_inference() and c.is_inference()
    assert b.data_ptr() == a[1:].data_ptr() and c.data_ptr() == a.data_ptr()
    with torch.inference_mode():
        a.zero_()
    assert (b == 0).all() and (c == 0).all()


def test_attributes():
    class Cache(nn.Module):
        @torch.inference_mode()
        def forward(self, x):
            self.last = x * 2
            return self.last + 1

    net, twin = Cache(), Cache()
    compiled = kiln.compile(net)
    for _ in range(2):
        assert_same(compiled(X), twin(X))
        assert net.last.is_inference()


def test_a_break_inside():
    """The rest of the block is captured on its own, in the mode."""

    def f(x):
        with torch.inference_mode():
            y = x * 2
            torch._C._log_api_usage_once("kiln")
            kiln.graph_break()
            z = y + 1
        return y, z, x + 1

    check(f, X, expected_breaks=3)


def test_exceptions_leave_it():
    def f(x):
        try:
            with torch.inference_mode():
                y = x * 2
                raise ValueError("no")
        except ValueError:
            return y, x + 1, torch.is_inference_mode_enabled()

    check(f, X)


def test_other_forms():
    def off(x):
        with torch.inference_mode(False):
            return x * 2

    check(off, X, expected_breaks=1 if breaks(off, X) == 1 else 2)

    def nested(x):
        with torch.inference_mode():
            with torch.no_grad(), torch.inference_mode():
                y = x * 2
            z = y + 1
        return y, z, x * 3

    check(nested, X)

    mode = torch.inference_mode()

    def kept(x):
        with mode:
            return x * 2

    check(kept, X)
    with mode:
        assert torch.is_inference_mode_enabled()


def test_a_call_inside_of_the_mode():
    @torch.inference_mode()
    def f(x):
        with torch.enable_grad():
            return x * 2, NET.eval()(x)

    with torch.inference_mode():
        expected = f(X)
        found = kiln.compile(f)(X)
    assert_same(found, expected, rtol=1e-5, atol=1e-5)
    assert kinds(found) == kinds(expected)


def test_custom_backends_see_a_break():
    """A graph of the user's calls has no node for it."""

    @torch.inference_mode()
    def f(x):
        return x * 2 + 1

    counter = CompileCounter()
    found = kiln.compile(f, backend=counter)(X)
    assert_same(found, f(X))
    assert found.is_inference() and counter.frame_count == 1


def test_sizes_stay_open():
    @torch.inference_mode()
    def f(x):
        return x * x.shape[0], NET.eval()(x)

    compiled = kiln.compile(f, dynamic=True)
    for n in (4, 7, 3, 7):
        found = compiled(torch.ones(n, 6))
        assert_same(found, f(torch.ones(n, 6)), rtol=1e-5, atol=1e-5)
        assert kinds(found) == kinds(f(torch.ones(n, 6)))
    assert len(compiled._entries) == 1


def test_arrays_and_their_tensors():
    held = np.ones(3, dtype=np.float32)

    @torch.inference_mode()
    def made(x):
        kiln.graph_break()
        y = x + 1
        return torch.from_numpy(x.numpy() * 2), y, (y > 0).sum().item()

    @torch.inference_mode()
    def written(x):
        torch.from_numpy(held).add_(1)
        return x + torch.from_numpy(held)

    compiled = kiln.compile(made)
    for _ in range(3):
        assert_same(compiled(X), made(X))
    compiled = kiln.compile(written)
    for i in range(3):
        assert_same(compiled(torch.zeros(3)), torch.full((3,), i + 2.0))
