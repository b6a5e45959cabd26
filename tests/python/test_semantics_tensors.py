"""Tensors as users meet them: views, in-place changes, strides, dtypes, aliasing, autograd."""

import signal

import pytest
import torch
from torch.nn import functional as F

import kiln
from helpers import breaks, check
from kiln.testing import assert_same

X = torch.linspace(-2, 2, 12).reshape(3, 4)
Y = torch.linspace(0.5, 3, 12).reshape(3, 4)


def in_place(x, y):
    x.add_(y)
    x.mul_(2).relu_()
    return x + 1


def in_place_on_view(x, y):
    x[0].zero_()
    x[:, 1] = 5
    x.view(-1)[3:5] += y.view(-1)[:2]
    return x * 2


def view_outputs(x, y):
    return x.view(4, 3), x.t(), x[1], x[..., ::2], x.unsqueeze(0), x.detach(), y.expand(2, 3, 4)


def output_aliases_output(x, y):
    a = x + y
    return a, a, a.view(-1), a[0]


def mutate_then_view(x, y):
    v = x.view(-1)
    x.add_(1)
    return v, v.sum()


def copy_and_fill(x, y):
    x.copy_(y.t().reshape(3, 4))
    y.fill_(3)
    return x.clone()


def indexed_writes(x, y):
    x = x.clone()
    x[x > 0] = 0
    x[torch.tensor([0, 2]), 1] = 9.0
    x[1:, :2] *= y[1:, :2]
    return x


def masks(x, y):
    return (
        torch.where(x > 0, x, y),
        x.masked_fill(x < 0, 7.0),
        (x > y) & (x < 2) | ~(x != 0),
        (x > 0).any(),
        (x > -9).all(),
    )


def reductions(x, y):
    return (
        x.sum(), x.mean(1), x.max(), x.max(1), x.min(0).indices, x.argmax(1), x.prod(1), x.std(), x.var(0, unbiased=False),
        x.norm(), x.amax((0, 1)), x.cumsum(1), torch.logsumexp(x, 1), x.softmax(-1), x.sum(1, keepdim=True), x.median(),
    )  # fmt: skip


def pointwise(x, y):
    return (
        x.exp(), y.log(), x.sigmoid(), x.tanh(), F.gelu(x), F.silu(x), F.leaky_relu(x, 0.1), x.abs().sqrt(), y.rsqrt(), x**2,
        2**x, y**x, x.clamp(-1, 1), x.round(), x.floor(), torch.atan2(x, y), x % 2, x.detach() // 0.7, torch.remainder(x, y), x.sign(),
        F.softplus(x), F.elu(x), torch.erf(x), y.reciprocal(), torch.maximum(x, y), torch.lerp(x, y, 0.3), F.hardswish(x), x.neg(),
        torch.addcmul(x, y, y, value=2), torch.nan_to_num(x / 0), x.frac(), F.relu6(x), F.logsigmoid(x), x.expm1(), y.log1p(), y.log2(),
    )  # fmt: skip


def shapes(x, y):
    return (
        torch.cat([x, y], 1), torch.stack([x, y]), x.chunk(2, 1), x.split([1, 3], 1), x.permute(1, 0).contiguous(), x.flatten(),
        x.repeat(2, 1), x.roll(1, 0), x.flip(1), x.tril(), torch.triu(y, 1), F.pad(x, (1, 2)), x.unfold(1, 2, 1), x.narrow(1, 1, 2),
        x.repeat_interleave(2, 0), x.movedim(0, 1), x.diagonal(), torch.outer(x[0], y[0]), x.reshape(2, -1), x.squeeze(), x.tile(2),
    )  # fmt: skip


def products(x, y):
    return (
        x @ y.t(),
        torch.mm(x, y.t()),
        torch.bmm(x[None], y.t()[None]),
        F.linear(x, y),
        torch.einsum("ij,kj->ik", x, y),
        x[0].dot(y[0]),
        torch.addmm(x[:, :3], x, y.t()),
        x.mv(y[0]),
    )


def factories(x, y):
    return (
        torch.zeros(2, 3), torch.ones_like(x), torch.arange(5), torch.arange(0, 1, 0.25), torch.full((2,), 3.5), torch.eye(3),
        x.new_zeros(2), torch.linspace(0, 1, 4), torch.tensor([1, 2, 3]), torch.empty_like(x).fill_(2), torch.tensor(x.shape[0] * 1.5),
    )  # fmt: skip


