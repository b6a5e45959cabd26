"""Kernels as Triton source (emitter=triton), run by Triton's interpreter and compiled for a GPU that need not be there."""

import functools
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kiln
from kiln import _triton
from kiln.testing import assert_same, difference

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 2e-5, torch.float64: 1e-10}


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Names of the kernels that ran. Failures of kernels fail the test: kiln would run the call again in eager."""
    names, failures = [], []
    run = _triton.Kernel.__call__

    def watched(kernel, buffers):
        try:
            names.append(kernel.function.fn.__name__)
            return run(kernel, buffers)
        except BaseException as error:
            failures.append(error)
            raise

    monkeypatch.setattr(_triton.Kernel, "__call__", watched)
    yield names
    assert not failures


def compiled(f):
    return kiln.compile(f, options={"emitter": "triton"}, fullgraph=True)


def check(f, *args, rtol=2e-5, atol=2e-6):
    """Compares values, gradients of the float inputs, and what is written to inputs."""

    def run(g):
        own = [a.detach().clone().requires_grad_(a.requires_grad) if torch.is_tensor(a) else a for a in args]
        result = g(*own)
        leaves = [a for a in own if torch.is_tensor(a) and a.requires_grad]
        outputs = [result] if torch.is_tensor(result) else list(result)
        if leaves:
            sum((o.float() * (torch.arange(o.numel()).view_as(o) % 7 + 1)).sum() for o in outputs).backward()
        return outputs, [a.grad for a in leaves], [a.detach() for a in own if torch.is_tensor(a)]

    assert_same(run(compiled(f)), run(f), rtol=rtol, atol=atol)


def grad(*shape):
    return torch.randn(*shape, requires_grad=True)


# --- pointwise ---

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]


def some(dtype, *shape):
    if dtype == torch.bool:
        return torch.randn(*shape) > 0
    return (torch.randn(*shape) * 20).to(dtype) if dtype != torch.uint8 else torch.randint(0, 255, shape, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pointwise(dtype, launches):
    def f(x, y):
        a = x == y, x < y, torch.where(x > y, x, y), x.flip(0), torch.maximum(x, y), x.to(torch.float32) * 2
        if dtype == torch.bool:
            return *a, x & y, x | y, x ^ y, ~x, x.long() + y
        b = x + y, x * y, x - y, x.clamp(1, 9), x.sign(), x.bool()
        if not dtype.is_floating_point:
            return *a, *b, x & y, x | 5, ~x, x // 7, x % 7, x / 3
        return *a, *b, x / y, x.sigmoid(), x.abs().sqrt(), x.exp(), x.tanh(), x.round(), x.long(), -x

    tolerance = TOLERANCE.get(dtype, 1e-6)
    check(f, some(dtype, 5, 33), some(dtype, 5, 33), rtol=tolerance, atol=tolerance)
    assert launches


def test_broadcasting_and_views():
    check(lambda x, y: (x + y, x.t() * 2, (x + y).permute(1, 0).reshape(-1)[3:40:2]), grad(6, 1), grad(1, 9))
    check(lambda x: x.unfold(0, 4, 2) + x[::2, None][:5], grad(12))
    check(lambda x: (x.expand(3, 4, 5) * torch.arange(5)).sum((0, 2)), grad(4, 1))


def test_special_numbers():
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([0.0, -0.0, inf, -inf, nan, 1.5, -2.5, 1e-40, 3e38])
    y = x.flip(0)

    def f(x, y):
        return (
            torch.maximum(x, y),
            torch.fmin(x, y),
            x.clamp(-1, 1),
            -x,
            x.abs(),
            torch.copysign(y, x),
            x.round(),
            x.relu(),
            x.nan_to_num(),
            x // y,
            x % y,
            x.sign(),
            x.amax(),
            x[:4].amin(),
            x.argmax(),
            x[:4].softmax(0),
            x.bfloat16().float(),
            x.half().float(),
            x.isnan() | x.isinf(),
        )

    got, want = compiled(f)(x, y), f(x, y)
    assert_same(got, want, rtol=1e-6, atol=0)
    for a, b in zip(got, want):
        assert torch.equal(a.float().signbit() & ~a.float().isnan(), b.float().signbit() & ~b.float().isnan())


def test_numbers_keep_their_digits():
    def f(x):
        return x * 0.1, torch.where(x > 0.1, x, 0.1), x.clamp(min=0.1), F.pad(x, (1, 1), value=0.1), 0.1 / x

    check(f, torch.randn(9, dtype=torch.float64), rtol=1e-15, atol=0)
    check(lambda i: (i + 2**40, i.clamp(max=-(2**62)), torch.where(i > 2**33, i, 2**35)), torch.tensor([1, 2**34]))


def test_integer_division():
    a = torch.tensor([7, -7, 7, -7, 0, -(2**31)], dtype=torch.int32)
    b = torch.tensor([2, 2, -2, -2, 5, -1], dtype=torch.int32)

    def f(a, b):
        return (
            a // b,
            a % b,
            torch.fmod(a, b),
            torch.div(a, b, rounding_mode="trunc"),
            a.clamp(-9, 9) ** b.abs(),
            a << 3,
            a >> 2,
        )

    check(f, a[:5], b[:5])
    check(lambda a: (a // 5, a % -3, a.byte() // 7), a[:5])
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        compiled(lambda a, b: a // b)(a, b * 0)


# --- reductions ---


@pytest.mark.parametrize("dim", [0, 1, None], ids=["columns", "rows", "all"])
def test_reductions(dim):
    def f(x):
        d = dim if dim is not None else (0, 1)
        one = dim if dim is not None else 0
        return (
            x.sum(d),
            x.mean(d),
            x.amax(d),
            x.amin(d),
            x.var(d),
            x.std(d, correction=0),
            x.logsumexp(d),
            x.prod(one),
            x.argmax(one),
            x.argmin(one),
            x.max(one).values,
            (x > 2).any(one),
            (x > -9).all(one),
            (x > 0).sum(d),
            x.norm(),
        )

    check(f, torch.randn(21, 37))


def test_long_reductions():
    x = torch.randn(3, 5000)
    check(lambda x: (x.sum(1), x.argmax(1), x.var(1), x.softmax(1), x.max()), x, atol=1e-4)
    check(lambda x: (x.sum(), (x != 0).all(), x.cumsum(0)), torch.randint(-9, 9, (2500,)))


def test_sums_of_half_types_and_integers():
    check(lambda x: (x.sum(0), x.mean(1)), torch.randn(9, 40).bfloat16(), rtol=1e-2, atol=1e-2)
    check(lambda x: (x.sum(0), x.prod(0), x.amax()), torch.randint(-5, 9, (6, 7), dtype=torch.int8))


@pytest.mark.parametrize("length", [8, 2100])
def test_scans(length):
    x = torch.randn(2, length) * 0.2 + 1
    check(lambda x: (x.cumsum(1), x.cumsum(0), x.cummax(1).values, x.logcumsumexp(1)), x, atol=1e-3)
    check(lambda x: x.cumprod(1), x[:, :40])


CHAINS = {
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (12,), w, b).relu(), (6, 12), (12,), (12,)),
    "softmax": (lambda x: F.log_softmax(x.softmax(-1) * 3, 0), (5, 9)),
    "gelu": (lambda x: F.gelu(x) + F.silu(x) + F.gelu(x, approximate="tanh") + F.softplus(x), (40,)),
    "batch_norm": (lambda x: F.leaky_relu(F.batch_norm(x, None, None, training=True)), (3, 4, 5, 5)),
    "group_norm": (lambda x, w: F.group_norm(x, 2, w), (2, 4, 6), (4,)),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True).exp(), *[(1, 2, 5, 4)] * 3),
    "losses": (lambda x, y: F.mse_loss(x, y) + F.huber_loss(x, y) + F.l1_loss(x, y), (4, 5), (4, 5)),
    "pools": (lambda x: F.max_pool2d(x, 3, 2, 1) + F.avg_pool2d(x, 2), (1, 2, 8, 8)),
    "resize": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear") * 2, (1, 2, 3, 3)),
    "pads": (lambda x: F.pad(F.pad(x, (1, 2, 0, 1), mode="reflect"), (2, 1), value=0.5), (1, 2, 4, 4)),
    "joins": (lambda x, y: torch.cat([x * 2, y.exp(), x[:1]], 0), (3, 4), (2, 4)),
    "masks": (lambda x: torch.where(x > 0, x, x.exp()).tril().masked_fill(x > 1, 0.5), (6, 6)),
}


@pytest.mark.parametrize("case", CHAINS)
def test_forward_and_backward(case, launches):
    f, *shapes = CHAINS[case]
    check(f, *(grad(*s) for s in shapes), rtol=1e-4, atol=1e-5)
    assert launches


# --- places that data decides ---


def test_gathers_and_scatters():
    x, i = grad(9, 4), torch.tensor([3, 0, -1, 3, 8])
    check(lambda x, i: x[i] * 2, x, i)
    check(lambda x, i: F.embedding(i.abs(), x).sin(), x, i)
    check(lambda x, i: x.gather(0, i.abs()[:, None].expand(5, 4)), x, i)
    check(lambda x, i: x.index_add(0, i.abs(), x[:5] * 3), x, i)
    check(lambda x, i: x.scatter_add(0, i.abs()[:, None].expand(5, 4), x[:5]), x, i)
    check(lambda x, i: torch.zeros(9).index_put((i,), x[:5, 0], accumulate=True), x, i)
    check(lambda i: torch.bincount(i.abs(), minlength=9) + torch.zeros(9).scatter(0, i.abs(), 2.0), i)


def test_wrong_indices_raise():
    x, i = torch.randn(4), torch.tensor([1, 9])
    with pytest.raises(IndexError, match="out of"):
        compiled(lambda x, i: x[i] * 2)(x, i)
    assert_same(compiled(lambda x, i: x[i] * 2)(x, i % 4), x[i % 4] * 2)


def test_sums_without_atomic_addition_are_llvms(capfd):
    kiln.set_logs("fallback")
    x, i = torch.ones(4, dtype=torch.int8), torch.tensor([1, 1])
    f = compiled(lambda x, i: x.index_add(0, i, x[:2]) * 2)
    assert_same(f(x, i), x.index_add(0, i, x[:2]) * 2)
    assert "LLVM's, not Triton's" in capfd.readouterr().err


# --- models ---


class Block(nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inside, outside, 3, 2, 1, bias=False), nn.BatchNorm2d(outside)
        self.conv2, self.norm2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside)
        self.skip = nn.Conv2d(inside, outside, 1, 2)

    def forward(self, x):
        y = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return (y + self.skip(x)).relu()


class Resnet(nn.Sequential):
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-2)

    def __init__(self):
        super().__init__(Block(3, 4), Block(4, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))

    def batch(self):
        return torch.randn(2, 3, 8, 8), torch.randint(5, (2,))


class Gpt(nn.Module):
    # Not Adam: the gradient of an attention's key bias is rounding errors alone, which it scales up.
    optimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, 8), nn.Embedding(6, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, F.gelu, batch_first=True, norm_first=True)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11)

    def forward(self, i):
        x = self.tokens(i) + self.places(torch.arange(i.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(i.shape[1])
        return self.head(self.norm(self.layer(x, mask, is_causal=True))).flatten(0, 1)

    def batch(self):
        return torch.randint(11, (2, 6)), torch.randint(11, (12,))


@pytest.mark.parametrize("model", [Resnet, Gpt])
def test_two_training_steps(model, launches):
    def losses(step_of):
        torch.manual_seed(0)
        network = model()
        optimizer = model.optimizer(network.parameters())

        def step(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(network(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            return loss.detach()

        step = step_of(step)
        values = [step(*network.batch()).item() for _ in range(2)]
        return values, [p.detach().clone() for p in network.parameters()]

    assert_same(losses(compiled), losses(lambda f: f), rtol=1e-3, atol=1e-4)
    assert launches


# --- the loop IR: each opcode and reduction on numbers that operators get wrong, against the IR's own interpreter ---

NAMES = dict(zip(DTYPES, ["b8", "u8", "i8", "i16", "i32", "i64", "f16", "bf16", "f32", "f64"]))
OPCODES = Path(__file__).parents[2] / "csrc" / "loops" / "opcodes.def"
INF, NAN = float("inf"), float("nan")


def nasty(dtype):
    if dtype == torch.bool:
        return torch.tensor([False, True])
    if dtype.is_floating_point:
        numbers = [0.0, -0.0, 1, -1, 0.5, -0.5, 2.5, -2.5, 1e-40, 3e4, -3e4, 7.25, INF, -INF, NAN, 0.1, 1e30, -1e-30]
        return torch.tensor(numbers, dtype=torch.float64).to(dtype)
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    return torch.tensor(
        sorted({least, most, most - 1, 0, 1, 2, 3, 7, 100} | ({-1, -2, -7} if least else set())), dtype=dtype
    )


def applies(kind, dtype):
    half = dtype in (torch.float16, torch.bfloat16)
    if kind == "c" or half:
        return kind == "c"
    if dtype == torch.bool:
        return kind == "l"
    return kind == "a" or (kind == "f") == dtype.is_floating_point


def run_loops(buffers, nests, how, fusion=False):
    """Runs nests on copies of (tensor, kind); returns the copies and the kernels' texts."""
    tensors = [t.clone() for t, _ in buffers]
    lines = [f"  buffer b{k} {NAMES[t.dtype]} {t.numel()} {kind}\n" for k, (t, kind) in enumerate(buffers)]
    texts = kiln._C._run_loops("program {\n" + "".join(lines) + "".join(nests) + "}\n", tensors, how, fusion)
    return tensors, texts


