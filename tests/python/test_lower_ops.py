"""Ops below the joint graph: PyTorch's own samples of each op, recorded as ATen graphs, compiled, and compared with eager."""

import random
import re

import pytest
import torch
from torch.nn import functional as F
from torch.testing._internal.common_methods_invocations import op_db

import graph_text
import kiln
from helpers import check
from kiln import _C

# Ops whose ATen calls have rules in csrc/decompose or csrc/lower, a few samples each.
OPS = """abs acos acosh add addcdiv addcmul addmm all amax amin any arange argmax argmin as_strided atan2 baddbmm bitwise_and
bitwise_not bmm broadcast_to cat ceil clamp clone constant_pad_nd copysign cumprod cumsum diagonal div dot eq erf exp expand
expm1 eye fill flip floor floor_divide fmax fmod full gather ge hypot index_add index_put index_select isinf isnan lerp lgamma
log log1p logaddexp logical_and logical_not logical_xor logsumexp masked_fill max mean min minimum mm mul narrow ne neg new_full
permute pow prod reciprocal linalg.cross mv addmv addr remainder repeat reshape roll round rsqrt rsub scatter scatter_add select_scatter sgn sigmoid
slice_scatter softmax log_softmax split sqrt square stack std std_mean sub sum t tanh tile tril triu trunc unbind unflatten var
var_mean where xlogy nan_to_num linalg.vector_norm native_layer_norm nn.functional.avg_pool2d nn.functional.adaptive_avg_pool2d
nn.functional.avg_pool3d nn.functional.adaptive_avg_pool3d nn.functional.max_pool3d nn.functional.conv3d
nn.functional.conv_transpose3d nn.functional.conv2d nn.functional.cross_entropy nn.functional.elu nn.functional.embedding
nn.functional.gelu nn.functional.glu nn.functional.group_norm nn.functional.hardswish nn.functional.huber_loss
nn.functional.layer_norm nn.functional.leaky_relu nn.functional.linear nn.functional.logsigmoid nn.functional.max_pool2d
nn.functional.mish nn.functional.mse_loss nn.functional.nll_loss nn.functional.pad nn.functional.pixel_shuffle nn.functional.relu
nn.functional.silu nn.functional.smooth_l1_loss nn.functional.softplus nn.functional.threshold""".split()
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]
SAMPLES = 2

CASES = {}
for _op in op_db:
    if _op.name in OPS and (_op.name not in CASES or not _op.variant_test_name):
        CASES[_op.name] = _op


def compare(text, inputs, expected, **tolerance):
    """Compiles the text and compares values, dtypes, sizes and strides with eager's."""
    got = _C._compile_graph_text(text)(inputs)
    for g, e in zip(got, expected, strict=True):
        assert (g.dtype, g.shape) == (e.dtype, e.shape)
        if e.numel() > 1:
            assert [s for s, n in zip(g.stride(), g.shape) if n > 1] == [
                s for s, n in zip(e.stride(), e.shape) if n > 1
            ]
        torch.testing.assert_close(g, e, equal_nan=True, **tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("name", sorted(CASES))
def test_samples(name, dtype):
    op = CASES[name]
    if dtype not in op.supported_dtypes("cpu"):
        pytest.skip("eager has no such kernel")
    torch.manual_seed(0)
    samples = list(op.sample_inputs("cpu", dtype, requires_grad=False))
    random.Random(0).shuffle(samples)
    tolerance = {"rtol": 0.05, "atol": 0.02} if dtype == torch.bfloat16 else {}
    tried = 0
    for s in samples[: 3 * SAMPLES]:
        try:
            text, inputs, outs, ops = graph_text.record(op.op, s.input, *s.args, **s.kwargs)
        except graph_text.NotText:
            continue
        if ops:
            compare(text, inputs, outs, **tolerance)
            tried += 1
        if tried == SAMPLES:
            break


def tensors():
    """The shapes and layouts that are easily got wrong."""
    torch.manual_seed(0)
    base = torch.randn(6, 5, 4)
    return {
        "scalar": torch.randn(()),
        "empty": torch.randn(3, 0, 2),
        "one": torch.randn(1, 1),
        "transposed": base.transpose(0, 2),
        "strided": base[::2, :, 1::2],
        "expanded": torch.randn(1, 5, 1).expand(6, 5, 4),
        "offset": base[2:],
        "channels_last": torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last),
        "odd": torch.randn(17, 33),
    }


