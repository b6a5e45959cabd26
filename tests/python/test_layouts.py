"""Strides of results and of gradients: as eager's, for images and volumes in every layout."""

import pytest
import torch
import torch.nn.functional as F

import kiln
from helpers import check
from kiln.testing import assert_same


def batch(x):
    return x if x.dim() > LAST else x[None]


LAST = 3  # dims of an image without its batch


def moved(sizes, order):
    back = sorted(range(len(order)), key=order.__getitem__)
    return torch.randn([sizes[i] for i in order]).permute(back)


IMAGES = {
    "rows": lambda: torch.randn(2, 4, 6, 6),
    "channels last": lambda: moved((2, 4, 6, 6), (0, 2, 3, 1)),
    "one": lambda: moved((1, 4, 6, 6), (0, 2, 3, 1)),
    "no batch": lambda: torch.randn(4, 6, 6),
    "no batch, channels last": lambda: moved((1, 4, 6, 6), (0, 2, 3, 1))[0],
    "columns": lambda: torch.randn(2, 4, 6, 6).transpose(-1, -2),
    "mixed": lambda: moved((2, 4, 6, 6), (2, 0, 3, 1)),
    "every other": lambda: torch.randn(2, 8, 6, 6)[:, ::2],
}
VOLUMES = {
    "rows": lambda: torch.randn(2, 4, 4, 4, 4),
    "channels last": lambda: moved((2, 4, 4, 4, 4), (0, 2, 3, 4, 1)),
    "one": lambda: moved((1, 4, 4, 4, 4), (0, 2, 3, 4, 1)),
    "no batch": lambda: torch.randn(4, 4, 4, 4),
    "no batch, channels last": lambda: moved((1, 4, 4, 4, 4), (0, 2, 3, 4, 1))[0],
}
STATISTICS = torch.zeros(4), torch.ones(4)
OF_IMAGES = {
    "max": lambda x: F.max_pool2d(x, 2),
    "max, indices": lambda x: F.max_pool2d(x, 2, return_indices=True),
    "average": lambda x: F.avg_pool2d(x, 2),
    "adaptive max": lambda x: F.adaptive_max_pool2d(x, 2),
    "adaptive average": lambda x: F.adaptive_avg_pool2d(x, 2),
    "nearest": lambda x: F.interpolate(batch(x), scale_factor=2),
    "bilinear": lambda x: F.interpolate(batch(x), scale_factor=2, mode="bilinear"),
    "batch norm": lambda x: F.batch_norm(batch(x), None, None, training=True),
    "batch norm, inference": lambda x: F.batch_norm(batch(x), *STATISTICS),
    "group norm": lambda x: F.group_norm(batch(x), 2),
    "reflect": lambda x: F.pad(x, (1, 1, 1, 1), "reflect"),
    "unshuffle": lambda x: F.pixel_unshuffle(x, 2),
    "larger": lambda x: torch.max(x, x * 2),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=1),
    "maximum": lambda x: x.amax(1),
    "filled": lambda x: (x * 2).masked_fill_(x > 0, 1.0),
    "filled, another": lambda x: (x * 2).masked_fill(x > 0, torch.tensor(1.0)),
    "scattered": lambda x: (x * 2).scatter_(1, torch.zeros_like(x).long(), 1.0),
}
OF_VOLUMES = {
    "max": lambda x: F.max_pool3d(x, 2),
    "max, indices": lambda x: F.max_pool3d(x, 2, return_indices=True),
    "average": lambda x: F.avg_pool3d(x, 2),
    "adaptive max": lambda x: F.adaptive_max_pool3d(x, 2),
    "adaptive max, indices": lambda x: F.adaptive_max_pool3d(x, 2, return_indices=True),
    "adaptive average": lambda x: F.adaptive_avg_pool3d(x, 2),
}


def run(function, x):
    """The results, and the gradient of a function of theirs."""
    x = x.detach().requires_grad_()
    results = function(x)
    results = results if isinstance(results, tuple) else (results,)
    of = [r.double().square().sum() for r in results if r.requires_grad]
    return [r.detach() for r in results], torch.autograd.grad(sum(of), x)


@pytest.mark.parametrize("name", OF_IMAGES)
def test_images(name):
    for layout, make in IMAGES.items():
        x = make()
        assert_same(run(kiln.compile(OF_IMAGES[name]), x), run(OF_IMAGES[name], x), path=layout, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OF_VOLUMES)
def test_volumes(name):
    for layout, make in VOLUMES.items():
        x = make()
        assert_same(run(kiln.compile(OF_VOLUMES[name]), x), run(OF_VOLUMES[name], x), path=layout, rtol=1e-4, atol=1e-5)


def test_arrays_in_other_orders():
    import numpy as np

    array = np.arange(20.0).reshape(4, 5)
    for taken in (array.T, array[:, [1, 3]], array[::2], np.asfortranarray(array.reshape(2, 2, 5)), array[::-1].T):
        taken = taken.copy(order="K") if taken.strides[0] < 0 or taken.strides[-1] < 0 else taken

        def f(x):
            return torch.tensor(taken), torch.tensor(taken, dtype=torch.float32) + x, x.new_tensor(taken)

        x = torch.ones(())
        assert_same(kiln.compile(f)(x), f(x))


@pytest.mark.parametrize("strides", [(8, 2), (0, 1), (1, 1), (3, 1), (1, 2)])
@pytest.mark.parametrize("make", [torch.empty_strided, torch.zeros(2).new_empty_strided])
def test_memory_between_elements(make, strides):
    def f(x):
        y = make((2, 3), strides).fill_(2.0)
        return y, y.exp(), x.as_strided((2,), (1,)) + y[0, 0], y.untyped_storage().nbytes()

    x = torch.randn(4)
    want = f(x)
    got = kiln.compile(f)(x)
    assert_same(got, want)
    assert [t.stride() for t in got[:3]] == [t.stride() for t in want[:3]]


@pytest.mark.parametrize(
    "draw",
    [
        lambda y: torch.randn_like(y),
        lambda y: torch.randn_like(y.chunk(2, 1)[0]),
        lambda y: torch.rand_like(y.permute(0, 2, 3, 1)[..., :2]),
        lambda y: torch.empty_like(y.transpose(1, 2)).normal_(),
        lambda y: torch.randn_like(F.max_pool2d(y, 2)) * torch.randint_like(y, 9).amax((2, 3), keepdim=True),
        lambda y: F.dropout(y[:, :, ::2]),
        lambda y: y.clone().exponential_(),
    ],
)
def test_random_numbers_like_a_convolutions_result_are_drawn_in_eagers_order(draw):
    convolution = torch.nn.Conv2d(8, 4, 3, padding=1).requires_grad_(False)
    check(lambda x: draw(convolution(x)), torch.randn(4, 8, 6, 6), fullgraph=True, rtol=1e-4, atol=1e-5)