def promotion(x, y):
    i = torch.arange(12).reshape(3, 4)
    b = i > 3
    return (
        x + i,
        i / 2,
        i // 2,
        b + b,
        b * 2.5,
        i + True,
        x + torch.tensor(2, dtype=torch.float64),
        x.half() + y,
        x.bfloat16() * 2,
        i * 1.5,
        b.sum(),
        i.mean(dtype=torch.float32),
        (i % 3) ** 2,
        -i,
        i.to(torch.uint8) + 250,
    )


def gathers(x, y):
    index = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0], [1, 1, 1, 1]])
    return (
        x.gather(1, index), x[[0, 2]], x[:, torch.tensor([1, 3])], x.index_select(1, torch.tensor([0, 0, 3])), x.take(index),
        torch.zeros(3, 4).scatter(1, index, y), torch.zeros(3, 4).scatter_add(1, index, y), F.embedding(index, x.t()),
        torch.zeros(3, 4).index_add(0, torch.tensor([0, 0, 2]), y), x.sort(1), x.topk(2, 1), F.one_hot(index, 4), x.argsort(1),
    )  # fmt: skip


def detach_and_requires_grad(x, y):
    a = (x * y).detach()
    b = x.detach().clone().requires_grad_(True)
    return a + x, b, (b * 2).requires_grad, a.requires_grad


def random_numbers(x, y):
    a = torch.rand(3)
    b = F.dropout(x, 0.5)
    c = torch.randn_like(x) + torch.randint(0, 5, (3, 4))
    d = torch.bernoulli(torch.full((3, 4), 0.5))
    torch.rand(2)
    return a, b, c, d, torch.randperm(5), torch.normal(0.0, 1.0, (2,))


def losses(x, y):
    target = torch.tensor([0, 1, 3])
    return (
        F.cross_entropy(x, target), F.mse_loss(x, y), F.l1_loss(x, y), F.nll_loss(F.log_softmax(x, 1), target), F.smooth_l1_loss(x, y),
        F.binary_cross_entropy_with_logits(x, torch.sigmoid(y)), F.kl_div(F.log_softmax(x, 1), F.softmax(y, 1), reduction="batchmean"),
        F.cosine_similarity(x, y), F.cross_entropy(x, target, label_smoothing=0.1, reduction="none"),
    )  # fmt: skip


def norms(x, y):
    image = torch.cat([x, y]).reshape(2, 3, 2, 2)
    return (
        F.layer_norm(x, (4,)),
        F.group_norm(image, 3),
        F.batch_norm(image, None, None, training=True),
        F.normalize(x, dim=1),
        F.instance_norm(image),
    )


def convolutions(x, y):
    image = torch.cat([x, y]).reshape(1, 2, 3, 4)
    weight = torch.linspace(-1, 1, 36).reshape(2, 2, 3, 3)
    return (
        F.conv2d(image, weight, padding=1), F.conv_transpose2d(image, weight, stride=2), F.max_pool2d(image, 2), F.avg_pool2d(image, 2, 1),
        F.adaptive_avg_pool2d(image, 1), F.interpolate(image, scale_factor=2), F.conv1d(x[None], y[None, :, :3]), F.max_pool2d(image, 2, return_indices=True),
        F.interpolate(image, size=(5, 6), mode="bilinear", align_corners=False),
    )  # fmt: skip


def attention(x, y):
    q = torch.cat([x, y]).reshape(1, 2, 3, 4)
    return F.scaled_dot_product_attention(q, q * 2, q + 1), F.scaled_dot_product_attention(q, q, q, is_causal=True)


def mutated_twice(x, y):
    x += 1
    a = x * 2
    x -= y
    b = x * 3
    x.mul_(a)
    return b


def return_mutated(x, y):
    return x.add_(1), y.mul_(2)[0]


def set_data(x, y):
    x.data.add_(1)
    return x * 2


def no_tensor_result(x, y):
    x.add_(1)


def constant_result(x, y):
    return 1, "a", None, x.shape, x.dtype


