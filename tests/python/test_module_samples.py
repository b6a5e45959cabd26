"""PyTorch's own samples of its modules, in float32: results, gradients and buffers compiled are those of eager."""

import copy
import itertools

import pytest
import torch
import torch.utils._pytree as pytree
from torch.testing._internal.common_modules import module_db

import kiln
from kiln.testing import difference

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
SAMPLES = 8  # of each module and mode; those behind differ in one option or shape


def tensors(tree):
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def fresh(t):
    return t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t


def outcome(module, call, sample):
    """What a call and a backward of its results' squares leave, or the exception's type."""
    args, kwargs = pytree.tree_map(fresh, (sample.forward_input.args, sample.forward_input.kwargs))
    torch.manual_seed(1)
    try:
        results = tensors(call(*args, **kwargs))
        roots = [t for t in results if t.requires_grad and t.is_floating_point()]
        if roots:
            sum(t.double().square().sum() for t in roots).backward()
    except Exception as error:
        return type(error)
    gradients = [t.grad for t in (*tensors((args, kwargs)), *module.parameters())]
    return [t.detach() for t in results], gradients, list(module.buffers())


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("info", module_db, ids=lambda info: info.name)
def test_module(info, training):
    samples = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=training)
    compared = 0
    for sample in itertools.islice(samples, SAMPLES):
        if sample.forward_input is None:
            continue
        torch.manual_seed(0)
        module = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs).train(training)
        twin = copy.deepcopy(module)
        expected, actual = outcome(module, module, sample), outcome(twin, kiln.compile(twin), sample)
        found = difference(expected, actual, rtol=1e-3, atol=1e-4)
        assert found is None, f"{sample.desc or sample.constructor_input}: {found}"
        compared += 1
    assert compared