CHAINS = {
    "pointwise": lambda x: (x * 2 + 1).sigmoid() - x,
    "sum": lambda x: x.exp().sum(),
    "sum_last": lambda x: (x + 1).sum(-1) if x.dim() else x.sum(),
    "mean_first": lambda x: x.mean(0) if x.dim() else x.mean(),
    "softmax": lambda x: (x * 3).softmax(-1),
    "views": lambda x: x.reshape(-1).flip(0).unsqueeze(0).expand(3, x.numel()).t().contiguous(),
    "cat": lambda x: torch.cat([x, x * 2, -x], 0) if x.dim() else torch.stack([x, x + 1]),
    "shared": lambda x: (x.tanh() * 2, x.tanh().sum(), x.abs().clamp(max=0.5)),
    "half": lambda x: (x.bfloat16() * 3 + 1).float(),
}


@pytest.mark.parametrize("layout", list(tensors()))
@pytest.mark.parametrize("chain", list(CHAINS))
def test_layouts(chain, layout):
    x = tensors()[layout]
    text, inputs, outs, _ = graph_text.record(CHAINS[chain], x)
    compare(text, inputs, outs)


def test_updates_write_into_the_inputs():
    # Adam's step with its state: every input is replaced by an expression of old values of several.
    text = """graph adam {
  input %p : f32[37]
  input %m : f32[37]
  input %v : f32[37]
  input %g : f32[37]
  %m1 = aten::lerp.Scalar(%m, %g, 0.1) : f32[37]
  %v0 = aten::mul.Tensor(%v, 0.999) : f32[37]
  %v1 = aten::addcmul(%v0, %g, %g, 0.001) : f32[37]
  %s = aten::sqrt(%v1) : f32[37]
  %d = aten::add.Tensor(%s, 1e-08, 1) : f32[37]
  %p1 = aten::addcdiv(%p, %m1, %d, -0.01) : f32[37]
  mutate %p = %p1
  mutate %m = %m1
  mutate %v = %v1
  return ()
}"""
    p, m, v, g = torch.randn(37), torch.randn(37), torch.rand(37), torch.randn(37)
    m1 = m.lerp(g, 0.1)
    v1 = (v * 0.999).addcmul(g, g, value=0.001)
    p1 = p.addcdiv(m1, v1.sqrt() + 1e-8, value=-0.01)
    version = p._version
    _C._compile_graph_text(text)([p, m, v, g])
    for got, want in ((p, p1), (m, m1), (v, v1)):
        torch.testing.assert_close(got, want)
    assert p._version > version


def test_mutations_read_old_values():
    text = """graph swap {
  input %x : f32[3]
  input %y : f32[3]
  %a = aten::flip(%x, [0]) : f32[3]
  %b = aten::add.Tensor(%x, %y, 1) : f32[3]
  mutate %x = %a
  mutate %y = %b
  return (%x)
}"""
    x, y = torch.tensor([1.0, 2, 3]), torch.tensor([10.0, 20, 30])
    (old,) = _C._compile_graph_text(text)([x, y])
    assert old.tolist() == [1, 2, 3] and x.tolist() == [3, 2, 1] and y.tolist() == [11, 22, 33]


def test_scattered_sums_do_not_race():
    # Every row of the gradient goes to one of three places; a lost update would show.
    text = """graph embedding {
  input %g : f32[4096, 64]
  input %i : i64[4096]
  %w = aten::embedding_dense_backward(%g, %i, 3, -1, False) : f32[3, 64]
  return (%w)
}"""
    run = _C._compile_graph_text(text)
    g, i = torch.ones(4096, 64), torch.arange(4096) % 3
    for _ in range(20):
        assert torch.equal(run([g, i])[0], torch.bincount(i).float()[:, None].expand(3, 64))


def test_index_out_of_range_raises():
    text = """graph embedding {
  input %w : f32[4, 8]
  input %i : i64[3]
  %e = aten::embedding(%w, %i, -1, False, False) : f32[3, 8]
  return (%e)
}"""
    run = _C._compile_graph_text(text)
    w = torch.randn(4, 8)
    assert torch.equal(run([w, torch.tensor([0, 3, 1])])[0], w[[0, 3, 1]])
    for bad in (4, -1):
        with pytest.raises(IndexError, match="out of range"):
            run([w, torch.tensor([0, bad, 1])])


