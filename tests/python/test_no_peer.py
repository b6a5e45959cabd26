"""Compiling and running uses nothing of PyTorch's own compiler: no module of it is imported, no frame of it runs."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PROLOGUE = textwrap.dedent(
    """
    import sys
    import torch
    import kiln
    from kiln.bench import models

    PARTS = ("_dynamo", "_inductor", "_functorch", "_decomp", "_refs", "_prims", "_prims_common",
             "fx/experimental/symbolic_shapes", "_subclasses")
    MODULES = tuple("torch." + p.replace("/", ".") for p in PARTS) + ("sympy",)
    FOLDERS = tuple("/torch/" + p for p in PARTS) + ("/sympy/",)

    def of_peer(name):
        return any(name == m or name.startswith(m + ".") for m in MODULES)

    def check(eager, compiled):
        # The same program in eager first: what PyTorch itself imports and runs for it is not kiln's doing.
        seen = set()

        def watch(frame, event, arg):
            if event == "call" and any(f in frame.f_code.co_filename for f in FOLDERS):
                seen.add((frame.f_code.co_filename, frame.f_code.co_name))

        sys.setprofile(watch)
        eager()
        eager_frames = set(seen)
        before = {m for m in sys.modules if of_peer(m)}
        seen.clear()
        compiled()
        sys.setprofile(None)
        added = {m for m in sys.modules if of_peer(m)} - before
        assert not added, f"imported: {sorted(added)}"
        # Frames that eager runs too (an optimizer's wrappers) are the program's own.
        extra = seen - eager_frames
        assert not extra, f"ran: {sorted(extra)}"
        print("clean")
    """
)

MODEL = """
work = models.make(sys.argv[1], "small")
optimizer = work.optimizer(work.module.parameters())  # makes PyTorch import some of these by itself
inputs = work.batch(0)

def eager():
    models.training_step(work, optimizer)(*inputs)
    work.infer(*inputs)

def compiled():
    step = kiln.compile(models.training_step(work, optimizer))
    loss = kiln.compile(work.loss)
    infer = kiln.compile(work.infer)
    for _ in range(3):
        step(*inputs)
        loss(*inputs).backward()
        with torch.no_grad():
            infer(*inputs)

check(eager, compiled)
"""

TRANSFORMS = """
def cubes(x):
    return (x**3).sum() * x[0]

def program(x):
    return torch.func.hessian(cubes)(x), torch.func.vmap(torch.sin)(x), torch.func.jvp(torch.exp, (x,), (x,))

def eager():
    program(torch.ones(3))

def compiled():
    f = kiln.compile(program, fullgraph=True)
    for size in (3, 4):
        f(torch.ones(size))

check(eager, compiled)
"""


OPERATORS = """
import torch.nn.functional as F
from torch.distributions import Categorical, Normal

window = torch.ones(8)

def transforms(x):
    waves = torch.stft(x.flatten(), 8, 2, window=window, return_complex=True)
    return torch.fft.irfft2(torch.fft.rfft2(x) * 2), torch.fft.fft(x, dim=0).abs(), torch.istft(waves, 8, 2, window=window)

def distances(x):
    return torch.cdist(x, x * 2), torch.pdist(x), F.bilinear(x, x, torch.ones(2, 4, 4))

def solutions(x):
    factor = torch.linalg.cholesky(x @ x.T + 10 * torch.eye(4))
    return torch.linalg.solve_triangular(factor, x, upper=False), torch.linalg.matrix_exp(x / 10), torch.linalg.pinv(x)

def unpooled(x):
    return (F.max_unpool2d(*F.max_pool2d(x[None], 2, return_indices=True), 2),)

line = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4))

def normalized(x):
    return (line(x),)

def drawn(x):
    d = Normal(x, x.exp())
    return d.rsample(), d.log_prob(x), Categorical(logits=x).entropy()

def step(f):
    x = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
    sum((t.abs() ** 2).sum() for t in f(x)).backward()

def eager():
    for f in (transforms, distances, solutions, unpooled, normalized, drawn):
        step(f)

def compiled():
    for f in (transforms, distances, solutions, unpooled, normalized, drawn):
        step(kiln.compile(f, fullgraph=True))

check(eager, compiled)
"""

BACKWARDS = """
class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]

