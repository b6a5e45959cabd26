"""PyTorch's autograd engine serves the program as it would without kiln."""

import subprocess
import sys

import pytest
import torch

import kiln
from kiln.testing import assert_same

NESTED = """
import os
import sys
import torch
import kiln

class Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_() - 1
        return ctx.x.detach()

    @staticmethod
    def backward(ctx, grad):
        if ctx.x >= 0:
            with torch.enable_grad():
                Nested.apply(ctx.x).sum().backward()
        return grad

def program():
    x = torch.tensor(500.0, requires_grad=True)
    Nested.apply(x).sum().backward()
    return x.grad

mode = sys.argv[1]
if mode == "inference":  # of the first compile
    with torch.inference_mode():
        kiln.compile(lambda x: x + 1)(torch.ones(2))
print(kiln.compile(program)().item(), flush=True)
os._exit(0)  # PyTorch's own exit fails at times with that many threads of the engine, in eager too
"""


@pytest.mark.parametrize("first", ["training", "inference"])
def test_backwards_nest_deeper_than_a_stack(first):
    done = subprocess.run([sys.executable, "-c", NESTED, first], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.strip() == "1.0", (done.returncode, done.stderr[-2000:])


def test_sparse_gradient_of_gather():
    def program(x):
        index = torch.tensor([[0, 0]])
        return x.clone(), x.gather(0, index, sparse_grad=True)

    def run(f):
        x = torch.arange(4.0).view(2, 2).requires_grad_()
        torch.autograd.backward(f(x), (torch.ones(2, 2), torch.full((1, 2), 2.0)))
        return x.grad.to_dense()

    assert_same(run(program), run(kiln.compile(program)))


def test_sparse_values_inside():
    def program(x):
        y = x * 2
        return (y.to_sparse() @ x.t()) + 1

    x = torch.eye(3) * 2
    assert_same(program(x), kiln.compile(program)(x))