def test_random_numbers_come_in_order():
    def f(x):
        a = torch.ops.aten.bernoulli.p(x, 0.5)
        return a * 2, torch.ops.aten.rand_like(x) + 1, torch.ops.aten.bernoulli.p(x, 0.25)

    x = torch.rand(100)
    torch.manual_seed(7)
    text, inputs, outs, _ = graph_text.record(f, x)
    run = _C._compile_graph_text(text)
    torch.manual_seed(7)
    for got, want in zip(run(inputs), outs, strict=True):
        assert torch.equal(got, want)


def training_graph(model, x, y):
    params = list(model.parameters())

    def step():
        loss = torch.nn.functional.cross_entropy(model(x), y)
        return [loss, *torch.autograd.grad(loss, params)]

    text, inputs, outs, _ = graph_text.record(step, grad=True)
    return text, [i.detach() for i in inputs], [o.detach() for o in outs]


def test_gradients_of_a_network():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 64), torch.nn.LayerNorm(64), torch.nn.GELU(), torch.nn.Linear(64, 7)
    )
    text, inputs, outs = training_graph(model, torch.randn(33, 20), torch.randint(0, 7, (33,)))
    compare(text, inputs, outs, rtol=1e-4, atol=1e-5)


def test_gradients_of_a_convolution_network():
    torch.manual_seed(0)
    nn = torch.nn
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(16, 8, 3),
        nn.SiLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 3 * 3, 5),
    )
    text, inputs, outs = training_graph(model, torch.randn(4, 3, 16, 16), torch.randint(0, 5, (4,)))
    compare(text, inputs, outs, rtol=1e-3, atol=1e-5)


def test_calls_without_codegen_agree():
    text, inputs, outs, _ = graph_text.record(lambda x: (x.exp() * 2).softmax(0), torch.randn(5, 3))
    _C.set_option("codegen", False)
    try:
        run = _C._compile_graph_text(text)
    finally:
        _C.set_option("codegen", True)
    assert "call aten::exp" in run.describe()
    assert torch.equal(run(inputs)[0], outs[0])


LARGE_ROWS = {
    "loss": lambda x: F.cross_entropy(x, torch.arange(x.shape[0]) % 7),
    "returned": lambda x: F.log_softmax(x, -1),
    "two_users": lambda x: F.log_softmax(x * 2, -1).exp().sum() + F.log_softmax(x, -1).amax(-1).sum(),
    "other_dim": lambda x: F.log_softmax(x, 0)[3] * 2,
    "half": lambda x: F.cross_entropy(x.bfloat16().float() * 1.5, torch.arange(x.shape[0]) % 7, label_smoothing=0.1),
}


@pytest.mark.parametrize("name", list(LARGE_ROWS))
def test_log_softmax_of_large_rows(name):
    # 2 MiB: kept as the rows' statistics.
    x = torch.randn(16, 32768)
    f, g = LARGE_ROWS[name], kiln.compile(LARGE_ROWS[name], fullgraph=True)
    results = []
    for run in (f, g):
        y = x.clone().requires_grad_()
        out = run(y)
        (out * 1.5).sum().backward()
        results.append((out.detach(), y.grad))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


def test_safe_softmax_of_rows_without_a_number():
    x = torch.randn(3, 4, 9)
    x[1, 2] = float("-inf")
    x[0, 0, 3] = float("-inf")
    x[2, 1, 0] = float("nan")
    for dtype in (torch.float32, torch.bfloat16):
        f = lambda x: torch.ops.aten._safe_softmax(x * 2, -1)  # noqa: E731
        torch.testing.assert_close(kiln.compile(f)(x.to(dtype)), f(x.to(dtype)), equal_nan=True)


def test_large_fills_stay_near_their_readers():
    # Two fills of one shape of kernel, the second used at the end only: done at the start, it would lie in memory beside
    # everything between.
    def f(x, w, index):
        a = torch.zeros(64, 64).index_add(0, index % 64, x[:, :64])
        y = x
        for _ in range(12):
            y = torch.relu(y @ w) + a.sum()
        return torch.zeros(4096, 512).index_add(0, index, y) @ w[:, :8]

    x, w = torch.randn(4096, 512), torch.randn(512, 512) / 22
    index = torch.randint(0, 4096, (4096,))
    run = _C._compile_graph_text(graph_text.record(f, x, w, index)[0])
    arena = int(re.search(r"arena (\d+) bytes", run.describe())[1])
    assert arena <= 2 * x.numel() * 4 + (1 << 20)