PROGRAMS = [
    in_place, in_place_on_view, view_outputs, output_aliases_output, mutate_then_view, copy_and_fill, indexed_writes, masks, reductions,
    pointwise, shapes, products, factories, promotion, gathers, detach_and_requires_grad, random_numbers, losses, norms, convolutions,
    attention, mutated_twice, return_mutated, set_data, no_tensor_result, constant_result,
]  # fmt: skip
# In-place changes of a leaf that requires grad are an error in eager; inputs are made non-leaves for them.
WRITE_INPUTS = {
    in_place,
    in_place_on_view,
    mutate_then_view,
    copy_and_fill,
    mutated_twice,
    return_mutated,
    no_tensor_result,
}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_program(program):
    check(program, X, Y)


@pytest.mark.parametrize("program", [p for p in PROGRAMS if p not in WRITE_INPUTS], ids=lambda f: f.__name__)
def test_program_under_autograd(program):
    check(program, X.clone().requires_grad_(True), Y.clone().requires_grad_(True))


@pytest.mark.parametrize("program", sorted(WRITE_INPUTS, key=lambda f: f.__name__), ids=lambda f: f.__name__)
def test_in_place_under_autograd(program):
    def run(function):
        x, y = X.clone().requires_grad_(True), Y.clone().requires_grad_(True)
        a, b = x * 1, y * 1
        result = function(a, b)
        total = a.sum() + (b * b).sum()
        for t in result if isinstance(result, tuple) else (result,):
            if isinstance(t, torch.Tensor):
                total = total + (t * t).sum()
        total.backward()
        return result, a, b, x.grad, y.grad

    assert_same(run(program), run(kiln.compile(program)))


@pytest.mark.parametrize("program", sorted(WRITE_INPUTS, key=lambda f: f.__name__), ids=lambda f: f.__name__)
def test_in_place_on_a_leaf_is_an_error(program):
    def run(function):
        x = X.clone().requires_grad_(True)
        try:
            function(x, Y.clone())
        except RuntimeError as error:
            return str(error), x
        return None, x

    assert_same(run(program), run(kiln.compile(program)))


@pytest.mark.parametrize(
    "program", [in_place, in_place_on_view, mutate_then_view, mutated_twice, return_mutated], ids=lambda f: f.__name__
)
def test_aliased_inputs(program):
    """The two arguments share memory."""

    def run(function, how):
        base = torch.arange(24.0).reshape(6, 4)
        if how == "same":
            x = y = base[:3]
        elif how == "overlap":
            x, y = base[:3], base[1:4]
        else:
            x, y = base[:3], base[3:]
        try:
            return function(x, y), base
        except RuntimeError as error:  # eager refuses some writes to overlapping memory
            return str(error), base

    compiled = kiln.compile(program)
    for how in ("disjoint", "same", "overlap", "disjoint"):
        assert_same(run(program, how), run(compiled, how))


LAYOUTS = {
    "transposed": lambda: torch.arange(12.0).reshape(4, 3).t(),
    "strided": lambda: torch.arange(48.0).reshape(6, 8)[::2, 1::2],
    "expanded": lambda: torch.arange(4.0).expand(3, 4),
    "offset": lambda: torch.arange(30.0)[7:19].reshape(3, 4),
    "negative": lambda: torch.arange(12.0).reshape(3, 4).flip(0),
    "zero-size": lambda: torch.zeros(0, 4),
    "overlapping": lambda: torch.arange(8.0).as_strided((3, 4), (1, 1)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("program", [pointwise, products, in_place, shapes], ids=lambda f: f.__name__)
def test_layouts(program, layout):
    x = LAYOUTS[layout]()
    check(program, x, torch.full(x.shape, 0.7))


def test_channels_last_strides():
    def f(x, w):
        y = F.conv2d(x, w, padding=1)
        return y, y.relu() + x[:, :1], y.sum(1)

    x = torch.randn(2, 3, 8, 8)
    w = torch.randn(4, 3, 3, 3)
    check(f, x, w)
    check(f, x.to(memory_format=torch.channels_last), w)
    check(f, x, w.to(memory_format=torch.channels_last))


def views_of_intermediates(x, w):
    return (x * 2).expand(2, 3, 4), x.exp().diagonal(), (x + 1)[:, ::2], (x * 3).t()[1:]


def gradient_that_repeats(x, w):
    return torch.autograd.grad(w.sum(0).pow(2).sum(), w)[0]


@pytest.mark.parametrize("program", [views_of_intermediates, gradient_that_repeats])
def test_views_of_intermediates_keep_their_strides(program):
    w = Y.clone().requires_grad_(True)
    check(program, X, w)
    check(program, X.clone().requires_grad_(True), w)


def test_angles_of_complex_numbers_are_contiguous():
    check(lambda x: torch.angle(x * 1j), X.t())


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64],
)
def test_dtypes(dtype):
    def f(x, y):
        out = [x + y, x * y, x == y, torch.where(x == y, x, y)]
        if x.dtype not in (torch.bool, torch.complex64):
            out += [x - y, x.abs() if x.dtype != torch.uint8 else x, x.sum(), torch.maximum(x, y), x > y]
        if x.dtype.is_floating_point:
            out += [x.exp(), x.softmax(1), x.mean(), x / y, x.sigmoid()]
        return out

    check(f, (X * 3).to(dtype), (Y * 2).to(dtype))


SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1.0, -1.0, 1e-45, 3.4e38, -3.4e38, 88.8, -104.0, 0.5]


def test_special_values():
    # Not gelu(inf): eager's vector code gives nan and its scalar code inf.
    def f(x, y):
        return (
            x + y, x * y, x - y, x / y, x.exp(), x.relu(), x.sigmoid(), x.tanh(), torch.maximum(x, y), torch.minimum(x, y), x.abs(),
            x.sqrt(), x.rsqrt(), x.log(), x.clamp(-1, 1), x > y, x == y, torch.where(x > y, x, y), x.floor(), x.round(), x.sign(), -x,
            x.softmax(0), F.gelu(x.clamp(max=1e30)), F.silu(x), x.isnan(), x.max(1).values, x.amin(0), F.softplus(x), x.log1p(), x.expm1(),
        )  # fmt: skip

    n = len(SPECIAL)
    x = torch.tensor(SPECIAL).repeat(n, 1)
    y = x.t().contiguous()
    check(f, x, y)
    signs = kiln.compile(lambda a: (a * 1.0, -a, a + 0.0 * a))(torch.tensor([0.0, -0.0]))
    assert torch.signbit(signs[0]).tolist() == [False, True]
    assert torch.signbit(signs[1]).tolist() == [True, False]


def test_integer_overflow_and_division():
    def f(x, y):
        return (
            x + y,
            x * y,
            x // y,
            x % y,
            x << 2,
            x >> 1,
            x & y,
            x | y,
            x ^ y,
            torch.div(x, y, rounding_mode="trunc"),
            ~x,
        )

    for dtype in (torch.int8, torch.int32, torch.int64):
        big = torch.iinfo(dtype)
        x = torch.tensor([big.max, big.min + 1, 7, -7, 7, -7], dtype=dtype)
        y = torch.tensor([2, 3, 3, 3, -3, -3], dtype=dtype)
        check(f, x, y)


BITS = [torch.bitwise_and, torch.bitwise_or, torch.bitwise_left_shift, torch.gcd, lambda a, b: torch.bitwise_not(a)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int16])
@pytest.mark.parametrize("operation", BITS, ids=["and", "or", "shift", "gcd", "not"])
def test_bits_of_numbers_that_have_none(operation, dtype):
    """The same error as in eager, also where nobody reads the result."""
    x = torch.ones(3, dtype=dtype)

    def unread(x):
        operation(x, x)
        return x + 1

    check(lambda x: operation(x, x), x)
    check(unread, x)
    check(lambda x, i: i.__iand__(x), x, torch.ones(3, dtype=torch.int16))


def test_repeated_complex_numbers():
    """No kernel of ours is for complex numbers; a constant is in the graph."""
    z = torch.complex(X, Y)

    def f(z):
        k = torch.tensor([0, 1])
        return z.repeat_interleave(2, 1)[k], torch.cartesian_prod(z[0], z[1]), (z * 2)[:, None].expand(3, 2, 4).sum(1)

    check(f, z, grad=False)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 5), (3, 0, 2), (1, 1, 1), (5, 1), (17,), (1, 33)])