def program():
    layer = torch.nn.Linear(4, 4)

    def double(parameter):
        parameter.grad.mul_(2)

    layer.weight.register_post_accumulate_grad_hook(double)
    y = layer(torch.ones(2, 4))
    y.register_hook(lambda grad: grad + 1)
    (Doubled.apply(y) * 2.5).sin().sum().backward()

def compiled():
    for _ in range(3):
        with kiln.compiled_autograd.enable():
            program()

check(program, compiled)
"""


def run(program, tmp_path, *args):
    script = tmp_path / "program.py"
    script.write_text(PROLOGUE + program)
    package = Path(__file__).resolve().parent.parent.parent / "python"
    done = subprocess.run(
        [sys.executable, str(script), *args],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(package), "KILN_STRICT": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("clean")


@pytest.mark.parametrize("model", ["mlp", "chain", "resnet18", "lstm", "gpt2"])
def test_compile_imports_and_runs_nothing_of_the_peer(model, tmp_path):
    run(MODEL, tmp_path, model)


@pytest.mark.parametrize("program", [TRANSFORMS, OPERATORS, BACKWARDS], ids=["transforms", "operators", "backwards"])
def test_programs_import_and_run_nothing_that_eager_does_not(program, tmp_path):
    run(program, tmp_path)


def test_sources_name_nothing_of_the_peer():
    """Only benchmarks (which compare) name the peer's modules."""
    root = Path(__file__).resolve().parent.parent.parent
    names = (
        "torch._dynamo",
        "torch._inductor",
        "torch._functorch",
        "torch._decomp",
        "torch._refs",
        "torch._prims",
        "sympy",
    )
    found = []
    for path in [*(root / "python/kiln").rglob("*.py"), *(root / "csrc").rglob("*.cpp")]:
        if "bench" in path.parts or "demo" in path.parts:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            code = line.split("#")[0].split("//")[0]
            if any(f"import {n}" in code or f"from {n}" in code or f'ImportModule("{n}' in code for n in names):
                found.append(f"{path.relative_to(root)}:{number}: {line.strip()}")
    assert not found, "\n".join(found)


TRAINING = """
import sys
import torch
import kiln

net = torch.nn.Linear(4, 2)
optimizer = getattr(torch.optim, sys.argv[1])(net.parameters(), lr=0.1)

@kiln.compile
def step(x):
    optimizer.zero_grad()
    net(x).square().sum().backward()
    optimizer.step()

before = net.weight.detach().clone()
for _ in range(3):
    step(torch.ones(3, 4))
optimizer.load_state_dict(optimizer.state_dict())
assert not torch.equal(before, net.weight)
assert "torch._dynamo" not in sys.modules and "sympy" not in sys.modules
import torch._dynamo  # what is kept from it is kept from it as before
optimizer.zero_grad()
optimizer.step()
wrapped = torch.optim.Optimizer.zero_grad.__wrapped__
assert "_dynamo" in getattr(wrapped, "__dynamo_disable").__code__.co_filename
print("clean")
"""


HIGHER_ORDER = """
import sys
import torch
import kiln
from torch.nn.attention.flex_attention import flex_attention

x = torch.linspace(-1, 2, 128).reshape(1, 2, 8, 8)
halved = kiln.compile(lambda x: torch.cond(x.sum() > 0, lambda x: x / 2, lambda x: x * 1, (x,)))
doubled = kiln.compile(lambda x: torch.while_loop(lambda x: x.sum() < 1e3, lambda x: (x * 2,), (x,))[0])
attend = kiln.compile(lambda x: flex_attention(x, x, x))
for _ in range(3):
    halved(x), halved(-x), doubled(x), attend(x)
assert "torch._dynamo" not in sys.modules and "sympy" not in sys.modules
print("clean")
"""


def run_alone(program, *args):
    done = subprocess.run([sys.executable, "-c", program, *args], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.strip() == "clean", done.stdout + done.stderr


@pytest.mark.parametrize("optimizer", ["Adam", "SGD", "Adagrad"])
def test_training_does_without_the_peer(optimizer):
    run_alone(TRAINING, optimizer)


def test_higher_order_operators_do_without_the_peer():
    run_alone(HIGHER_ORDER)
