"""NumPy and SciPy in the middle of a compiled function.

The calls that leave PyTorch run as they are, between two graphs; what is before and after them is compiled.

Expected output:

    graphs: 2
    equal to eager: True
    gradient: equal
"""

import numpy as np
import scipy.fft
import torch

import kiln
from kiln.testing import CompileCounter


def smooth(x):
    x = torch.tanh(x) * 2
    spectrum = scipy.fft.dct(x.detach().numpy(), norm="ortho")
    spectrum[..., 4:] = 0
    low = torch.from_numpy(np.ascontiguousarray(scipy.fft.idct(spectrum, norm="ortho")))
    return (x - low).pow(2).sum(-1) + low.mean()


def main():
    torch.manual_seed(0)
    x = torch.randn(3, 16, requires_grad=True)
    counter = CompileCounter()
    result = kiln.compile(smooth, backend=counter)(x)
    print("graphs:", counter.frame_count)
    expected = smooth(x)
    print("equal to eager:", torch.allclose(result, expected, atol=1e-6))
    (ours,) = torch.autograd.grad(result.sum(), x)
    (eager,) = torch.autograd.grad(expected.sum(), x)
    print("gradient:", "equal" if torch.allclose(ours, eager, atol=1e-5) else "different")
    return counter.frame_count, result, expected


if __name__ == "__main__":
    main()
