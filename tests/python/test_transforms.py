"""torch.func inside compiled functions: vmap, grad, vjp, jvp and what is built of them; and compiled functions inside
transforms."""

import copy
import subprocess
import sys

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import nn
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)

import kiln
from helpers import check
from kiln.testing import CompileCounter, assert_same

X = torch.linspace(-2, 2, 15).reshape(5, 3)
W = torch.linspace(-1, 1, 9).reshape(3, 3)
GRAD = X.clone().requires_grad_()


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def convnet():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(0), nn.Linear(36, 2))


def detached(module):
    return {name: p.detach() for name, p in module.named_parameters()}


NET, CONV = mlp(), convnet()


def squared_error(parameters, x, y):
    return (functional_call(NET, parameters, (x,))[0] - y) ** 2


def image_loss(parameters, image, label):
    return F.cross_entropy(functional_call(CONV, parameters, (image,))[None], label[None])


def ensemble():
    return stack_module_state([mlp(seed) for seed in range(3)])[0]


ENSEMBLE = ensemble()

VMAP = {
    "rows": lambda x: vmap(lambda r: r.sin().sum())(x),
    "captured": lambda x: vmap(lambda r: W @ r + r)(x),
    "two results": lambda x: vmap(lambda r: (W @ r, r.sum()), out_dims=(1, 0))(x),
    "nested": lambda x: vmap(vmap(lambda a: a.exp() * 2))(x),
    "columns": lambda x: vmap(lambda a, b: a * b.sum(), in_dims=(1, None))(x, W),
    "trees": lambda x: vmap(lambda d: {"sum": d["a"] + d["b"][0]})({"a": x, "b": [x * 2]}),
    "factories": lambda x: vmap(lambda r: torch.zeros(3) + r * torch.arange(3) + torch.tensor([1.0, 2.0, 3.0]))(x),
    "in place": lambda x: vmap(lambda r: r.clone().add_(1).mul_(r))(x),
    "indices": lambda x: vmap(lambda r: r[r.argmax()] + r[1:].sum())(x),
    "where": lambda x: vmap(lambda r: torch.where(r > 0, r, 0.0))(x),
    "shapes": lambda x: vmap(lambda r: r.reshape(-1, 1) * r.shape[0] + r.ndim)(x),
    "chunks": lambda x: vmap(lambda r: r.sin(), chunk_size=2)(x),
    "module": lambda x: vmap(NET)(x),
    "attention": lambda x: vmap(lambda a: F.scaled_dot_product_attention(a, a, a))(x[:, None, None].expand(5, 2, 4, 3)),
    "one at a time": lambda x: vmap(lambda r: torch.histc(r, 4, -2, 2))(x),
}
GRADIENTS = {
    "grad": lambda x: grad(lambda t: (t**3).sum())(x),
    "with value": lambda x: grad_and_value(lambda t: ((t.sin() * 2).sum(), t + 1), has_aux=True)(x),
    "of rows": lambda x: vmap(grad(lambda t: (t**3).sum()))(x),
    "twice": lambda x: grad(lambda u: grad(lambda t: (t**3).sum())(u).sum())(x),
    "two arguments": lambda x: grad(lambda a, b: (a * b.sin()).sum(), argnums=(0, 1))(x, x + 1),
    "no_grad inside": lambda x: grad(lambda t: (t.detach() * t).sum())(x),
    "unused": lambda x: grad(lambda t: torch.ones(3).sum())(x),
    "vjp": lambda x: vjp(lambda t: t.cos() * W.sum(), x)[1](x),
    "vjp kept": lambda x: [vjp(lambda t: (t.cos(), t.sin()), x)[1]((x, v)) for v in (x, x + 1)],
    "jacrev": lambda x: jacrev(lambda t: (W @ t).sin())(x[0]),
    "jvp": lambda x: jvp(lambda t: t**3, (x,), (x + 1,)),
    "jacfwd": lambda x: jacfwd(lambda t: (t**3).cumsum(0))(x[0]),
    "hessian": lambda x: hessian(lambda t: (t**3).sum() * t[0])(x[0]),
    "forward over forward": lambda x: jvp(lambda t: jvp(lambda u: u.sin(), (t,), (x,))[1], (x,), (x,)),
    "laplacian": lambda x: vmap(lambda r: hessian(lambda t: t.sin().prod())(r).trace())(x),
    "per sample": lambda x: vmap(grad(squared_error), in_dims=(None, 0, 0))(detached(NET), x, x[:, 0]),
    "ensemble": lambda x: vmap(lambda p: functional_call(NET, p, (x,)))(ENSEMBLE),
}


