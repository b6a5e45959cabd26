"""Fake tensors: metadata as in eager, no data, no Python kernels for ordinary ops."""

import pytest
import torch
import torch.nn.functional as F

from helpers import check
from kiln import _C


def run(fn, *args):
    return _C._run_on_fakes(fn, *args)


CASES = {
    "broadcast": lambda x: x + x[:1] * 2.5,
    "int_promotion": lambda x: (x > 0) * 3,
    "view_chain": lambda x: x.t().unsqueeze(0).expand(2, 6, 4)[:, 1:],
    "reduce": lambda x: (x.sum(0), x.mean(1, keepdim=True), x.amax(-1), x.max(0).values),
    "matmul": lambda x: x @ x.t(),
    "cat_split": lambda x: torch.cat([x, x], 1).split([5, 7], 1),
    "softmax": lambda x: F.softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, (6,)),
    "factories": lambda x: (torch.zeros(2, 3), torch.ones_like(x.t()), x.new_full((2,), 1.0), torch.arange(5)),
    "conversion": lambda x: (x.to(torch.bfloat16), x.t().double(), x.t().contiguous()),
    "gelu_dropout": lambda x: F.dropout(F.gelu(x), 0.5),
    "index": lambda x: x[torch.zeros(3, dtype=torch.long)],
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "channels_last": lambda x: F.relu(x.view(1, 2, 3, 4).to(memory_format=torch.channels_last)) + 1,
}


def flat(value):
    return [value] if isinstance(value, torch.Tensor) else list(value)


@pytest.mark.parametrize("name", CASES)
def test_metadata_is_that_of_eager(name):
    x = torch.randn(4, 6)
    fakes, _ = run(CASES[name], x)
    for fake, real in zip(flat(fakes), flat(CASES[name](x)), strict=True):
        assert fake.shape == real.shape
        assert fake.stride() == real.stride()
        assert fake.dtype == real.dtype
        assert fake.device == real.device
        assert fake.storage_offset() == real.storage_offset()


def test_views_share_version_and_base():
    def fn(x):
        y = x[1:].view(-1)
        y.add_(1)
        return y._base is x, x._version, y._version

    assert run(fn, torch.randn(4, 6))[0] == (True, 1, 1)


@pytest.mark.parametrize(
    "fn", [lambda x: x.sum().item(), lambda x: x.nonzero(), lambda x: bool(x.sum() > 0), lambda x: x[x > 0]]
)
def test_data_dependence_is_refused(fn):
    with pytest.raises(RuntimeError, match="needs a tensor's data"):
        run(fn, torch.randn(3, 4))


@pytest.mark.parametrize("fn", [lambda x: x.numpy(), lambda x: x.data_ptr(), lambda x: x.tolist()])
def test_addresses_are_refused(fn):
    with pytest.raises(RuntimeError, match="no data"):
        run(fn, torch.randn(3, 4))


def test_errors_are_those_of_eager():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run(lambda x: x @ x, torch.randn(3, 4))
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        run(lambda x: x.add_(torch.ones(2, 3, 4)), torch.randn(3, 4))


def test_autograd_runs_on_fakes():
    def fn(x, w):
        (torch.relu(x @ w).sum() * 2).backward()
        return w.grad

    w = torch.randn(6, 3, requires_grad=True)
    grad, lines = run(fn, torch.randn(4, 6), w)
    assert grad.shape == (6, 3)
    assert any(line.startswith("aten::threshold_backward") for line in lines)
    assert w.grad is None


def test_leafness_is_kept():
    w = torch.randn(3, requires_grad=True)
    leaf, non_leaf = _C._make_fake(w), _C._make_fake(w * 2)
    assert leaf.is_leaf and leaf.requires_grad
    assert not non_leaf.is_leaf and non_leaf.requires_grad


def test_constants_compute():
    value, _ = run(lambda x: (torch.tensor(2.0) * 3).item(), torch.randn(2))
    assert value == 6.0


WITHOUT_SHAPE_RULES = {
    "quantized": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.05, 0, -128, 127),
    "by channel": lambda x: torch.fake_quantize_per_channel_affine(
        x, torch.full((3,), 0.02), torch.zeros(3, dtype=torch.int32), 0, -128, 127
    ),
    "learned": lambda x: torch._fake_quantize_learnable_per_tensor_affine(
        x, torch.tensor([0.1]), torch.tensor([0.0]), -8, 7
    ),
    "histogram": lambda x: torch.histogram(x.detach().flatten(), 5)[0] * 2,
}


@pytest.mark.parametrize("name", WITHOUT_SHAPE_RULES)
def test_operators_without_shape_rules_stay_in_the_graph(name):
    f = WITHOUT_SHAPE_RULES[name]
    check(f, torch.randn(3, 4, requires_grad=True), fullgraph=True)
    check(
        lambda x: f(x.t()) + 1 if name != "by channel" else f(x), torch.randn(3, 4, requires_grad=True), fullgraph=True
    )
