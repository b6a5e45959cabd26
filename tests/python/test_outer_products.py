"""Products of one column and one row, whose elements fuse with what reads them, and sums of such products over samples,
as per-sample gradients need them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

import kiln
from helpers import check
from kiln.testing import assert_same


def library_products(function, *args, capfd):
    """How many products of matrices the compiled call leaves to a library or to kiln's own kernels for them."""
    kiln.set_logs("output_code")
    try:
        kiln.compile(function)(*args)
    finally:
        kiln.set_logs("")
    text = capfd.readouterr().err
    return text.count("aten::mm") + text.count("aten::bmm")


SHAPES = [((5, 1), (1, 7)), ((3, 5, 1), (3, 1, 7)), ((1, 1), (1, 9)), ((4, 6, 1), (4, 1, 1)), ((2, 0, 1), (2, 1, 3))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_one_product_an_element(shapes, dtype, capfd):
    x, y = (torch.randn(s).mul(5).to(dtype) for s in shapes)

    def f(x, y):
        return x @ y, (x @ y) * 2 + 1, (x @ y).sum(-1)

    check(f, x, y, grad=dtype.is_floating_point)
    assert library_products(f, x, y, capfd=capfd) == 0


def test_other_products_stay_what_they_are(capfd):
    assert library_products(lambda x, y: x @ y, torch.randn(4, 2), torch.randn(2, 5), capfd=capfd) > 0


def test_strides_are_those_of_a_product():
    x, y = torch.randn(7, 4, 1).transpose(0, 1), torch.randn(5, 4).t().unsqueeze(1)
    check(lambda x, y: x @ y, x, y)
    check(lambda x, y: x[0] @ y[0], x, y)


def test_infinities_and_zeros():
    x = torch.tensor([[0.0], [float("inf")], [float("nan")], [-1.0]])
    check(lambda x, y: x @ y, x, torch.tensor([[0.0, 2.0, float("inf")]]))


@pytest.mark.parametrize("order", ["row", "column"])
@pytest.mark.parametrize("batch", [(), (3,)], ids=["matrix", "batch"])
def test_weighted_sum_of_an_outer_product(order, batch, capfd):
    x, y, v = torch.randn(*batch, 40, 1), torch.randn(*batch, 1, 50), torch.randn(*batch, 1, 40)

    def row(x, y, v):
        return v @ (x @ y)

    def column(x, y, v):
        return (y.mT @ x.mT) @ v.mT

    f = row if order == "row" else column
    check(f, x, y, v, rtol=1e-5, atol=1e-5)
    assert library_products(f, x, y, v, capfd=capfd) == 0


def test_per_sample_gradients(capfd):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 6))

    def loss(parameters, x, y):
        return F.cross_entropy(functional_call(net, parameters, (x[None],)), y[None])

    def clipped(x, y):
        parameters = {name: p.detach() for name, p in net.named_parameters()}
        gradients = vmap(grad(loss), (None, 0, 0))(parameters, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
        scale = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        return {name: torch.einsum("n,n...->...", scale, g) for name, g in gradients.items()}

    x, y = torch.randn(32, 24), torch.randint(6, (32,))
    compiled = kiln.compile(clipped)
    for _ in range(2):
        ours, eager = compiled(x, y), clipped(x, y)
        for name in eager:
            assert_same(ours[name], eager[name], rtol=1e-5, atol=1e-6)


def test_a_step_on_one_sample():
    """The gradient of a linear layer's weight is a column times a row."""

    def trained(step_of):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 6))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

        def step(x):
            optimizer.zero_grad()
            net(x).square().sum().backward()
            optimizer.step()

        step = step_of(step)
        for n in range(5):
            step(torch.linspace(-1, 1, 24).roll(n)[None])
        return list(net.parameters())

    assert_same(trained(kiln.compile), trained(lambda step: step), rtol=1e-5, atol=1e-6)