@pytest.mark.parametrize("name", VMAP)
def test_vmap(name):
    check(VMAP[name], X, fullgraph=True)
    check(VMAP[name], GRAD, fullgraph=True)


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name):
    check(GRADIENTS[name], X, fullgraph=True)
    check(GRADIENTS[name], GRAD, fullgraph=True, rtol=1e-5, atol=1e-5)


def test_per_sample_gradients_of_images():
    images, labels = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 1, 0])
    check(
        lambda p, x, y: vmap(grad(image_loss), in_dims=(None, 0, 0))(p, x, y),
        *(detached(CONV), images, labels), fullgraph=True, rtol=1e-4, atol=1e-5,
    )  # fmt: skip


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_random_numbers(randomness):
    check(lambda x: vmap(lambda r: F.dropout(r + torch.rand(3)), randomness=randomness)(x), X, fullgraph=True)


def test_the_module_of_an_ensemble_may_be_without_data():
    base = copy.deepcopy(NET).to("meta")

    def f(parameters, x):
        assert base[0].weight.is_meta and base[0].weight.device.type == "meta"
        return vmap(lambda p: functional_call(base, p, (x,)))(parameters) * base[0].weight.shape[0]

    parameters = {name: p.detach() for name, p in ENSEMBLE.items()}
    check(f, parameters, X, fullgraph=True)
    for g in (lambda x: base(x), kiln.compile(lambda x: base(x))):
        with pytest.raises(RuntimeError, match="Tensor on device meta is not on the expected device cpu"):
            g(X)


def test_an_ensemble_is_trained():
    def run(compiled):
        parameters = {name: p.detach().requires_grad_() for name, p in ensemble().items()}
        optimizer = torch.optim.SGD(parameters.values(), lr=0.1)

        def step(x):
            optimizer.zero_grad()
            out = vmap(lambda p: functional_call(NET, p, (x,)))(parameters)
            loss = (out - x[:, :1]).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        call = kiln.compile(step, fullgraph=True) if compiled else step
        return [call(X) for _ in range(4)], parameters

    assert_same(run(False), run(True))


def test_what_a_transform_differentiates_outlives_the_call():
    """A vjp function needs the history of its level, which ends with the part that a graph captures."""

    def pull(x):
        return vjp(lambda t: (t.sin(), t.cos() * 2), x)

    def twice(x):
        y, back = vjp(lambda t: t.sin(), x * 2)
        return y + 1, back

    def two(x):
        return vjp(lambda t: W.sin(), x), vjp(lambda t: t * 3, x)

    for f, parts in ((pull, lambda r: [r]), (twice, lambda r: [r]), (two, list)):
        for (value, back), (our_value, our_back) in zip(parts(f(X)), parts(kiln.compile(f)(X)), strict=True):
            assert_same(value, our_value)
            for cotangent in (X, X + 1):
                given = (cotangent, X) if isinstance(value, tuple) else cotangent[: len(value)]
                assert_same(back(given, retain_graph=True), our_back(given, retain_graph=True))
    assert torch._C._functorch.maybe_current_level() is None


def test_what_the_differentiated_function_keeps():
    kept = []

    def keep(x):
        return grad(lambda t: (kept.append(t * 2), (t**3).sum())[1])(x) + 1

    found, expected = kiln.compile(keep)(X), keep(X)
    assert_same(kept[0] + 1, kept[1] + 1)
    assert_same(expected, found)
    assert torch._C._functorch.maybe_current_level() is None


def test_errors_of_transforms():
    check(lambda x: vmap(lambda r: r + torch.rand(3))(x), X)  # a random number without a word about randomness
    check(lambda x: vmap(lambda r: r if r.sum() > 0 else -r)(x), X)
    check(lambda x: vmap(lambda a, b: a + b)(x, x[1:]), X)
    check(lambda x: grad(lambda t: t * 2)(x), X)
    check(lambda x: vmap(lambda r: r.sum().item())(x), X)


def test_an_error_that_the_program_catches():
    def f(x):
        try:
            y = vmap(lambda r: r + torch.rand(3))(x)
        except RuntimeError:
            y = x + 1
        return vmap(lambda r: r * 2)(y)

    check(f, X)