def nest(name, extents, outer, stages):
    parts = "".join(
        f"    stage [{inner}] {{\n" + "".join(f"      {line}\n" for line in body) + "    }\n" for inner, body in stages
    )
    return f'  nest "{name}" extents {extents} outer [{outer}] {{\n{parts}  }}\n'


def same_as_interpreter(buffers, nests, **tolerances):
    want, _ = run_loops(buffers, nests, "interpreter")
    got, texts = run_loops(buffers, nests, "triton")
    assert len(texts) == len(nests)
    for k, (w, g) in enumerate(zip(want, got)):
        found = difference(g, w, **tolerances)
        users = [n.splitlines()[0] for n in nests if f"b{k}[" in n]
        assert not found, f"buffer b{k} of {users}: {found}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcodes(dtype):
    pairs = list(itertools.product(nasty(dtype).tolist(), repeat=2))
    a, b = (torch.tensor([p[k] for p in pairs], dtype=dtype) for k in (0, 1))
    buffers, nests = (
        [(a, "input"), (b, "input"), (a.roll(5), "input"), (torch.where(b == 0, torch.ones_like(b), b), "input")],
        [],
    )
    for name, count, kind in re.findall(r"KILN_OPCODE\((\w+), (\d), '(.)'", OPCODES.read_text()):
        if not applies(kind, dtype) or "Scalar" in name:
            continue
        whole = name in ("FloorDiv", "TruncDiv", "Remainder", "Fmod") and not dtype.is_floating_point
        operands = ["b0[i0]", "b3[i0]" if whole else "b1[i0]", "b2[i0]"][: int(count)]
        result = torch.bool if kind == "c" else dtype
        body = [f"%{k} = Load {NAMES[dtype]} {at}" for k, at in enumerate(operands)]
        body.append(f"%{count} = {name} {NAMES[result]} " + ", ".join(f"%{k}" for k in range(int(count))))
        body.append(f"Store {NAMES[result]} b{len(buffers)}[i0] %{count}")
        nests.append(nest(name, [len(pairs)], "i0", [("", body)]))
        buffers.append((torch.zeros(len(pairs), dtype=result), "output"))
    same_as_interpreter(buffers, nests, rtol=1e-6, atol=0)


