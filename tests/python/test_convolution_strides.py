"""Strides of convolutions and of their gradients are eager's."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import kiln


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("transposed", [False, True])
def test_strides_of_convolutions_and_their_gradients(threads, dtype, transposed):
    """ATen's choice of a backend shows in them: by batch, size, kernel, format, type, and threads."""
    convolve = F.conv_transpose2d if transposed else F.conv2d
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for format, kernel, groups, multiplier, batch, stride, dilation, size in itertools.product(
            [torch.contiguous_format, torch.channels_last],
            [1, 3],
            [1, 2, 8],
            [1, 2],
            [1, 2, 16],
            [1, 2],
            [1, 2],
            [6, 40],
        ):
            if (kernel == 3 and (batch == 16 or size == 40)) or (multiplier > 1 and groups < 8):
                continue
            x = torch.randn(batch, 8, size, size, dtype=dtype).contiguous(memory_format=format).requires_grad_()
            shape = (8, 8 * multiplier // groups) if transposed else (8 * multiplier, 8 // groups)
            w = torch.randn(*shape, kernel, kernel, dtype=dtype, requires_grad=True)

            def f(x, w, stride=stride, dilation=dilation, groups=groups):
                return convolve(x, w, None, stride, 1, dilation=dilation, groups=groups)

            def strides(f, x=x, w=w):
                y = f(x, w)
                return [t.stride() for t in (y, *torch.autograd.grad((y * y).sum(), [x, w]))]

            kiln.reset()
            assert strides(kiln.compile(f)) == strides(f), (format, kernel, groups, multiplier, batch, stride, dilation)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_strides_in_three_dims(threads, dtype):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for kernel, stride, dilation, batch, weight_format, format, groups in itertools.product(
            [(1, 1, 1), (3, 1, 1), (1, 1, 3), (2, 2, 2)],
            [1, 2],
            [1, 2],
            [1, 3, 16],
            [torch.contiguous_format, torch.channels_last_3d],
            [torch.contiguous_format, torch.channels_last_3d],
            [1, 2],
        ):
            if dilation == 2 and max(kernel) == 1:
                continue
            x = torch.randn(batch, 4, 5, 6, 7, dtype=dtype).contiguous(memory_format=format).requires_grad_()
            w = torch.randn(4, 4 // groups, *kernel, dtype=dtype).contiguous(memory_format=weight_format)
            w.requires_grad_()

            def strides(f, x=x, w=w):
                y = f(x, w)
                return [t.stride() for t in (y, *torch.autograd.grad((y * y).sum(), [x, w]))]

            def f(x, w, stride=stride, dilation=dilation, groups=groups):
                return F.conv3d(x, w, None, stride, 0, dilation, groups)

            kiln.reset()
            assert strides(kiln.compile(f)) == strides(f), (kernel, stride, dilation, batch, weight_format, format)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d"])
@pytest.mark.parametrize("groups", [1, 4])
def test_a_bias_with_gaps(name, groups):
    rank = int(name[-2])
    x, w = torch.randn(2, 8, *[7] * rank), torch.randn(8, 8 // groups, *[3] * rank)
    bias = torch.randn(8, 2)

    def f(x, w, gaps, one):
        convolve = getattr(F, name)
        return tuple(convolve(x, w, b, groups=groups).relu() for b in (gaps, one, one.contiguous()))

    args = x, w, bias[:, 1], bias[0, :1].expand(8)
    for result, expected in zip(kiln.compile(f)(*args), f(*args), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
