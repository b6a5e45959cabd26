"""`python -m kiln doctor`: what this installation is, and whether it compiles."""

import os
import platform
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.table import Table

from kiln.cli import cache

Check = tuple[str, bool, str, str]  # what, is it well, what was found, what to do otherwise


def cpu_flags() -> set[str]:
    try:
        with open("/proc/cpuinfo") as info:
            for line in info:
                if line.startswith("flags"):
                    return set(line.split(":", 1)[1].split())
    except OSError:
        pass
    return set()


def simd() -> str:
    flags = cpu_flags()
    for flag, name in (("avx512f", "AVX-512"), ("avx2", "AVX2"), ("avx", "AVX"), ("sse2", "SSE2")):
        if flag in flags:
            return name
    return "unknown"


def checks() -> Iterator[Check]:
    import torch

    import kiln
    from kiln import _build_info as build

    yield "python", True, f"CPython {platform.python_version()} (built for {build.PYTHON})", ""
    yield "pytorch", True, f"{torch.__version__} (built for {build.TORCH})", ""
    yield "kiln", True, f"{kiln.__version__}, {build.BUILD_TYPE} build, {os.path.dirname(kiln.__file__)}", ""
    if hasattr(kiln._C, "llvm_info"):
        yield "llvm", True, kiln._C.llvm_info(), ""
    level = simd()
    yield (
        "simd",
        level in ("AVX-512", "AVX2"),
        level,
        "kiln's kernels are made for AVX2 or AVX-512; on this CPU they will be slow",
    )
    yield "threads", True, f"{torch.get_num_threads()} of {os.cpu_count()} cores", ""
    options = [f"{env}={os.environ[env]}" for *_, env, _ in kiln._C.option_table() if env in os.environ]
    yield "options", True, ", ".join(options) or "all at their defaults", ""
    yield (
        "disabled",
        not kiln.config.disable,
        "KILN_DISABLE is set" if kiln.config.disable else "no",
        "unset KILN_DISABLE",
    )
    yield "disk cache", True, cache.describe(), ""
    hook = getattr(kiln._C, "foreign_frame_hook", None)
    if hook is not None:
        yield (
            "frame hook",
            not hook(),
            "another tool's hook is installed" if hook() else "free",
            "kiln passes other frames on to it",
        )
    for name, run in (("inference", compile_inference), ("training", compile_training)):
        yield attempt(name, run)


def attempt(name: str, run: Callable[[], str]) -> Check:
    import kiln

    start = time.perf_counter()
    try:
        with kiln.config.patch(strict=True, disk_cache=False):  # compiles, whatever is on disk
            told = run()
    except Exception as error:
        return (
            name,
            False,
            f"{type(error).__name__}: {error}",
            "this is a bug of kiln's; run again with KILN_LOGS=graph,aot,output_code",
        )
    return (
        name,
        not told,
        told or f"right, first call {1e3 * (time.perf_counter() - start):.0f} ms",
        "a bisect finds the part: python -m kiln bisect",
    )


def compile_inference() -> str:
    import torch

    import kiln
    from kiln.testing import difference

    def f(x, y):
        return torch.softmax(torch.nn.functional.gelu(x) @ y, dim=-1)

    x, y = torch.randn(16, 32), torch.randn(32, 8)
    with torch.no_grad():
        return difference(f(x, y), kiln.compile(f, fullgraph=True)(x, y), 1e-4, 1e-5) or ""


def compile_training() -> str:
    import torch

    import kiln
    from kiln.testing import difference

    def run(compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x):
            optimizer.zero_grad()
            loss = net(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        x = torch.linspace(-1, 1, 32).reshape(4, 8)
        function = kiln.compile(step) if compiled else step
        return [function(x) for _ in range(3)]

    return difference(run(False), run(True), 1e-4, 1e-6) or ""


def run(console: Console) -> int:
    table = Table(show_header=False, box=None, pad_edge=False)
    bad = 0
    try:
        for what, well, found, advice in checks():
            bad += not well
            table.add_row(
                "[green]ok[/]" if well else "[red]bad[/]",
                what,
                found if well or not advice else f"{found}\n-> {advice}",
            )
    finally:
        console.print(table)
    console.print("[green]kiln works here[/]" if not bad else f"[red]{bad} of these need attention[/]")
    sys.stdout.flush()
    return 1 if bad else 0