def test_a_break_inside_ends_the_levels():
    seen = []

    def f(x):
        y = x * 2
        z = vmap(grad(lambda t: seen.append(id(t)) or print(end="") or (t * t).sum()))(y)
        return z + vmap(lambda r: r.sin())(x)

    check(f, X)
    assert torch._C._functorch.maybe_current_level() is None
    check(lambda x: x.sin() + 1, X, fullgraph=True)


class Doubled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g * 2


def test_custom_functions_inside_transforms():
    check(lambda x: vmap(lambda r: Doubled.apply(r).sin())(x + 1), X)
    check(lambda x: grad(lambda t: Doubled.apply(t).sin().sum())(x + 1), X)


def test_the_first_transform_of_a_process():
    """It runs in eager, where it has PyTorch load its decompositions; kiln itself never does."""
    program = """
import torch, kiln
f = kiln.compile(lambda x: torch.func.hessian(lambda t: (t**3).sum() * t[0])(x), fullgraph=True)
x = torch.tensor([1.0, 2.0])
print(f(x).tolist(), f(x).tolist())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == "[[12.0, 12.0], [12.0, 12.0]] [[12.0, 12.0], [12.0, 12.0]]".split(), done.stderr
    assert not done.stderr


def test_vmap_does_not_wait_for_what_it_does_not_need():
    """Only a few losses do; a program that goes another way in eager would never have them loaded."""
    program = """
import torch, kiln, torch.nn.functional as F
from torch.func import grad, vmap
calls = []
def f(x):
    calls.append(0)
    return vmap(lambda r: r.sin().sum())(x) if torch.compiler.is_compiling() else x.sin().sum(1)
x = torch.arange(6.0).reshape(2, 3)
torch.testing.assert_close(kiln.compile(f, fullgraph=True)(x), x.sin().sum(1))
print(kiln.explain(f)(x).graph_count, torch._functorch.predispatch.DECOMPOSITIONS_LOADED)
def losses(x):
    y = F.mse_loss(f(x), f(x * 2))
    return y + F.mse_loss(f(x).cos(), y.expand(2))
kiln.compile(losses, fullgraph=True)(x)
print(torch._functorch.predispatch.DECOMPOSITIONS_LOADED)
def rows(x):
    x = x.detach().requires_grad_()
    y = F.mse_loss(x, x.detach() * 2, reduction="none")
    return vmap(lambda v: torch.autograd.grad(y, x, v)[0])(torch.stack([x.detach(), x.detach() + 1]))
g = kiln.compile(PROGRAM, fullgraph=True)
expected = EXPECTED
for _ in range(2):
    torch.testing.assert_close(g(x), expected)
print(torch._functorch.predispatch.DECOMPOSITIONS_LOADED)
"""
    for late, expected in (
        ("lambda x: vmap(grad(lambda r: F.mse_loss(r, r.detach() * 2)))(x)", "-2 * x / 3"),
        ("rows", "torch.stack([-2 * x * x, -2 * x * (x + 1)])"),
    ):
        run = program.replace("PROGRAM", late).replace("EXPECTED", expected)
        done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True)
        assert done.stdout.split() == ["1", "False", "False", "True"], done.stderr


def test_a_program_that_goes_another_way_in_eager():
    program = """
import torch, kiln
def f(x):
    return torch.func.jvp(torch.sin, (x,), (x,))[1] if torch.compiler.is_compiling() else x.cos() * x
kiln.set_logs("recompiles")
g, x = kiln.compile(f), torch.arange(3.0)
for _ in range(6):
    torch.testing.assert_close(g(x), x.cos() * x)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("this call runs in eager") == 3


def test_associative_scan():
    from torch._higher_order_ops.associative_scan import associative_scan as scan

    def f(a, b):
        def combine(left, right):
            return left[0] * right[0], right[0] * left[1] + right[1]

        return scan(combine, (a, b), dim=1, combine_mode="generic")[1]

    a, b = torch.rand(2, 7, 3), torch.randn(2, 7, 3)
    check(f, a, b, fullgraph=True)


def test_batched_gradients():
    def f(x):
        y = x.sin() * W.sum()
        return torch.autograd.grad(y, x, torch.stack([torch.ones_like(y), y.detach()]), is_grads_batched=True)

    check(f, GRAD)
    check(lambda x: torch.autograd.functional.hessian(lambda t: (t**3).sum(), x[0]), X)


