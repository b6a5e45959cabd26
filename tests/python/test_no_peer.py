"""Compiling and running uses nothing of PyTorch's own compiler: no module of it is imported, no frame of it runs."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PROGRAM = textwrap.dedent(
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

    model = sys.argv[1]
    work = models.make(model, "small")
    optimizer = work.optimizer(work.module.parameters())  # makes PyTorch import some of these by itself
    inputs = work.batch(0)
    # The same program in eager first: what PyTorch itself imports and runs for it is not kiln's doing.
    eager_frames = set()
    ours_frames = set()
    seen = eager_frames

    def watch(frame, event, arg):
        if event == "call" and any(f in frame.f_code.co_filename for f in FOLDERS):
            seen.add((frame.f_code.co_filename, frame.f_code.co_name))

    sys.setprofile(watch)
    models.training_step(work, optimizer)(*inputs)
    work.infer(*inputs)
    before = {m for m in sys.modules if of_peer(m)}
    seen = ours_frames
    step = kiln.compile(models.training_step(work, optimizer))
    loss = kiln.compile(work.loss)
    infer = kiln.compile(work.infer)
    for _ in range(3):
        step(*inputs)
        loss(*inputs).backward()
        with torch.no_grad():
            infer(*inputs)
    sys.setprofile(None)
    added = {m for m in sys.modules if of_peer(m)} - before
    assert not added, f"imported: {sorted(added)}"
    # Frames that eager runs too (an optimizer's wrappers) are the program's own.
    extra = ours_frames - eager_frames
    assert not extra, f"ran: {sorted(extra)}"
    print("clean")
    """
)


@pytest.mark.parametrize("model", ["mlp", "chain", "resnet18", "lstm", "gpt2"])
def test_compile_imports_and_runs_nothing_of_the_peer(model, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    package = Path(__file__).resolve().parent.parent.parent / "python"
    done = subprocess.run(
        [sys.executable, str(script), model],
        capture_output=True,
        text=True,
        timeout=300,
        env={**__import__("os").environ, "PYTHONPATH": str(package), "KILN_STRICT": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("clean")


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
