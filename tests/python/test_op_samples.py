"""PyTorch's own samples of every operator it tests, each as a compiled function of its own: results, gradients, errors, random
numbers and what happens to the arguments are as in eager."""

import itertools

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

from helpers import check

SAMPLES = 2
# Their results hold whatever was in memory.
UNDEFINED = {"empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "empty_permuted"}
# No strided tensors, which is what the comparison is about.
SPARSE = {"sparse.sampled_addmm", "sparse.mm", "to_sparse"}
# ATen has no comparison of half complex numbers.
UNCOMPARABLE = {"chalf"}
# Fresh results whose strides eager's kernel chooses otherwise than PyTorch's shape functions say; the values are equal.
OTHER_STRIDES = {"linalg.eig", "unsafe_chunk", "unsafe_split"}

CASES = [
    pytest.param(op, id=f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name)
    for op in op_db
    if op.name not in UNDEFINED | SPARSE | UNCOMPARABLE | OTHER_STRIDES
]


def samples(op, dtype, grad):
    if dtype not in op.supported_dtypes("cpu"):
        pytest.skip("eager has no such kernel")
    torch.manual_seed(0)
    return list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=grad), SAMPLES))


def run(function, sample):
    def call(x, args, kwargs):
        return function(x, *args, **kwargs)

    check(call, sample.input, sample.args, dict(sample.kwargs))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", CASES)
def test_float32(op):
    for sample in samples(op, torch.float32, op.supports_autograd):
        run(op.op, sample)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", [case for case in CASES if case.values[0].inplace_variant])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=["float32", "int64"])
def test_in_place(op, dtype):
    for sample in samples(op, dtype, False):
        run(op.inplace_variant, sample)