def test_casts():
    buffers, nests = [(nasty(t), "input") for t in DTYPES], []
    for (k, source), target in itertools.product(enumerate(DTYPES), DTYPES):
        n = buffers[k][0].numel()
        a, b = NAMES[source], NAMES[target]
        body = [f"%0 = Load {a} b{k}[i0]", f"%1 = Cast {b} %0", f"Store {b} b{len(buffers)}[i0] %1"]
        nests.append(nest(f"{a}_{b}", [n], "i0", [("", body)]))
        buffers.append((torch.zeros(n, dtype=target), "output"))
    same_as_interpreter(buffers, nests, rtol=0, atol=0)


REDUCTIONS = {
    "Sum": (1, 1),
    "Prod": (1, 1),
    "Max": (1, 1),
    "Min": (1, 1),
    "Any": (1, 1),
    "All": (1, 1),
    "ArgMax": (2, 2),
    "ArgMin": (2, 2),
    "Welford": (1, 2),
    "WelfordCombine": (3, 2),
    "OnlineSoftmax": (1, 2),
    "OnlineSoftmaxCombine": (2, 2),
}


def reduction_body(op, kind, dtype, at, inner, outputs, place):
    """What reduces or scans b0[at] along the index `inner`, and what stores the results."""
    count, results = REDUCTIONS[kind]
    t = NAMES[dtype]
    body = [f"%0 = Load {t} b0[{at}]"]
    if count == 2:
        body.append(f"%1 = IndexValue i64 {inner}" if "Arg" in kind else f"%1 = ConstFloat {t} 2")
    if count == 3:
        body += [f"%1 = ConstFloat {t} 1.5", f"%2 = ConstFloat {t} 4"]
    body.append(f"%{count} = {op}.{kind} {t} " + ", ".join(f"%{k}" for k in range(count)))
    second = "i64" if "Arg" in kind else t
    if results == 2:
        body.append(f"%{count + 1} = Project {second} %{count} result 1")
    stores = [f"Store {t if k == 0 else second} b{o}[{place}] %{count + k}" for k, o in enumerate(outputs)]
    return body, stores


