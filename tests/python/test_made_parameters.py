"""Parameters, buffers and modules that captured code makes are eager's: class, flags, values, gradients."""

import copy

import pytest
import torch
from torch import nn

import kiln


def made_layer(x):
    return nn.Linear(8, 3)(x)


def gradient_of_made_layer(x):
    layer = nn.Linear(8, 3)
    layer(x).sum().backward()
    return layer.weight.grad


def parameter_of_an_input(x):
    return nn.Parameter(x)


def without_gradients(x):
    p = nn.Parameter(x, requires_grad=False)
    return p, p * 2


def shares_its_data(x):
    y = x + 1
    p = nn.Parameter(y)
    p.data.add_(1)
    return p, y


def written_without_gradients(x):
    p = nn.Parameter(x.clone())
    with torch.no_grad():
        p.mul_(2)
    return p


def training(x):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
    return model[0].weight.detach(), model[2].bias.detach()


def with_an_attribute(x):
    p = nn.Parameter(x)
    p.decay = 0.5
    return p


def copied_module(x):
    return copy.deepcopy(nn.Linear(8, 8))(x)


def assigned(x):
    layer = nn.Linear(8, 3)
    layer.weight = nn.Parameter(torch.ones(3, 8))
    return layer(x)


def batch_norm(x):
    norm = nn.BatchNorm1d(8)
    return norm(x), norm.running_mean, norm.num_batches_tracked


def buffers(x):
    module = nn.Module()
    module.scale = nn.Buffer(x.clone(), persistent=False)
    return module.scale * 2, module.scale


def many_modules(x):
    rows = x[None]
    return (
        nn.LSTM(8, 4)(x)[0],
        nn.MultiheadAttention(8, 2)(rows, rows, rows)[0],
        nn.Embedding(10, 4)(torch.arange(3)),
        nn.Conv1d(8, 3, 1)(x[..., None]),
    )


@pytest.mark.parametrize(
    "f",
    [
        made_layer,
        gradient_of_made_layer,
        parameter_of_an_input,
        without_gradients,
        shares_its_data,
        written_without_gradients,
        training,
        with_an_attribute,
        copied_module,
        assigned,
        batch_norm,
        buffers,
        many_modules,
    ],
    ids=lambda f: f.__name__,
)
def test_made_inside(f):
    x = torch.randn(4, 8)
    compiled = kiln.compile(f, fullgraph=True)
    for seed in range(2):
        torch.manual_seed(seed)
        expected = f(x)
        torch.manual_seed(seed)
        result = compiled(x)
        expected, result = (r if isinstance(r, tuple) else (r,) for r in (expected, result))
        for e, r in zip(expected, result, strict=True):
            assert type(r) is type(e)
            assert (r.requires_grad, r.is_leaf) == (e.requires_grad, e.is_leaf)
            assert r.__dict__ == e.__dict__
            torch.testing.assert_close(r, e)


def test_class_and_flags_are_seen_inside():
    def f(x):
        p, b = nn.Parameter(x), nn.Buffer(x)
        kinds = [isinstance(p, nn.Parameter), type(p) is nn.Parameter, isinstance(b, nn.Buffer), b.persistent]
        return kinds, p.requires_grad, p.is_leaf, b.requires_grad

    x = torch.randn(4)
    assert kiln.compile(f, fullgraph=True)(x) == f(x)


def test_a_parameter_shares_memory_with_its_data():
    x = torch.randn(4)
    p = kiln.compile(lambda x: nn.Parameter(x), fullgraph=True)(x)
    assert p.data_ptr() == x.data_ptr()
    x.add_(1)
    torch.testing.assert_close(p.detach(), x)


class Lazy(nn.Module):
    def forward(self, x):
        if not hasattr(self, "weight"):
            self.weight = nn.Parameter(torch.ones(8))
        return x * self.weight


def test_a_module_that_makes_its_parameter_in_the_first_call_trains():
    x = torch.randn(4, 8)
    model = Lazy()
    compiled = kiln.compile(model)
    for calls in (1, 2, 3):
        compiled(x).sum().backward()
        assert type(model.weight) is nn.Parameter
        assert list(model._parameters) == ["weight"]
        torch.testing.assert_close(model.weight.grad, calls * x.sum(0))


def test_an_integer_parameter_raises_as_in_eager():
    def f(x):
        return nn.Parameter(x)

    x = torch.arange(3)
    with pytest.raises(RuntimeError, match="floating point"):
        f(x)
    with pytest.raises(RuntimeError, match="floating point"):
        kiln.compile(f)(x)
