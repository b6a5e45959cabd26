"""The operator table's shape rules against eager, over PyTorch's own samples of every operator, forward and backward, each
call also on inputs of other memory layouts."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.common_methods_invocations import op_db

import kiln
from kiln import _C
from kiln.testing import assert_same
from shape_rules import Recorder, run_sample

SAMPLES = 4
# Their samples need other layouts, files or minutes; their ATen calls occur in other operators' samples.
_SKIPPED = (
    "_refs",
    "ops.",
    "sparse",
    "to_sparse",
    "torch.ops",
    "signal",
    "jiterator",
    "fft",
    "linalg.ldl",
    "stft",
    "istft",
)
OPS = sorted({op.name: op for op in op_db if not op.name.startswith(_SKIPPED)}.items())


def scan(op, dtype, samples, relayout):
    grad = dtype.is_floating_point and op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    recorder = Recorder(relayout=relayout)
    for i, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=grad)):
        if i >= samples:
            break
        run_sample(op, sample, recorder)
    return recorder


@pytest.mark.parametrize("name", [name for name, _ in OPS])
def test_rules_agree_with_eager(name):
    for op in (op for op in op_db if op.name == name):
        for dtype in (torch.float32, torch.int64, torch.bfloat16):
            if dtype not in op.supported_dtypes("cpu"):
                continue
            first = dtype is torch.float32
            recorder = scan(op, dtype, SAMPLES if first else 1, relayout=first)
            assert not recorder.failures, f"{len(recorder.failures)} calls, the first: {recorder.failures[0]}"


def test_the_table_covers_what_models_emit():
    """Rows that a training step of the usual models needs, in place ones included."""
    needed = """add.Tensor mul.Tensor div.Tensor sub.Tensor relu gelu silu sigmoid tanh addmm mm bmm baddbmm convolution
        convolution_backward native_batch_norm _native_batch_norm_legit_functional native_batch_norm_backward
        native_layer_norm native_layer_norm_backward native_group_norm max_pool2d_with_indices
        max_pool2d_with_indices_backward avg_pool2d _adaptive_avg_pool2d embedding embedding_dense_backward _softmax
        _softmax_backward_data _log_softmax nll_loss_forward nll_loss_backward cat stack split.Tensor slice.Tensor
        select.int view permute transpose.int expand unsqueeze squeeze.dim as_strided clone _to_copy
        _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
        native_dropout bernoulli.p where.self masked_fill.Scalar cumsum topk sort argmax gather scatter.value index.Tensor
        index_put _foreach_add.List _foreach_addcdiv.ScalarList _foreach_sqrt lerp.Scalar addcmul addcdiv
        upsample_nearest2d upsample_bilinear2d constant_pad_nd tril arange.start full zeros ones_like rand_like
        add_.Tensor mul_.Tensor copy_ zero_ fill_.Scalar _foreach_mul_.Scalar addcmul_ lerp_.Scalar relu_""".split()
    assert [n for n in needed if not _C._has_rule("aten::" + n)] == []


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.ops.aten.mm(torch.ones(2, 3), torch.ones(4, 5)),
        lambda: torch.ops.aten.mm(torch.ones(2), torch.ones(4, 5)),
        lambda: torch.ops.aten.bmm(torch.ones(2, 3, 4), torch.ones(2, 3, 4)),
        lambda: torch.ops.aten.addmm(torch.ones(7), torch.ones(2, 3), torch.ones(3, 5)),
        lambda: torch.ops.aten.add.Tensor(torch.ones(2, 3), torch.ones(4)),
        lambda: torch.ops.aten.view(torch.ones(2, 3), [4, -1]),
        lambda: torch.ops.aten.view(torch.ones(2, 3).t(), [6]),
        lambda: torch.ops.aten.expand(torch.ones(2, 3), [2, 4]),
        lambda: torch.ops.aten.select.int(torch.ones(2, 3), 1, 3),
        lambda: torch.ops.aten.select.int(torch.ones(2, 3), 2, 0),
        lambda: torch.ops.aten.cat([torch.ones(2, 3), torch.ones(2, 4)]),
        lambda: torch.ops.aten.stack([torch.ones(2, 3), torch.ones(2, 4)]),
        lambda: torch.ops.aten.sum.dim_IntList(torch.ones(2, 3), [0, 0]),
        lambda: torch.ops.aten.sum.dim_IntList(torch.ones(2, 3), [2]),
        lambda: torch.ops.aten.mean.dim(torch.ones(2, 3, dtype=torch.int64), [0]),
        lambda: torch.ops.aten.topk(torch.ones(3), 4),
        lambda: torch.ops.aten.unfold(torch.ones(3), 0, 4, 1),
        lambda: torch.ops.aten.split_with_sizes(torch.ones(3), [1, 1]),
        lambda: torch.ops.aten.native_layer_norm(torch.ones(2, 3), [4], None, None, 1e-5),
        lambda: torch.ops.aten.add_.Tensor(torch.ones(2), torch.ones(2, 2)),
        lambda: torch.ops.aten.add_.Tensor(torch.ones(2, dtype=torch.int64), torch.ones(2)),
        lambda: torch.ops.aten.index.Tensor(torch.ones(2), [torch.tensor([0]), torch.tensor([0])]),
        lambda: torch.ops.aten.convolution(
            torch.ones(1, 3, 8, 8), torch.ones(4, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
        ),
        lambda: torch.ops.aten.convolution(
            torch.ones(1, 2, 2, 2), torch.ones(4, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
        ),
    ],
)
def test_mistakes_read_as_in_eager(call):
    """A rule refuses what eager refuses, in eager's words."""
    with pytest.raises((RuntimeError, IndexError)) as eager:
        call()
    recorder = Recorder()
    with pytest.raises((RuntimeError, IndexError)), recorder:
        call()
    assert len(recorder.refused) == 1
    assert str(recorder.refused[0]).split("\n")[0] == str(eager.value).split("\n")[0]