def test_shapes_at_the_edge(shape):
    def f(x):
        return (
            x * 2 + 1,
            x.sum(),
            x.relu().mean(),
            x.reshape(-1),
            x.unsqueeze(-1).sum(-1),
            x.exp().sum(tuple(range(x.dim()))) if x.dim() else x,
        )

    check(f, torch.randn(shape))


def test_scalars_and_zero_dimensional():
    def f(x, s, k):
        return x * s + k, s.sqrt(), x.sum() * k

    check(f, X, torch.tensor(2.0), 3)
    check(f, X, torch.tensor(2.0, dtype=torch.float64), 0.5)


def test_grad_of_grad():
    def f(x):
        return (x.sin() * x**3).sum()

    def run(function):
        x = X.clone().requires_grad_(True)
        (g,) = torch.autograd.grad(function(x), x, create_graph=True)
        (h,) = torch.autograd.grad(g.pow(2).sum(), x)
        return g.detach(), h

    assert_same(run(f), run(kiln.compile(f)))


def test_grad_of_grad_calls_hooks_of_inputs_once():
    def run(function):
        x, calls = X.clone().requires_grad_(True), []
        x.register_hook(lambda g: calls.append(0) or g * 10)
        (g,) = torch.autograd.grad(function(x, x), x, create_graph=True)
        (h,) = torch.autograd.grad(g.sum(), x)
        return g.detach(), h, len(calls)

    def f(x, y):
        return (x**2 * y).sum()

    assert_same(run(f), run(kiln.compile(f)))


def test_grad_inside():
    def f(x):
        y = (x**3).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        return g * 2

    check(f, X.clone().requires_grad_(True))


def test_backward_inside_accumulates():
    def f(x, w):
        (x @ w).pow(2).sum().backward()

    def run(function):
        w = torch.linspace(0, 1, 8).reshape(4, 2).requires_grad_(True)
        function(X, w)
        first = w.grad.clone()
        function(X, w)
        return first, w.grad

    assert_same(run(f), run(kiln.compile(f)))


def test_backward_from_a_leaf():
    check(lambda x: x.backward(), torch.tensor(2.0, requires_grad=True))
    check(lambda x: torch.autograd.grad(x, x), torch.tensor(2.0, requires_grad=True))
    check(lambda x: (x.backward(), x.grad * 2), torch.tensor(2.0, requires_grad=True))


def test_tensor_hooks_and_retain_grad():
    def run(function):
        x = X.clone().requires_grad_(True)
        seen = []
        out = function(x)
        out.register_hook(lambda g: seen.append(g.clone()) or g * 2)
        out.retain_grad()
        out.sum().backward()
        return seen, out.grad, x.grad

    def f(x):
        return x.sin() * 2

    assert_same(run(f), run(kiln.compile(f)))


def test_backward_twice_and_retain_graph():
    def f(x):
        return (x.exp() * x).sum()

    def run(function):
        x = X.clone().requires_grad_(True)
        y = function(x)
        y.backward(retain_graph=True)
        y.backward()
        try:
            y.backward()
        except RuntimeError:
            return x.grad, "raised"
        return x.grad, "did not raise"

    assert_same(run(f), run(kiln.compile(f)))


def test_saved_tensor_changed_in_place_is_an_error():
    def f(x):
        return x.exp() * 2, x.sin()

    def run(function):
        x = X.clone().requires_grad_(True)
        y = x * 1
        out = function(y)[1]
        with torch.no_grad():
            y.add_(1)
        try:
            out.sum().backward()
        except RuntimeError as error:
            return "modified by an inplace operation" in str(error)
        return False

    assert run(f) is True
    assert run(kiln.compile(f)) is True


def test_custom_autograd_function():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * 30 * x**2

    def f(x):
        return Cube.apply(x * 2) + 1

    check(f, X.clone().requires_grad_(True))


def test_checkpoint():
    from torch.utils.checkpoint import checkpoint

    def block(x):
        return torch.tanh(x @ x.t()) @ x

    def f(x):
        return checkpoint(block, x, use_reentrant=False)

    check(f, X.clone().requires_grad_(True), compare_rng=False)


def test_subclass_and_parameter_types():
    def f(p, x):
        return p * x, isinstance(p, torch.nn.Parameter)

    check(f, torch.nn.Parameter(X.clone()), Y)