@pytest.mark.parametrize("scan", [torch.cumsum, torch.cumprod, torch.logcumsumexp])
@pytest.mark.parametrize(
    "of",
    [
        lambda x: x.t().flatten(),
        lambda x: x[::2].flatten() * 2,
        lambda x: x.repeat(2, 1),
        lambda x: x.roll(1, 0).t().reshape(-1, 2),
        lambda x: torch.cat([x, x.flip(0)]).t().reshape(-1),
        lambda x: x.repeat_interleave(2, 0),
        lambda x: torch.nn.functional.pad(x, (1, 1)).t().flatten(),
    ],
)
def test_scans_run_over_the_whole_dim(scan, of):
    """Of values whose index is divided: two loops over the dim would be many scans."""
    x = torch.linspace(0.5, 1.5, 12).reshape(4, 3)
    compiled = kiln.compile(lambda x: scan(of(x), 0))
    torch.testing.assert_close(compiled(x), scan(of(x), 0))
    left, right = x.clone().requires_grad_(), x.clone().requires_grad_()
    scan(of(left), 0).sin().sum().backward()
    compiled(right).sin().sum().backward()
    torch.testing.assert_close(left.grad, right.grad)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("shape", [(3, 700, 2), (40, 5, 301), (1, 1, 513)])
def test_running_sums_are_as_exact_as_in_eager(shape, dim):
    """Bit for bit: eager adds up float32 in float64."""
    x = torch.randn(shape)
    for f in (lambda x: x.cumsum(dim), lambda x: (x / 50 + 1).cumprod(dim), lambda x: x.cumsum(dim).transpose(0, 2)):
        assert torch.equal(kiln.compile(f)(x), f(x))


@pytest.mark.parametrize("mean", [0.3, 100.0])
@pytest.mark.parametrize("columns", [1, 5, 64])
def test_moments_of_many_rows_are_exact(columns, mean):
    """Errors do not grow with the number of rows: of 100000, each rounded to float32, a walk would leave 1e-6. One thread adds up more by itself
    than two."""
    torch.manual_seed(0)
    x = torch.randn(100352, columns) + mean
    exact = torch.var_mean(x.double(), 0)
    for got, want in zip(kiln.compile(lambda x: torch.var_mean(x, 0))(x), exact, strict=True):
        assert ((got - want).abs() / want.abs()).max() < (5e-7 if torch.get_num_threads() > 1 else 9e-7)


def test_moments_of_a_long_row_are_exact():
    """A row of two million numbers, in a loop that stores as well: a second level alone would be off by 1e-5."""

    def f(x):
        row = x.view(2, -1)
        return F.group_norm(x, 2), row.mean(-1), row.var(-1)

    torch.manual_seed(0)
    x = torch.rand(1, 8, 2**19) + 1
    for got, want in zip(kiln.compile(f)(x)[1:], f(x.double())[1:], strict=True):
        assert ((got - want).abs() / want).max() < 1e-6


@pytest.mark.parametrize("shape", [(32768, 3), (32768, 5), (8192, 8), (1024, 4, 2, 3)])
def test_sums_of_many_short_rows_are_exact(shape):
    """In two levels, however short the rows are: what is added up one by one is off by ten times as much."""

    def f(x, n, g):
        quotient = x / n  # stored: the sum cannot run over all dims as one
        return (quotient * g).sum(), quotient

    compiled, errors = kiln.compile(f), []
    for seed in range(8):
        torch.manual_seed(seed)
        args = torch.randn(shape), torch.rand(*shape[:-1], 1) + 0.5, torch.randn(shape)
        exact = f(*(t.double() for t in args))[0]
        errors.append([abs(g(*args)[0] - exact) for g in (f, compiled)])
    eager, ours = torch.tensor(errors).mean(0)
    assert ours < 5 * eager


@pytest.mark.parametrize(
    "shifts, dims", [(1, 3), (2, 1), ((4, 3), (2, 3)), ((0, 1), (2, 3)), (5, 2), (3, None), (-1, 3)]
)
def test_rolls(shifts, dims):
    x = torch.randn(2, 3, 5, 21)
    for y in (x, x.contiguous(memory_format=torch.channels_last), x[:, :, 1:], x.transpose(2, 3), x[..., ::2]):
        check(lambda y: (y.roll(shifts, dims), (y * 2).roll(shifts, dims) + 1), y)


