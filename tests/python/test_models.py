"""Real models, trained and run: compiled equals eager in losses, gradients, parameters, statistics and random numbers."""

import copy

import pytest
import torch

import kiln
from kiln.bench import models
from kiln.testing import difference

STEPS = 20
# float32, SGD: differences of rounding stay in proportion. Adam divides by the root of tiny squares, which makes noise of
# gradients that are zero but for rounding as large as any other; so Adam is compared in float64.
RTOL, ATOL = 2e-3, 2e-4
LOSS = {"rtol": 5e-4, "atol": 5e-5}


def assert_none(found):
    assert found is None, found


def make_pair(name, seed):
    work, other = models.make(name, "small", seed), models.make(name, "small", seed)
    assert_none(difference(work.module.state_dict(), other.module.state_dict(), 0, 0))
    return work, other


def gradients(module):
    return {n: p.grad for n, p in module.named_parameters()}


def compare_gradients(expected, actual):
    for name, grad in expected.items():
        other = actual[name]
        if grad is None or other is None:
            assert grad is None and other is None, f"gradient of {name}: {grad is None} and {other is None} for None"
            continue
        # Relative to the largest entry: tiny entries are sums that cancel.
        scale = float(grad.abs().max())
        assert_none(difference(grad, other, 1e-3, 1e-4 * scale + 1e-7, f"gradient of {name}"))


@pytest.mark.parametrize("name", models.names())
@pytest.mark.parametrize("seed, dtype, steps", [(0, torch.float32, 4), (1, torch.float64, STEPS)])
def test_train_forward_compiled(name, seed, dtype, steps):
    """The loss is compiled; backward() and the optimizer run outside.

    Many steps are compared in float64: where a relu's or a pooling's input is zero but for rounding, float32 runs part
    for good, as two eager runs of other precision do."""
    eager, ours = make_pair(name, seed)
    for work in (eager, ours):
        work.module.train().to(dtype)
    optimizers = [torch.optim.SGD(w.module.parameters(), lr=0.01, momentum=0.9) for w in (eager, ours)]
    losses = [eager.loss, kiln.compile(ours.loss)]
    for step in range(steps):
        inputs = [t.to(dtype) if t.is_floating_point() else t for t in eager.batch(100 * seed + step)]
        values = []
        for loss, optimizer in zip(losses, optimizers):
            torch.manual_seed(step)
            optimizer.zero_grad()
            value = loss(*inputs)
            value.backward()
            values.append((value.detach(), torch.get_rng_state()))
        exact = value.dtype == torch.float64  # language models compute their loss in float32
        tolerance = {"rtol": 1e-9, "atol": 1e-11} if exact else LOSS
        assert_none(difference(values[0][0], values[1][0], **tolerance, path=f"loss of step {step}"))
        assert torch.equal(values[0][1], values[1][1]), f"random generator after step {step}"
        if step == 0:
            compare_gradients(gradients(eager.module), gradients(ours.module))
        for optimizer in optimizers:
            optimizer.step()
    tolerance = (1e-8, 1e-10) if exact else (1e-5, 1e-6) if dtype == torch.float64 else (RTOL, ATOL)
    assert_none(difference(eager.module.state_dict(), ours.module.state_dict(), *tolerance, "state"))


@pytest.mark.parametrize("name", models.names())
@pytest.mark.parametrize("seed", [2])
def test_train_whole_step_compiled(name, seed):
    """zero_grad, forward, backward and the optimizer's step are compiled as one function."""
    eager, ours = make_pair(name, seed)
    steps, optimizers = [], []
    for work in (eager, ours):
        work.module.train().double()
        optimizers.append(work.optimizer(work.module.parameters()))
        steps.append(models.training_step(work, optimizers[-1]))
    steps[1] = kiln.compile(steps[1])
    for step in range(STEPS):
        inputs = [t.double() if t.is_floating_point() else t for t in eager.batch(100 * seed + step)]
        values = []
        for function in steps:
            torch.manual_seed(step)
            values.append((function(*inputs), torch.get_rng_state()))
        assert_none(difference(values[0][0], values[1][0], 1e-6, 1e-8, path=f"loss of step {step}"))
        assert torch.equal(values[0][1], values[1][1]), f"random generator after step {step}"
        if step == 0:
            compare_gradients(gradients(eager.module), gradients(ours.module))
    assert_none(difference(eager.module.state_dict(), ours.module.state_dict(), 1e-5, 1e-7, "state"))
    expected, actual = (o.state_dict()["state"] for o in optimizers)
    assert expected.keys() == actual.keys()
    assert_none(
        difference({k: v.get("step") for k, v in expected.items()}, {k: v.get("step") for k, v in actual.items()})
    )