def test_inference_mode():
    def f(x):
        return x * 2, x.view(-1)

    compiled = kiln.compile(f)
    with torch.inference_mode():
        a, b = compiled(X.clone())
        assert a.is_inference()
    assert_same(f(X), compiled(X))
    assert not compiled(X)[0].is_inference()


def test_data_dependent_values():
    def f(x):
        n = int(x.abs().sum().item())
        y = x + n
        if x.mean() > 10:
            return y
        positive = x[x > 0]
        return y * positive.shape[0], positive, x.nonzero(), float(x.max()), x.tolist(), x.abs().sum().item()

    check(f, X)


def test_numpy_in_the_middle():
    import numpy as np

    def f(x):
        a = x.numpy() if not x.requires_grad else x.detach().numpy()
        b = torch.from_numpy(np.sort(a * 2, axis=1))
        return b + x

    check(f, X)


def test_sparse_and_quantized_run_in_eager():
    def f(x, s):
        return torch.sparse.mm(s, x) + 1

    s = torch.eye(3).to_sparse()
    assert_same(f(X, s), kiln.compile(f)(X, s))


def test_views_of_another_dtype_alias_the_input():
    x = torch.randn(6, 2)

    def functions():
        yield lambda x: torch.view_as_complex(x)
        yield lambda x: torch.view_as_complex(x).conj()
        yield lambda x: x.view(torch.int32)
        yield lambda x: x.view(torch.float64)
        yield lambda x: torch.view_as_complex(x).imag

    for f in functions():
        check(f, x)
    for f in (lambda z: z.conj().imag, lambda z: (z.real, z[2:].conj()), lambda z: torch.view_as_real(z)):
        check(f, torch.randn(5, dtype=torch.complex64))


def test_gradients_whose_shape_depends_on_data():
    def masked(x, mask, values):
        y = x.clone()
        y[mask] = values
        return y * 2

    mask = torch.tensor([True, False, True, False])
    check(masked, torch.randn(4, requires_grad=True), mask, torch.randn(2, requires_grad=True))


def test_ops_without_a_functional_form():
    check(lambda x: torch.special.polygamma(1, x.clone().polygamma_(1)), torch.rand(4) + 1)


def test_in_place_results_must_fit():
    with pytest.raises(RuntimeError, match="can't be cast"):
        kiln.compile(lambda x: x.sin_())(torch.arange(3))
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        kiln.compile(lambda x, y: x.floor_divide_(y))(torch.ones(5, 1), torch.ones(5))


def test_inside_the_kernel_of_a_custom_operator():
    @torch.library.custom_op("kiln_test::scaled_mm", mutates_args=())
    def scaled_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = torch.empty(a.shape[0], b.shape[1])
        torch.mm(a, b, out=out)
        return out * 2

    @scaled_mm.register_fake
    def _(a, b):
        return a.new_empty(a.shape[0], b.shape[1])

    check(lambda a, b: scaled_mm(a, b) + 1, torch.randn(3, 4, requires_grad=True), torch.randn(4, 2), grad=False)


def test_a_custom_operator_whose_size_data_decide():
    """Its fake kernel asks for a size that nobody knows yet: a break, and eager's results and errors."""

    @torch.library.custom_op("kiln_test::positive", mutates_args=())
    def positive(a: torch.Tensor) -> torch.Tensor:
        if a.dim() != 1:
            raise ValueError("a line, please")
        return a[a > 0].clone()

    @positive.register_fake
    def _(a):
        return a.new_empty(torch.library.get_ctx().new_dynamic_size())

    def f(a):
        return positive(a * 2) + 1

    for a in (torch.tensor([1.0, -1, 2]), torch.tensor([-1.0, -1, 2])):
        check(f, a, grad=False)
    assert breaks(f, torch.ones(3)) == 1
    with pytest.raises(ValueError, match="a line, please"):
        kiln.compile(f)(torch.ones(2, 2))


def test_interrupts_of_a_fake_kernel_come_out():
    # Ctrl-C must be listened to: a shell's background job is started with it ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    @torch.library.custom_op("kiln_test::interrupted", mutates_args=())
    def interrupted(a: torch.Tensor) -> torch.Tensor:
        return a.clone()

    @interrupted.register_fake
    def _(a):
        raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            kiln.compile(lambda a: interrupted(a * 2))(torch.ones(2))
    finally:
        signal.signal(signal.SIGINT, before)