def direct_calls():
    """Calls that no sample makes: functional forms that functionalization makes, random ops, lists of tensors."""
    a = torch.ops.aten
    x, y, z = torch.rand(3, 4), torch.rand(3, 4).t().contiguous().t(), torch.rand(4)
    i, b = torch.randint(0, 5, (3, 4)), torch.rand(3, 4) > 0.5
    image, volume = torch.rand(2, 3, 6, 6), torch.rand(2, 3, 4, 6, 6)
    last = image.contiguous(memory_format=torch.channels_last)
    yield from (lambda f=f: f(3, 4, 1) for f in (a.tril_indices, a.triu_indices))
    yield from (lambda f=f: f([2, 3], generator=None) for f in (a.rand.generator, a.randn.generator))
    yield lambda: a.randint.generator(5, [2, 3], generator=None)
    yield lambda: a.randint.low_generator(1, 5, [2, 3], generator=None)
    yield lambda: a.randint.low(1, 5, [2, 3], dtype=torch.int32)
    yield lambda: a.randperm(5)
    yield lambda: a.randperm.generator(5, generator=None)
    yield lambda: a.multinomial(x, 2)
    for t in (x, y, last):
        yield from (lambda f=f, t=t: f(t) for f in (a.rand_like, a.zero, a.uniform, a.normal_functional, a.exponential))
        yield from (
            lambda f=f, t=t: f(t) for f in (a.random, a.cauchy, a.log_normal, a.detach_copy, a.square, a.poisson)
        )
        yield from (lambda f=f, t=t: f(t, 0.5) for f in (a.bernoulli.p, a.geometric, a.fill.Scalar))
        yield lambda t=t: a.bernoulli(t)
        yield lambda t=t: a.bernoulli.Tensor(t, torch.rand_like(t))
        yield lambda t=t: a.random.to(t, 4)
        yield lambda t=t: getattr(a.random, "from")(t, 1, 4)
        yield lambda t=t: a.native_dropout(t, 0.5, True)
        yield lambda t=t: a.normal.Tensor_float(t, 2.0)
        yield lambda t=t: a.normal.float_Tensor(0.0, t)
        yield lambda t=t: a.normal.Tensor_Tensor(t, t)
        yield lambda t=t: a.fill.Tensor(t, torch.tensor(2.0))
        yield lambda t=t: a.copy(t, torch.rand(t.shape[-1]))
        yield lambda t=t: a.clamp_max(t, 1)
        yield lambda t=t: a.argsort(t)
        yield lambda t=t: a.argsort.stable(t, stable=True)
        yield lambda t=t: a.isfinite(t)
        yield lambda t=t: a._safe_softmax(t, -1)
        yield lambda t=t: a.binary_cross_entropy_with_logits(t, t, None, None, 0)
        yield lambda t=t: a.var(t)
        yield lambda t=t: a.std.dim(t, [0], True, True)
        yield lambda t=t: a._unsafe_index_put(t, [torch.tensor([0, 1])], torch.tensor(1.0))
        yield lambda t=t: a._unsafe_index.Tensor(t, [None, torch.tensor([[0, 1]])])
        yield lambda t=t: a.index.Tensor(t, [torch.tensor([0, 1]), torch.tensor([[0], [1]])])
        for f in (a.add, a.mul, a.div, a.sub):
            yield lambda t=t, f=f: f.Tensor(t, 2)
            yield lambda t=t, f=f: f.Scalar(t, 2)
        yield lambda t=t: a.where.ScalarOther(t > 0.5, t, 1.0)
        yield lambda t=t: a.where.ScalarSelf(t > 0.5, 1.0, t)
        yield lambda t=t: a.where.Scalar(t > 0.5, 1, 2)
        yield lambda t=t: a.div.Scalar_mode(t, 2, rounding_mode="floor")
        yield lambda t=t: a._to_copy(t, dtype=torch.bfloat16)
        yield lambda t=t: a._to_copy(t[..., ::2], dtype=torch.float64)
        for inplace in (a.add_.Tensor, a.mul_.Tensor, a.div_.Tensor, a.copy_):
            yield lambda t=t, f=inplace: f(t.clone(), torch.rand(t.shape[-1]))
        for inplace in (a.zero_, a.relu_, a.sigmoid_, a.neg_, a.uniform_, a.normal_, a.bernoulli_.float):
            yield lambda t=t, f=inplace: f(t.clone())
    for f in (a.bitwise_and, a.bitwise_or, a.bitwise_xor):
        yield lambda f=f: f.Tensor(i, b)
        yield lambda f=f: f.Scalar(b, 3)
        yield lambda f=f: f.Scalar_Tensor(3, i.int())
    for f in (a.bitwise_left_shift, a.bitwise_right_shift):
        yield lambda f=f: f.Tensor(i, i.int())
        yield lambda f=f: f.Tensor_Scalar(i.short(), 3)
    yield lambda: a.gcd(i, i.int())
    yield lambda: a.remainder.Scalar_Tensor(3, i + 1)
    yield lambda: a.floor_divide.Scalar(i, 2)
    yield lambda: a.copysign.Scalar(i, 2)
    yield lambda: a.xlogy.Scalar_Self(2, i)
    yield lambda: a.relu6(i)
    yield lambda: a._reshape_alias(x, [12], [1])
    yield lambda: a.view.dtype(x, torch.int32)
    yield lambda: a.view.dtype(x, torch.int16)
    yield lambda: a.view.dtype(x, torch.float64)
    yield lambda: a.searchsorted.Scalar(z, 0.5)
    yield lambda: a.norm.Scalar(x)
    yield lambda: a.norm.ScalarOpt_dim_dtype(x, 2, [0], False, dtype=torch.float64)
    yield lambda: a.unsafe_split_with_sizes(x, [1, 2])
    yield lambda: a.slice_copy.Tensor(y, 0, 1, 3)
    yield lambda: a.select_copy.int(y, 0, 1)
    yield lambda: a.split_copy.Tensor(y, 2)
    yield lambda: a._addmm_activation(z, x, torch.rand(4, 4))
    for t in (image, last):
        yield lambda t=t: a.upsample_nearest2d(t, [12, 12])
        yield lambda t=t: a.upsample_nearest2d_backward(t, [6, 6], [2, 3, 3, 3])
        yield lambda t=t: a._upsample_nearest_exact2d(t, [12, 12])
        yield lambda t=t: a._upsample_nearest_exact2d_backward(t, [6, 6], [2, 3, 3, 3])
        yield lambda t=t: a._upsample_bicubic2d_aa(t, [12, 12], False)
        yield lambda t=t: a.reflection_pad2d(t, [1, 1, 2, 2])
        yield lambda t=t: a.reflection_pad2d_backward(torch.rand(2, 3, 10, 8), t, [1, 1, 2, 2])
        yield lambda t=t: a.replication_pad2d(t, [1, 1, 2, 2])
        w, m = torch.ones(3), torch.zeros(3)
        yield lambda t=t: a._native_batch_norm_legit.no_stats(t, w, m, True, 0.1, 1e-5)
        yield lambda t=t: a._native_batch_norm_legit_functional(t, w, m, m, w, True, 0.1, 1e-5)
        yield lambda t=t: a._native_batch_norm_legit_functional(t, None, None, m, w, False, 0.1, 1e-5)
        yield lambda t=t: a._native_batch_norm_legit_no_training(t, w, m, m, w, 0.1, 1e-5)
        yield lambda t=t: a._batch_norm_with_update_functional(t, w, m, m, w, 0.1, 1e-5)
        yield lambda t=t: a._batch_norm_no_update(t, w, m, m, w, 0.1, 1e-5)
        yield lambda t=t: a.affine_grid_generator(torch.rand(2, 2, 3), [2, 3, 6, 6], False)
        for mode in (True, False):
            yield lambda t=t, mode=mode: a.native_batch_norm_backward(
                t, t, w, m, w, m if mode else None, w if mode else None, mode, 1e-5, [True, mode, True]
            )
    for t in (volume, volume.contiguous(memory_format=torch.channels_last_3d)):
        yield lambda t=t: a.upsample_nearest3d(t, [8, 12, 12])
        yield lambda t=t: a.upsample_nearest3d_backward(t, [4, 6, 6], [2, 3, 2, 3, 3])
        yield lambda t=t: a.reflection_pad3d(t, [1, 1, 1, 1, 1, 1])
        yield lambda t=t: a.replication_pad3d(t, [1, 1, 1, 1, 1, 1])
    q = torch.rand(2, 5, 4, 8)
    heads = q.transpose(1, 2)  # as attention layers hand it over
    for t in (q, heads, q.bfloat16()):
        out, lse = a._scaled_dot_product_flash_attention_for_cpu(t, t, t)
        yield lambda t=t: a._scaled_dot_product_flash_attention_for_cpu(t, t, t, 0.0, True)
        yield lambda t=t, out=out, lse=lse: a._scaled_dot_product_flash_attention_for_cpu_backward(
            out, t, t, t, out, lse, 0.0, False
        )
    tensors, others = [x, y, z], [y, x, z]
    f = torch.ops.aten
    for name in ("add", "sub", "mul", "div", "maximum", "minimum", "clamp_min", "pow"):
        op = getattr(f, "_foreach_" + name)
        yield lambda op=op: op.List(tensors, others)
        yield lambda op=op: op.Scalar(tensors, 2)
        yield lambda op=op: op.ScalarList(tensors, [1.0, 2.0, 3.0])
    for name in ("add", "mul", "div"):
        yield lambda op=getattr(f, "_foreach_" + name): op.Tensor(tensors, torch.tensor(2.0))
    for name in ("addcmul", "addcdiv"):
        op = getattr(f, "_foreach_" + name)
        yield lambda op=op: op.Scalar(tensors, others, tensors, 2)
        yield lambda op=op: op.ScalarList(tensors, others, others, [1.0, 2.0, 3.0])
        yield lambda op=op: op.Tensor(tensors, others, others, torch.ones(3))
    yield lambda: f._foreach_lerp.List(tensors, others, tensors)
    yield lambda: f._foreach_lerp.Scalar(tensors, others, 0.5)
    yield lambda: f._foreach_norm(tensors)
    yield lambda: f._foreach_max(tensors)
    yield lambda: f._foreach_add_.Scalar([x.clone(), y.clone()], 1)
    for (
        name
    ) in "exp sqrt rsqrt reciprocal log log1p sin tanh sigmoid erf abs neg floor round sign trunc lgamma".split():
        yield lambda op=getattr(f, "_foreach_" + name): op.default(tensors)
        yield lambda op=getattr(f, "_foreach_" + name): op.default([y.double(), y.bfloat16()])