def test_backends_get_the_operators_of_a_transform():
    counter = CompileCounter()
    check(lambda x: vmap(lambda r: (W @ r).sin())(x * 2) + 1, X, fullgraph=True, backend=counter)
    assert counter.frame_count == 1
    assert counter.op_count >= 4


def test_compiled_functions_inside_transforms():
    def f(x):
        return x.cos() * 3

    compiled = kiln.compile(f)
    assert_same(compiled(X), f(X))
    for transformed in (
        lambda g: vmap(g)(X),
        lambda g: grad(lambda x: g(x).sum())(X),
        lambda g: jvp(g, (X,), (W.sum() * X,)),
        lambda g: jacrev(g)(X[0]),
    ):
        assert_same(transformed(compiled), transformed(f))
    assert_same(compiled(X), f(X))


def test_tangents_of_inputs():
    """A compiled function that is called with dual tensors, before and after it was compiled for plain ones."""

    def f(x):
        return x.sin() * 2

    compiled = kiln.compile(f)
    for _ in range(2):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(X, X + 1)
            assert_same(forward_ad.unpack_dual(compiled(dual)).tangent, forward_ad.unpack_dual(f(dual)).tangent)
        assert_same(compiled(X), f(X))


def test_forward_mode_by_hand():
    def f(x):
        with forward_ad.dual_level():
            y = forward_ad.make_dual(x * 2, x + 1).sin()
            return forward_ad.unpack_dual(y).tangent

    check(f, X)


def test_tensors_made_of_numbers_inside():
    def f(x):
        made = torch.zeros(3)
        made[0] = x[1] * 2
        return (made * x * torch.tensor([1.0, 2.0, 3.0]) * torch.tensor(2)).sum()

    x = torch.tensor([0.5, -1.0, 2.0])
    numbers = torch.tensor([1.0, 2.0, 3.0])
    check(lambda x: (grad(f)(x), jvp(f, (x,), (x,)), vmap(grad(lambda x: (x * numbers * 1).sum()))(x.expand(2, 3))), x)
    check(lambda x: hessian(lambda x: (x**3 * torch.tensor(2.0)).sum())(x), x)


TANGENTS = {name: torch.full_like(p, 0.5) for name, p in NET.named_parameters()}


def parts(x, t):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, t)
        return forward_ad.unpack_dual((dual.sin() * dual).exp())


def of_parameters(x, t):
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(p, TANGENTS[name]) for name, p in NET.named_parameters()}
        return forward_ad.unpack_dual(functional_call(NET, duals, (x * t,))).tangent


def no_tangent(x, t):
    with forward_ad.dual_level():
        plain, tangent = forward_ad.unpack_dual(x * 2), forward_ad.unpack_dual(forward_ad.make_dual(x, t)).tangent
    return plain.primal, plain.tangent is None, tangent


def leaves_the_level(x, t):
    with forward_ad.dual_level():
        y = forward_ad.make_dual(x, t).sin()
    return y + 1, y


def by_hand(x, t):
    level = forward_ad.enter_dual_level()
    y = forward_ad.unpack_dual(forward_ad.make_dual(x, t) ** 2).tangent
    forward_ad.exit_dual_level(level=level)
    return y


def over_a_gradient(x, t):
    with forward_ad.dual_level():
        slope = grad(lambda y: (y**3).sum())(forward_ad.make_dual(x, t))
        return forward_ad.unpack_dual(slope)


@pytest.mark.parametrize("f", [parts, of_parameters, no_tangent, leaves_the_level, by_hand, over_a_gradient])
@pytest.mark.parametrize("x", [X, GRAD], ids=["x", "grad"])
def test_dual_levels(f, x):
    check(f, x, X.cos(), fullgraph=True, rtol=1e-5, atol=1e-5)
    assert forward_ad._current_level == -1


def test_a_break_within_a_dual_level():
    def f(x, t):
        with forward_ad.dual_level():
            y = forward_ad.make_dual(x, t).sin()
            print(end="")
            return forward_ad.unpack_dual(y * 2)

    def nested(x, t):
        with forward_ad.dual_level(), forward_ad.dual_level():
            return x

    check(f, X, X.cos())
    check(nested, X, X.cos())
    assert forward_ad._current_level == -1


def test_a_dual_level_in_inference_mode_ends():
    def f(x):
        with torch.inference_mode():
            t = x * 2
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(t, x)
                dual += 1
                return t

    check(f, torch.ones(2))
    assert torch._C._functorch.peek_interpreter_stack() is None