@pytest.mark.parametrize("name", models.names())
@pytest.mark.parametrize("seed", [0, 1])
def test_inference(name, seed):
    eager, ours = make_pair(name, seed)
    infer = kiln.compile(ours.infer)
    for work in (eager, ours):
        work.module.eval()
    for call in range(3):
        inputs = eager.batch(call)
        with torch.no_grad():
            assert_none(difference(eager.infer(*inputs), infer(*inputs), 1e-3, 1e-5, f"call {call}"))
    # New weights are seen, however they were written.
    with torch.no_grad():
        for work in (eager, ours):
            torch.manual_seed(7)
            for parameter in work.module.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        inputs = eager.batch(9)
        assert_none(difference(eager.infer(*inputs), infer(*inputs), 1e-3, 1e-5, "after an in-place change of weights"))
        for work in (eager, ours):
            state = {
                k: v * 0.9 if v.is_floating_point() else v for k, v in copy.deepcopy(work.module.state_dict()).items()
            }
            work.module.load_state_dict(state)
        assert_none(difference(eager.infer(*inputs), infer(*inputs), 1e-3, 1e-5, "after load_state_dict"))


@pytest.mark.parametrize("name", ["mlp", "resnet18", "gpt2"])
def test_module_wrapper_trains(name):
    """The module itself is compiled (not the loss), with parameters that the optimizer found through the wrapper."""
    eager, ours = make_pair(name, 3)
    compiled = kiln.compile(ours.module)
    pairs = []
    for module in (eager.module, compiled):
        module.train()
        pairs.append((module, torch.optim.SGD(module.parameters(), lr=0.05)))
    for step in range(5):
        inputs = eager.batch(step)
        values = []
        for module, optimizer in pairs:
            torch.manual_seed(step)
            optimizer.zero_grad()
            if name == "gpt2":
                value = module(input_ids=inputs[0], labels=inputs[0]).loss
            else:
                value = torch.nn.functional.cross_entropy(module(inputs[0]), inputs[1])
            value.backward()
            optimizer.step()
            values.append(value)
        assert_none(difference(values[0], values[1], **LOSS, path=f"loss of step {step}"))
    assert_none(difference(eager.module.state_dict(), ours.module.state_dict(), RTOL, ATOL, "state"))


@pytest.mark.parametrize("name", ["mlp", "mobilenet", "bert"])
def test_dropout_masks_are_equal_bit_for_bit(name):
    eager, ours = make_pair(name, 4)
    masks = []
    for work in (eager, ours):
        work.module.train()
        for module in work.module.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.5
    infer = kiln.compile(ours.infer)
    inputs = eager.batch(0)
    torch.manual_seed(11)
    expected = eager.infer(*inputs)
    torch.manual_seed(11)
    actual = infer(*inputs)
    assert_none(difference(expected, actual, 1e-3, 1e-5))
    masks = [(t == 0) for t in (expected, actual)]
    assert torch.equal(*masks)
    assert torch.equal(torch.rand(3), torch.rand(3)) is False  # the generator moves on


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["mlp", "resnet18", "gpt2"])
def test_other_dtypes(name, dtype):
    eager, ours = make_pair(name, 5)
    for work in (eager, ours):
        work.module.to(dtype).eval()
    inputs = [t.to(dtype) if t.is_floating_point() else t for t in eager.batch(0)]
    infer = kiln.compile(ours.infer)
    tolerance = 1e-9 if dtype == torch.float64 else 6e-2
    with torch.no_grad():
        assert_none(difference(eager.infer(*inputs), infer(*inputs), tolerance, tolerance))


@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_autocast(name):
    eager, ours = make_pair(name, 6)
    infer = kiln.compile(ours.infer)
    for work in (eager, ours):
        work.module.eval()
    inputs = eager.batch(0)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert_none(difference(eager.infer(*inputs), infer(*inputs), 6e-2, 6e-2))
    with torch.no_grad():
        assert_none(difference(eager.infer(*inputs), infer(*inputs), 1e-3, 1e-5, "autocast off again"))