@pytest.mark.parametrize("columns", [1, 2, 4, 7, 8, 15, 16, 31, 64, 128])
@pytest.mark.parametrize("rows", [(3,), (16,), (131,), (5, 10), (2, 3, 7)])
def test_short_rows(rows, columns):
    """A row is held by one lane, or spread over the lanes."""
    x = torch.randn(*rows, columns)
    check(
        lambda x: (
            x.softmax(-1),
            x.log_softmax(-1),
            x.argmax(-1),
            x.sum(-1),
            x.logsumexp(-1),
            F.layer_norm(x, (columns,)),
        ),
        x,
    )
    check(lambda x: x.log_softmax(-1).transpose(0, -1).contiguous(), x.requires_grad_())


@pytest.mark.parametrize("layout", ["rows", "turned", "every second", "expanded", "part"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_transposes(dtype, layout):
    """Of loads and of stores, with tails on both sides, in one kernel with what is not turned."""
    x = {
        "rows": lambda x: x,
        "turned": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
        "every second": lambda x: x.repeat_interleave(2, 2)[..., ::2],
        "expanded": lambda x: x[:, :1].expand(-1, 37, -1),
        "part": lambda x: x[:, :, 3:],
    }[layout]((torch.randn(3, 37, 52) * 3).to(dtype))

    def f(x):
        y = x.transpose(1, 2)
        z = torch.where(y > 0, y, y * 0).contiguous()
        return (
            z,
            y.permute(2, 0, 1).contiguous(),
            x.permute(2, 1, 0).clone(memory_format=torch.contiguous_format),
            z + y,
        )

    check(f, x)


@pytest.mark.parametrize("scan", [torch.cumsum, torch.cumprod])
@pytest.mark.parametrize("shape", [(12, 1), (1, 5), (3, 1, 4)])
def test_scans_over_dims_of_one_element(scan, shape):
    x = torch.linspace(0.5, 1.5, torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    dim = shape.index(1)

    def f(x):
        y = x.repeat_interleave(2, (dim + 1) % len(shape))
        return x.softmax(0).mean(-1), y, scan(y, dim), scan(x, dim)

    check(f, x)
    check(f, x.clone().requires_grad_())


@pytest.mark.parametrize("of", ["dense", "transposed", "without a batch", "strided", "nan"])
@pytest.mark.parametrize("window", [{}, {"stride": 1, "padding": 1}, {"dilation": 2, "ceil_mode": True}])
def test_max_pooling_over_one_dim(of, window):
    """Eager has another kernel, with another layout of its result, for what needs no gradient."""
    x = {
        "dense": lambda: torch.randn(2, 3, 16),
        "transposed": lambda: torch.randn(2, 16, 3).transpose(1, 2),
        "without a batch": lambda: torch.randn(3, 17),
        "strided": lambda: torch.randn(1, 1, 19)[:, :, ::2],
        "nan": lambda: torch.full((1, 2, 7), torch.nan),
    }[of]()
    for t in (x, x.clone().requires_grad_()):
        check(lambda x: torch.nn.functional.max_pool1d(x, 2, **window) * 2, t, fullgraph=True)
        check(lambda x: torch.nn.functional.max_pool1d(x, 3, **window), t, fullgraph=True)


@pytest.mark.parametrize("pool, shape", [(F.max_pool2d, (1, 2, 7, 6)), (F.max_pool3d, (1, 2, 5, 4, 6))])
@pytest.mark.parametrize("value", [-torch.inf, torch.nan])
@pytest.mark.parametrize("options", [{"padding": 1}, {"stride": 1, "padding": 1, "dilation": 2}, {"ceil_mode": True}])
def test_the_place_of_a_maximum_among_equals(pool, shape, value, options):
    """Where all of a window is one value, NaN or the least: eager's index, and with it the gradient's place."""
    x = torch.full(shape, value)
    x[:, 1, 2:4] = torch.arange(6.0)
    size = 2 if len(shape) == 5 else 3
    check(lambda x: pool(x, size, return_indices=True, **options), x.requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("step", [2, 3, 4, 5])
def test_every_so_many_elements(step, dtype):
    """Small steps are loaded with what lies between: whole vectors, tails, and masked ones."""
    for n in (1, 7, 16, 33, 100):
        x = torch.randn(3, step * n).mul(10).to(dtype)
        check(lambda x: x[:, ::step] ^ x[:, 1::step] if x.dtype == torch.bool else x[:, ::step] + x[:, 1::step], x)
        check(lambda x: torch.nn.functional.pad(x, (3, 3), value=1)[:, ::step].clone(), x)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("window", [(2, 2, 0), (3, 2, 1), (3, 1, 1), (5, 3, 2)])
def test_pooling_of_images(window, layout):
    for size in (9, 40, 64):
        x = torch.randn(2, 20, size, size + 3).to(memory_format=layout).requires_grad_()
        check(lambda x: torch.nn.functional.max_pool2d(x, *window), x, fullgraph=True)
        check(lambda x: torch.nn.functional.avg_pool2d(x, *window), x, fullgraph=True)
        check(lambda x: torch.nn.functional.max_pool2d(x, *window), x.detach(), fullgraph=True)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.parametrize("window", [(2, 2, 0), (3, 2, 1), ((1, 3, 2), (1, 2, 1), (0, 1, 1)), (3, 1, 0)])
def test_pooling_of_volumes(window, layout):
    for size in (6, 9, 16):
        x = torch.randn(2, 5, 4, size, size + 3).to(memory_format=layout).requires_grad_()
        for counted in (True, False):
            check(lambda x, c=counted: F.avg_pool3d(x, *window, count_include_pad=c), x, fullgraph=True)
        check(lambda x: F.avg_pool3d(x, *window, ceil_mode=True, divisor_override=5), x, fullgraph=True)
        check(lambda x: F.max_pool3d(x, *window) * 2, x, fullgraph=True)
        check(lambda x: F.max_pool3d(x, *window, ceil_mode=True), x.detach(), fullgraph=True)
        check(lambda x, n=size: F.adaptive_avg_pool3d(x, (2, n // 3, 1)), x, fullgraph=True)
    check(lambda x: F.max_pool3d(x, *window), torch.randn(3, 5, 6, 7).requires_grad_(), fullgraph=True)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nearest_upsampling(dims, dtype):
    x = torch.randn(2, 3, *(4, 5, 3)[:dims]).to(dtype).requires_grad_()
    for options in ({"scale_factor": 2}, {"size": (12, 10, 9)[:dims]}, {"scale_factor": (1.0, 3.0, 2.0)[:dims]}):
        check(lambda x, o=options: F.interpolate(x, mode="nearest", **o) * 2, x, fullgraph=True)
    check(lambda x: F.interpolate(x, size=(7, 8, 5)[:dims]), x, fullgraph=True)  # no whole factor


@pytest.mark.parametrize("columns", [1, 3, 16, 70])
def test_sums_at_indices(columns):
    source, to = torch.randint(0, 20, (300,)), torch.randint(0, 20, (300,))

    def f(x):
        return torch.zeros_like(x).index_add_(0, to, x[source]) + x.new_zeros(20, columns).index_add(
            0, source, x[to] * 2
        )

    check(f, torch.randn(20, columns, dtype=torch.float64).requires_grad_(), fullgraph=True)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("options", [{}, {"padding": 20}, {"padding": 20, "stride": 2}, {"padding": 20, "stride": 1}])
def test_windows_larger_than_the_image(options, layout):
    """Only what lies in the image is gone through: windows of 10000 x 10000 would take minutes otherwise."""
    x = torch.randn(2, 6, 5, 7).contiguous(memory_format=layout).requires_grad_()
    side = 41 if options else 10000
    for counted in (True, False):
        options = {"count_include_pad": counted, "ceil_mode": True, **options}
        check(lambda x, o=options: F.avg_pool2d(x, side, **o) * 2, x, fullgraph=True)
    options.pop("count_include_pad")
    check(lambda x: F.max_pool2d(x, side, **options) * 2, x, fullgraph=True)


@pytest.mark.parametrize("groups", [1, 2, 4, 8, 32])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(3, 32, 6, 7), (2, 32, 1, 1), (2, 32, 40), (2, 96, 5, 8)])
def test_group_norm_of_either_layout(groups, affine, shape):
    torch.manual_seed(0)
    options = {"dtype": torch.float64}  # eager's own rounding in float32 is larger than what is compared here
    weight, bias = torch.randn(2, shape[1], **options) if affine else (None, None)
    x = torch.randn(shape, **options) * 3 + torch.arange(shape[1]).view(-1, *[1] * (len(shape) - 2))
    layouts = [x, x.transpose(1, -1).contiguous().transpose(1, -1)]
    if x.dim() == 4:
        layouts.append(x.contiguous(memory_format=torch.channels_last))
    for x in layouts:

        def f(x, weight, bias):
            return F.silu(F.group_norm(x, groups, weight, bias))

        check(f, x, weight, bias, fullgraph=True)
        leaves = [None if t is None else t.clone().requires_grad_() for t in (weight, bias)]
        check(f, x.clone().requires_grad_(), *leaves, fullgraph=True)
        check(lambda x: F.group_norm(x, groups), x.float(), rtol=1e-3, atol=1e-3, fullgraph=True)


@pytest.mark.parametrize("of", ["max_pool2d", "avg_pool2d"])
def test_two_poolings_of_one_cheap_value(of):
    pool = getattr(torch.nn.functional, of)

    def erosion(x):  # of the soft skeleton of Shit et al. (2021), clDice
        return torch.min(-pool(-x, (3, 1), 1, (1, 0)), -pool(-x, (1, 3), 1, (0, 1)))

    check(erosion, torch.randn(2, 3, 8, 8), fullgraph=True)


@pytest.mark.parametrize("length", [16, 20, 48])
def test_largest_magnitude_of_padded_groups(length):
    # The zeros of the padding are seen in the code of the reduction: |x| > 0 must not become x > 0.
    def f(x):
        groups = torch.cat((x, x.new_zeros(-length % 32))).view(-1, 32)
        return groups.abs().amax(1), groups.abs().max(), (-groups.abs()).amin(1)

    for seed in range(4):
        check(f, torch.randn(length, generator=torch.Generator().manual_seed(seed)), grad=False)


def test_magnitudes_above_zero_or_nan():
    def f(x):
        a = x.abs()
        return (
            torch.where(a.isnan(), a, torch.where(a > 0, a, 0.0)),
            torch.where(a != a, a, torch.where(a < 1e-30, 0.0, a)),
            torch.where(a.isnan() | (a > 0), 1.0, 2.0),
            torch.where(a.isnan(), a, torch.where(0 < a, a, -0.0)),
        )

    check(f, torch.tensor([1.0, -1, 0, -0.0, float("nan"), -2, 3, -float("inf")] * 8), grad=False)


@pytest.mark.parametrize("draw", [torch.randn_like, torch.rand_like, lambda t: F.dropout(t, 0.5)])
@pytest.mark.parametrize("training", [True, False])
def test_random_numbers_drawn_like_what_is_kept_in_another_order(draw, training):
    # Inside, the normalization's result is kept in the order of its input; eager's has another.
    norm = torch.nn.BatchNorm1d(6).double().train(training)

    def f(x):
        y = norm(x.transpose(1, 2))
        z = norm(x.transpose(1, 2)).transpose(1, 2)
        return draw(y), draw(z), z, z + draw(z)

    check(f, torch.randn(4, 5, 6).double())


def test_truth_over_no_dim():
    """dim=[] folds every dim in most reductions, none in these."""

    def f(x):
        none = [t(x, dim=[], keepdim=k) for t in (torch.all, torch.any) for k in (False, True)]
        return *none, torch.all(x.t(), dim=[]), torch.any(x.to(torch.uint8), dim=[]), torch.all(x), x.amax(dim=[])

    check(f, torch.tensor([[0.0, 3.0, float("nan")], [-1.0, 0.0, 0.0]]), grad=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", [0, 0.5, 1.5, 3, 4, 7])
def test_norms_of_any_order(order, dtype):
    torch.manual_seed(0)
    x = torch.randn(6, 5, 70).to(dtype)
    x[0, 0, :3] = 0

    def f(x):
        norm = torch.linalg.vector_norm
        return (
            norm(x, order),
            norm(x, order, dim=-1),
            norm(x, order, dim=(0, 2), keepdim=True),
            norm(x[:, :0], order, 0),
        )

    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    check(f, x, grad=False, rtol=tolerance, atol=tolerance)
    if order > 1 and dtype != torch.bfloat16:
        check(lambda x: f(x)[:3], x + 3, rtol=1e-4, atol=1e-4)


def test_cross_products():
    x, y = torch.randn(4, 3, 5, 3), torch.randn(3, 1, 3)

    def f(x, y):
        return torch.linalg.cross(x, y.expand(4, 3, 5, 3)), torch.linalg.cross(x, y), torch.cross(x, x.flip(-1), dim=1)

    check(f, x, y)
    check(lambda x, y: torch.linalg.cross(x, y), (x * 9).long(), (y * 9).long())


POOLED = [((4, 6, 12, 13), "contiguous"), ((4, 6, 12, 13), "channels last"), ((5, 12, 14), "contiguous")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [(3, 2, 1), (3, 1, 1), (5, 1, 2), (2, 1, 0), (3, 2, 1, 2), (2, 2, 0)], ids=str)
@pytest.mark.parametrize("shape,layout", POOLED, ids=str)
def test_gradients_of_windows_that_meet(shape, layout, window, dtype):
    """Gradients go to the places of the maxima; those that several windows share add up."""
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)
    x = x.to(memory_format=torch.channels_last) if layout == "channels last" else x
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    check(lambda x: F.max_pool2d(x * 2, *window).relu() * 3, x, **tolerance)


def test_a_costly_value_is_computed_once_for_several_readers(capfd):
    """A power of each distance is not computed again for each of its three coordinates."""

    def forces(x):
        d = x[None] - x[:, None]
        return (d / (d.square().sum(-1, keepdim=True) + 0.1) ** 1.5).sum(1)

    check(forces, torch.randn(40, 3), rtol=1e-4, atol=1e-5)
    kiln.reset()
    kiln.set_logs("loops")
    kiln.compile(forces)(torch.randn(40, 3))
    kiln.set_logs("")
    kernels = capfd.readouterr().err.split("after scheduling")[1].split("kernel ")
    costly = [k for k in kernels if " Pow " in k]
    assert len(costly) == 1
    assert "[1600" in costly[0] or "[40, 40" in costly[0]  # by pairs, with the inner sum over coordinates
    assert "Store" in costly[0] and "40, 3, 40]" not in costly[0]


def test_values_without_vectors_are_those_of_eager():
    """Which routine of LAPACK runs depends on whether somebody needs the vectors."""
    torch.manual_seed(0)
    x = torch.randn(20, 16, 12)
    y = x.mT @ x
    with torch.no_grad():
        check(lambda x, y: (torch.linalg.svdvals(x), torch.linalg.eigvalsh(y)), x, y, rtol=0, atol=0, grad=False)
        check(lambda x: torch.linalg.svd(x)[1:], x, rtol=1e-5, atol=1e-5, grad=False)
    check(lambda x: torch.linalg.svdvals(x).sum() + torch.linalg.eigvalsh(x.mT @ x).sum(), x, rtol=1e-3, atol=1e-3)


def test_gradients_of_doubles_are_as_precise_as_eagers():
    x = torch.linspace(-4, 4, 101, dtype=torch.float64)

    def gradient(function):
        def f(x):
            x = x.detach().requires_grad_()
            return torch.autograd.grad(function(x).square().sum(), x)[0]

        return f

    for name in ("hardsigmoid", "hardswish", "gelu", "silu", "mish", "softplus", "selu", "elu", "logsigmoid"):
        f = gradient(getattr(torch.nn.functional, name))
        torch.testing.assert_close(kiln.compile(f)(x), f(x), rtol=1e-12, atol=1e-14, msg=name)


EXTREMES = [float("inf"), -float("inf"), float("nan"), 1e30, -1e30, 40.0, -40.0, 0.0, -0.0, 3e38, -3e38, 1.5e19]
AT_EXTREMES = """acosh asinh atan atanh cos cosh digamma erf erfc exp exp2 expm1 frac lgamma log log10 log1p log2 logit nan_to_num
reciprocal round rsqrt sigmoid sin sinh sqrt tan tanh trunc nn.functional.elu nn.functional.hardswish nn.functional.logsigmoid
nn.functional.mish nn.functional.selu nn.functional.silu nn.functional.softplus nn.functional.softsign
nn.functional.tanhshrink special.log_ndtr special.ndtr""".split()


@pytest.mark.parametrize("name", AT_EXTREMES)
def test_values_at_extremes(name):
    function = torch
    for part in name.split("."):
        function = getattr(function, part)
    for dtype in (torch.float32, torch.float64):
        more = [1e200, -1e200] if dtype == torch.float64 else []
        x = torch.tensor((EXTREMES + more) * 3, dtype=dtype)
        got, expected = kiln.compile(lambda x: function(x))(x), function(x)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=0, equal_nan=True)
        assert torch.equal(torch.signbit(got)[~got.isnan()], torch.signbit(expected)[~got.isnan()])