@pytest.mark.parametrize("length", [1, 29, 1300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool], ids=str)
def test_reduce_kinds(dtype, length):
    x = some(dtype, 3, length).flatten()
    if dtype.is_floating_point:
        x[length // 2], x[2 * length :] = NAN, -0.0
    inner, at = ("i1", f"{length}*i0 + i1") if length > 1 else ("0", "i0")
    buffers, nests = [(x, "input")], []
    for kind, (_, results) in REDUCTIONS.items():
        for op in ("Reduce", "Scan"):
            if dtype != torch.bool and kind in ("Any", "All"):
                continue
            if not dtype.is_floating_point and ("Welford" in kind or "Softmax" in kind):
                continue
            outputs = range(len(buffers), len(buffers) + results)
            place = "i0" if op == "Reduce" else at
            body, stores = reduction_body(op, kind, dtype, at, inner, outputs, place)
            stages = [("i1", body), ("", stores)] if op == "Reduce" else [("i1", body + stores)]
            nests.append(nest(op + kind, [3, length], "i0", stages))
            for k in outputs:
                second = torch.int64 if "Arg" in kind else dtype
                out = torch.zeros(3 if op == "Reduce" else 3 * length, dtype=dtype if k == outputs[0] else second)
                buffers.append((out, "output"))
    tolerance = 1e-4 if dtype == torch.float32 else 1e-9
    same_as_interpreter(buffers, nests, rtol=tolerance, atol=tolerance * length)


# --- source ---


def test_output_code_is_triton(capfd):
    kiln.set_logs("output_code")
    compiled(lambda x: (x * 2.5).softmax(-1))(torch.ones(4, 8))
    text = capfd.readouterr().err
    assert "@triton.jit\ndef " in text and " * 2.5" in text and "omp" not in text


def test_errors_of_kernels():
    index = [("i0", ["%0 = Load i64 b0[i0]", '%1 = Indirect i64 %0 as t0 size 4 wrap "index 7"', "%2 = Load f32 b1[t0]",
                     "StoreAdd f32 b2[0] %2"])]  # fmt: skip
    buffers = [(torch.tensor([1, -4, 3]), "input"), (torch.arange(4.0), "input"), (torch.zeros(1), "output")]
    same_as_interpreter(buffers, [nest("sum", [3], "", index)])
    for wrong in (4, -5, 2**40):
        buffers[0] = torch.tensor([1, wrong, 3]), "input"
        with pytest.raises(RuntimeError, match="index 7"):
            run_loops(buffers, [nest("sum", [3], "", index)], "triton")


POINTERS = dict(zip(DTYPES, ["*i1", "*u8", "*i8", "*i16", "*i32", "*i64", "*fp16", "*bf16", "*fp32", "*fp64"]))

FOR_A_GPU = {
    "chain": (lambda x: F.layer_norm(F.gelu(x), (40,)).softmax(-1).cumsum(-1), lambda: (torch.randn(6, 40),)),
    "long": (lambda x: (x.sum(1), x.argmax(1), x.logcumsumexp(1)), lambda: (torch.randn(2, 1500),)),
    "integers": (lambda x: (x // 3, x % -5, x**2, x.sum(), x << 1, x.bool()), lambda: (torch.arange(9),)),
    "half": (lambda x: (x.exp() + 1, x > 0, x.long(), x.float().sum().bfloat16()), lambda: (torch.ones(9).bfloat16(),)),
    "places": (
        lambda x, i: (x[i], x.index_add(0, i, x[:2]), F.pad(x, (1, 1))),
        lambda: (torch.ones(5), torch.tensor([1, 2])),
    ),
}


@pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="no function is jitted")
@pytest.mark.parametrize("case", FOR_A_GPU)
def test_compiles_for_a_gpu(case, monkeypatch, tmp_path):
    """By Triton's own compiler down to machine code, which checks types, shapes and functions; it does not run."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    load, loaded = _triton.load, []

    def watched(source, kernels):
        loaded.append(source)
        return load(source, kernels)

    compiled_names = []

    def compile_too(kernel, buffers):
        jitted = getattr(_triton.execute(loaded[-1]), kernel.function.fn.__name__)
        arguments = [POINTERS[b.dtype] for b in buffers[: len(buffers) // len(kernel.points)]]
        arguments += [POINTERS[dtype] for dtype, _ in kernel.scratch]
        arguments += ["i32"] * kernel.segmented + ["*i32"] * kernel.fails
        constants = {"XBLOCK": kernel.xblock} | ({"RBLOCK": kernel.rblock} if kernel.rblock else {})
        signature = dict(zip(jitted.arg_names, arguments + ["constexpr"] * len(constants)))
        made = compile(
            ASTSource(jitted, signature, constants), GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False}
        )
        assert made.asm["cubin"]
        compiled_names.append(jitted.__name__)
        return run(kernel, buffers)

    run = _triton.Kernel.__call__
    monkeypatch.setattr(_triton, "load", watched)
    monkeypatch.setattr(_triton.Kernel, "__call__", compile_too)
    f, make = FOR_A_GPU[case]
    args = make()
    assert_same(compiled(f)(*args), f(*args), rtol=1e-4, atol=1e-4)
    assert compiled_names


def in_a_process(code):
    path = os.pathsep.join(sys.path)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )


def test_triton_is_imported_when_it_is_needed():
    code = (
        "import kiln, torch, sys; kiln.compile(lambda x: x * 2 + 1)(torch.ones(3)); assert 'triton' not in sys.modules"
    )
    assert in_a_process(code).returncode == 0


def test_without_triton_it_says_so():
    code = """
import sys, warnings, torch, kiln
sys.modules["triton"] = None
kiln.config.strict = False
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print(kiln.compile(lambda x: x * 2 + 1, options={"emitter": "triton"})(torch.ones(3)))
print(*[w.message for w in caught])
"""
    done = in_a_process(code)
    assert "tensor([3., 3., 3.])" in done.stdout and "pip install triton" in done.stdout, done