@pytest.mark.parametrize("number", range(len(list(direct_calls()))))
def test_direct_calls(number):
    call = list(direct_calls())[number]
    recorder = Recorder()
    with recorder:
        call()
    assert not recorder.failures, recorder.failures[0]
    assert recorder.checked and not recorder.missing, recorder.missing


ALIKE = [  # sizes and strides that look like more than one memory format
    ((2, 16, 1, 1), (16, 1, 16, 16)),
    ((1, 8, 1, 1), (8, 1, 8, 8)),
    ((1, 8, 4, 4), (128, 1, 32, 8)),
    ((2, 1, 4, 4), (16, 1, 4, 1)),
    ((2, 8, 1, 4), (32, 1, 32, 8)),
    ((2, 8, 1), (8, 1, 8)),
    ((2, 8, 1, 1, 1), (8, 1, 8, 8, 8)),
    ((2, 8, 4, 4), (128, 1, 8, 32)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes, strides", ALIKE)
def test_formats_that_look_alike(sizes, strides, dtype):
    x = torch.empty_strided(sizes, strides, dtype=dtype).normal_().requires_grad_()
    channels, dims = sizes[1], len(sizes) - 2
    weight = torch.ones(channels, channels, *[1] * dims, dtype=dtype, requires_grad=True)
    scale, mean, variance = (torch.ones(channels, dtype=dtype) for _ in range(3))
    recorder = Recorder()
    with recorder:
        for y in (
            F.batch_norm(x, mean, variance, scale, scale, training=False),
            F.batch_norm(x, mean, variance, scale, scale, training=x[:, 0].numel() > 1),
            F.group_norm(x, 1, scale, scale),
            [F.conv1d, F.conv2d, F.conv3d][dims - 1](x, weight),
            [F.max_pool1d, F.max_pool2d, F.max_pool3d][dims - 1](x, 1),
            F.interpolate(x, scale_factor=2),
        ):
            y.backward(torch.ones_like(y), retain_graph=True)
            y.backward(torch.ones(y.shape, dtype=dtype))
    assert not recorder.failures, recorder.failures[0]


@pytest.mark.parametrize(
    "window",
    [
        lambda n: torch.hann_window(n),
        lambda n: torch.hann_window(n, False, dtype=torch.float64),
        lambda n: (
            torch.hamming_window(n) + torch.hamming_window(n, False, 0.5) + torch.hamming_window(n, True, 0.5, 0.4)
        ),
        lambda n: torch.blackman_window(n) + torch.blackman_window(n, False),
        lambda n: torch.bartlett_window(n) + torch.bartlett_window(n, False),
        lambda n: torch.fft.fftfreq(n) + torch.fft.fftfreq(n, 0.5) + torch.fft.rfftfreq(2 * n - 1, dtype=torch.float64),
        lambda n: torch.kaiser_window(n) + torch.kaiser_window(n, False) + torch.kaiser_window(n, True, beta=9.0),
    ],
)
def test_windows_have_rules(window, capfd):
    def f(x):
        if x.dtype == torch.float64:
            return x * window(16)
        return torch.stft(x, 16, 4, window=window(16).float(), center=False, return_complex=True).abs()

    kiln.set_logs("fallback")
    for x in (torch.randn(64), torch.randn(16, dtype=torch.float64)):
        assert_same(kiln.compile(f, fullgraph=True)(x), f(x))
    assert "dispatcher's Meta kernel" not in capfd.readouterr().err


def test_operators_that_ask_for_a_dtype():
    x = torch.randn(5)
    assert_same(kiln.compile(lambda x: torch.vander(x, 3), fullgraph=True)(x), torch.vander(x, 3))