def test_dispatch_modes_see_each_op():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.ops = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.ops.append(str(function))
            return function(*args, **(kwargs or {}))

    compiled = kiln.compile(lambda x: (x * 2 + 1).sin())
    x = torch.ones(3)
    compiled(x)
    with Count() as count:
        compiled(x)
    assert count.ops == ["aten.mul.Tensor", "aten.add.Tensor", "aten.sin.default"]


def test_a_result_that_is_its_input_unchanged_is_a_copy():
    check(lambda x: torch.nn.functional.pixel_shuffle(x, 1), torch.randn(1, 4, 2, 2, requires_grad=True))


def test_scatter_into_one_element_and_back():
    def f(x, index, source):
        return torch.index_reduce(x, 0, index, source, "mean", include_self=True)

    check(f, torch.tensor([1.5], requires_grad=True), torch.tensor([0]), torch.tensor([2.5], requires_grad=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_masks_are_drawn_as_eager_draws_them(dtype):
    # Sizes that leave the generator's block of 624 numbers in the middle, at its end, and many blocks later.
    def f(*tensors):
        return [F.dropout(t, p) for t, p in zip(tensors, (0.1, 0.5, 0.25, 0.0, 1.0))], torch.rand(3)

    tensors = [torch.ones(n, dtype=dtype) for n in (7, 312, 50_001, 5, 9)]
    compiled = kiln.compile(f, fullgraph=True)
    for seed in range(3):
        results, states = [], []
        for run in (f, compiled):
            torch.manual_seed(seed)
            results.append((run(*tensors), run(*tensors)))
            states.append(torch.get_rng_state())
        assert_same(results[1], results[0])
        assert torch.equal(states[0], states[1])


def test_powers_in_place_stay_in_the_graph():
    def f(x):
        return (x * 2).square_(), (x + 1).pow_(3), (x + 2).pow_(x)

    x = torch.rand(3, 4)
    for found, expected in zip(kiln.compile(f)(x), f(x), strict=True):
        torch.testing.assert_close(found, expected)
    kiln.reset()
    assert kiln.explain(f)(x).graph_break_count == 0


class Tagged(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.as_subclass(Tagged) * 2,
        lambda x: Tagged(x).sum(),
        lambda x: torch.Tensor._make_subclass(Tagged, x * 2),
        lambda x: (x + 1, [x.as_subclass(Tagged)][0].mean()),
        lambda x: (x.as_subclass(Tagged) * 2).as_subclass(torch.Tensor),
        lambda x: torch.nn.Parameter(x * 2),
    ],
)
@pytest.mark.filterwarnings("ignore:kiln")
def test_classes_of_tensors_made_inside(f):
    expected, compiled = f(X), kiln.compile(f)
    for _ in range(2):
        found = compiled(X)
        assert_same(found, expected)
        parts = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
        assert all(type(a) is type(b) for a, b in parts)


def test_ranges_of_truth_values():
    def f():
        return (
            torch.arange(False, True),
            torch.arange(True),
            torch.arange(True, 3),
            torch.arange(0, 5, True),
            torch.arange(False, True, 0.5),
            torch.arange(False, False),
        )

    check(f)


@pytest.mark.filterwarnings("ignore:.*ComplexHalf")
def test_complex_numbers_beside_half_precision():
    def f(x):
        z = torch.tensor(1 + 1j)
        return (x.half() + z).dtype, (x.half() * 1j).to(torch.complex64), (x.bfloat16() * 1j), x * 1j, x.double() * z

    check(f, torch.ones(3), grad=False)


def test_a_number_that_autograd_has_saved_is_a_number():
    def f(x, n):
        return torch.ops.aten.mul.Tensor(x, n)

    number = (torch.ones(2, requires_grad=True) * 2.0).grad_fn._saved_other
    assert number.dtype == torch.float64
    compiled = kiln.compile(f)
    for x in (torch.randn(2), torch.randn(()), torch.ones((), dtype=torch.bfloat16)):
        for n in (torch.tensor(2.0, dtype=torch.float64), number):
            assert_same(compiled(x, n), f(x, n))
