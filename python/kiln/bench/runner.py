"""Runs cells of a benchmark side by side and reports ratios.

Every cell (model, phase, compiler) is a process of its own. All cells of a row are started and make their first call one after
the other; then they take turns in short rounds, so that a busy moment of the machine hits them alike. Steady times are
medians over all rounds. A first call is cold: the peer's caches are off, and its cache folder is fresh.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kiln.bench.worker import PRODUCTS

SPECIAL = ["overhead", "layers", "product"]


@dataclasses.dataclass
class Result:
    """One cell's figures; times in seconds, memory in bytes. `error` is set if the cell failed."""

    model: str
    phase: str
    compiler: str
    first: float = 0.0
    times: list[float] = dataclasses.field(default_factory=list)
    memory: int = 0
    peaks: list[tuple[float, float]] = dataclasses.field(default_factory=list)  # per round: step in s, peak in GFLOPS
    error: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.times) if self.times else float("nan")


class Cell:
    """A running worker."""

    def __init__(self, model: str, phase: str, compiler: str, size: str, threads: int) -> None:
        self.result = Result(model, phase, compiler)
        self.cache = tempfile.TemporaryDirectory(prefix="kiln-bench-")
        env = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": self.cache.name,
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
            "KILN_DISK_CACHE": "0",
            "KILN_STRICT": "1",
            "HF_HUB_OFFLINE": "1",
        }
        arguments = {"model": model, "phase": phase, "compiler": compiler, "size": size, "threads": threads}
        self.errors = tempfile.TemporaryFile(mode="w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kiln.bench.worker", json.dumps(arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, env=env,
        )  # fmt: skip

    def read(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        self.process.wait()
        self.errors.seek(0)
        lines = [line for line in self.errors.read().strip().splitlines() if line.strip()]
        self.result.error = (lines or [f"exit status {self.process.returncode}"])[-1][:300]
        return {}

    def ask(self, word: str) -> dict[str, Any]:
        if self.result.error:
            return {}
        try:
            self.process.stdin.write(word + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        return self.read()

    def round(self) -> None:
        answer = self.ask("round")
        self.result.times += answer.get("times", [])
        if answer.get("peak_gflops"):
            self.result.peaks.append((statistics.median(answer["times"]), answer["peak_gflops"]))

    def end(self) -> None:
        self.result.memory = self.ask("end").get("memory", 0)
        self.process.stdin.close()
        self.process.wait()
        self.cache.cleanup()


def run_row(
    console: Console, model: str, phase: str, compilers: list[str], rounds: int, size: str, threads: int
) -> dict[str, Result]:
    """compiler -> its result, measured side by side."""
    cells = {}
    for compiler in compilers:
        with console.status(f"{model} {phase}: first call of {compiler}"):
            cell = Cell(model, phase, compiler, size, threads)
            cell.result.first = cell.read().get("first", 0.0)
            cells[compiler] = cell
    for number in range(rounds):
        for compiler, cell in cells.items():
            with console.status(f"{model} {phase}: round {number + 1} of {rounds}, {compiler}"):
                cell.round()
    for cell in cells.values():
        cell.end()
    return {compiler: cell.result for compiler, cell in cells.items()}


def milliseconds(seconds: float) -> str:
    return (
        f"{seconds * 1e6:.2f} us"
        if seconds < 1e-4
        else f"{seconds * 1e3:.2f} ms"
        if seconds < 1
        else f"{seconds:.2f} s"
    )


def print_row(console: Console, model: str, phase: str, results: dict[str, Result]) -> None:
    base = next(iter(results.values()))
    table = Table("compiler", "first call", "steady (median)", "speed-up", "memory MB", title=f"{model} {phase}")
    for compiler, r in results.items():
        if r.error:
            table.add_row(compiler, f"[red]failed[/]: {r.error}"[:160])
            continue
        speed = f"{base.median / r.median:.2f}x" if not base.error else ""
        table.add_row(compiler, milliseconds(r.first), milliseconds(r.median), speed, f"{r.memory / 2**20:.0f}")
    console.print(table)


@dataclasses.dataclass
class Figure:
    """A published figure: a ratio of two cells and what it has to reach."""

    name: str
    model: str
    phase: str
    metric: str  # "first", "steady", "memory", "peak", "microseconds", "depth"
    against: tuple[str, ...]  # the best (fastest, smallest) of these
    reach: float
    threads: int = 0


TORCH = ("torch", "torch-max-autotune")
FIGURES = [
    *[Figure(f"first call, {m} train", m, "train", "first", ("torch",), 15) for m in ("resnet50", "mlp", "gpt2")],
    Figure("steady train, gpt2", "gpt2", "train", "steady", TORCH, 1.5),
    Figure("steady train, chain", "chain", "train", "steady", TORCH, 1.5),
    Figure("steady train, resnet50", "resnet50", "train", "steady", TORCH, 1.15),
    *[Figure(f"steady train, {m}, against eager", m, "train", "steady", ("eager",), 1) for m in ("gpt2", "chain", "resnet50", "mlp")],
    *[Figure(f"steady inference, {m}", m, "infer", "steady", ("torch",), 1.8) for m in ("gpt2", "vit")],
    Figure("steady inference, resnet50", "resnet50", "infer", "steady", ("torch",), 1.3),
    Figure("steady inference, chain", "chain", "infer", "steady", ("torch",), 1.2),
    *[
        Figure(f"{name}, {kind}, share of peak", "product", f"{name}|{kind}", "peak", (), 0.85)
        for name, *_ in PRODUCTS
        for kind in ("forward", "input gradient", "weight gradient")
    ],
    Figure("(x+1)*2, no grad, against eager", "overhead", "no grad", "steady", ("eager",), 1, threads=1),
    Figure("(x+1)*2, grad, against eager", "overhead", "grad", "steady", ("eager",), 1, threads=1),
    Figure("guards and call, 82 layers, us", "layers", "82", "microseconds", (), 10, threads=1),
    Figure("guards and call, 8 layers, us", "layers", "8", "microseconds", (), 10, threads=1),
    Figure("guards and call, 82 layers, times 8", "layers", "8", "depth", (), 2, threads=1),
    *[Figure(f"peak memory, {m} train", m, "train", "memory", ("eager",), 1) for m in ("resnet50", "gpt2", "chain", "mlp")],
]  # fmt: skip


def pattern_figures() -> list[Figure]:
    """kiln is never slower than eager, within what a busy machine tells."""
    from kiln.bench.patterns import PATTERNS

    return [
        Figure(f"{p.name}, {kind}", "pattern", f"{p.name}|{kind}", "steady", ("eager",), 0.95, threads=1)
        for p in PATTERNS
        for kind in (("infer", "train") if p.gradient else ("infer",))
    ]


MODEL_COMPILERS = {
    "train": ["eager", "torch", "torch-max-autotune", "kiln"],
    "infer": ["eager", "torch", "torch-max-autotune", "torch-freezing", "kiln"],
}


def compilers_for(model: str, phase: str) -> list[str]:
    if model in ("product", "pattern"):
        return ["eager", "kiln"]
    if model in SPECIAL:
        return ["eager", "torch", "kiln"]
    return MODEL_COMPILERS[phase]


# Of these less is better.
COSTS = ("microseconds", "depth")


def value_of(figure: Figure, rows: dict[tuple[str, str], dict[str, Result]]) -> tuple[float, bool] | None:
    """(the figure's value, whether it is reached), None where a cell failed or was not run."""
    results = rows[(figure.model, figure.phase)]
    ours = results.get("kiln")
    others = [results[name] for name in figure.against if name in results and not results[name].error]
    if ours is None or ours.error or (figure.against and not others):
        return None
    if figure.metric == "microseconds":
        value = ours.median * 1e6
    elif figure.metric == "depth":
        deep = rows.get(("layers", "82"), {}).get("kiln")
        if deep is None or deep.error:
            return None
        value = deep.median / ours.median
    elif figure.metric == "peak":
        name = figure.phase.split("|")[0]
        _, m, k, n = next(p for p in PRODUCTS if p[0] == name)
        # Within a round: a host that takes cores away for a while takes them from both.
        gflop = 2.0 * m * k * n / 1e9
        value = statistics.median(gflop / step / peak for step, peak in ours.peaks) if ours.peaks else float("nan")
    elif figure.metric == "memory":
        value = min(r.memory for r in others) / max(ours.memory, 1)
    elif figure.metric == "first":
        value = min(r.first for r in others) / ours.first
    else:
        value = min(r.median for r in others) / ours.median
    return value, value <= figure.reach if figure.metric in COSTS else value >= figure.reach


def main(
    console: Console, models: list[str], phase: str, compilers: list[str], suite: str, rounds: int, size: str, threads: int, out: Path, only: str
) -> int:  # fmt: skip
    rows: dict[tuple[str, str], dict[str, Result]] = {}
    figures = []
    if suite:
        if suite not in ("figures", "quick", "patterns"):
            console.print(f"unknown suite {suite!r}: figures, quick or patterns")
            return 2
        figures = [f for f in (pattern_figures() if suite == "patterns" else FIGURES) if only in f.name]
        if suite == "quick":
            size = "small"
        for figure in figures:
            key = (figure.model, figure.phase)
            if key not in rows:
                rows[key] = run_row(console, *key, compilers_for(*key), rounds, size, figure.threads or threads)
                if suite != "patterns":
                    print_row(console, *key, rows[key])
                save(out, rows, figures, size)
    else:
        for model in models or ["mlp"]:
            rows[(model, phase)] = run_row(console, model, phase, compilers, rounds, size, threads)
            print_row(console, model, phase, rows[(model, phase)])
    failed = sum(bool(r.error) for results in rows.values() for r in results.values())
    if figures:
        print_figures(console, figures, rows)
    path = save(out, rows, figures, size)
    console.print(f"written: {path}" + (f", {plot(out, rows)}" if rows else ""))
    return 1 if failed else 0


def print_figures(console: Console, figures: list[Figure], rows: dict[tuple[str, str], dict[str, Result]]) -> None:
    table = Table("figure", "measured", "to reach", "", title="ratios (higher is better, but for us and times)")
    for figure in figures:
        found = value_of(figure, rows)
        sign = "<=" if figure.metric in COSTS else ">="
        measured = "failed" if found is None else f"{found[0]:.2f}"
        mark = "[red]no[/]" if found is None or not found[1] else "[green]reached[/]"
        table.add_row(figure.name, measured, f"{sign} {figure.reach:g}", mark)
    console.print(table)


def save(out: Path, rows: dict[tuple[str, str], dict[str, Result]], figures: list[Figure], size: str) -> Path:
    import torch

    out.mkdir(parents=True, exist_ok=True)
    cells = [{**dataclasses.asdict(r), "median": r.median} for results in rows.values() for r in results.values()]
    told = []
    for figure in figures:
        if (figure.model, figure.phase) in rows:
            found = value_of(figure, rows)
            told.append({**dataclasses.asdict(figure), "value": found and found[0], "reached": found and found[1]})
    path = out / "results.json"
    path.write_text(
        json.dumps(
            {
                "torch": torch.__version__,
                "threads": torch.get_num_threads(),
                "size": size,
                "cells": cells,
                "figures": told,
            },
            indent=1,
        )
    )
    return path


COLORS = {
    "eager": "#9ca3af",
    "torch": "#f59e0b",
    "torch-max-autotune": "#d97706",
    "torch-freezing": "#b45309",
    "kiln": "#2563eb",
}


def plot(out: Path, rows: dict[tuple[str, str], dict[str, Result]]) -> str:
    """Bars of steady time relative to eager, one group a row, and of first calls. Returns the file's name."""
    try:
        import matplotlib
    except ImportError:
        return "no plot (matplotlib is not installed)"
    matplotlib.use("svg")
    from matplotlib import pyplot

    rows = {key: results for key, results in rows.items() if key[0] not in ("product", "pattern")}
    if not rows:
        return "no plot (of models alone)"
    names = list(dict.fromkeys(c for results in rows.values() for c in results))
    figure, axes = pyplot.subplots(2, 1, figsize=(max(6, 1.6 * len(rows)), 7))
    width = 0.8 / len(names)
    for axis, title, pick in (
        (
            axes[0],
            "steady time, relative to the first compiler (lower is better)",
            lambda r, base: r.median / base.median,
        ),
        (axes[1], "first call, seconds (log scale)", lambda r, base: r.first),
    ):
        for i, name in enumerate(names):
            values = []
            for results in rows.values():
                base = next(iter(results.values()))
                r = results.get(name)
                values.append(pick(r, base) if r is not None and not r.error and base.times else 0.0)
            axis.bar([x + i * width for x in range(len(rows))], values, width, label=name, color=COLORS.get(name))
        axis.set_xticks([x + 0.4 - width / 2 for x in range(len(rows))], [f"{m}\n{p}" for m, p in rows])
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].set_yscale("log")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    path = out / "results.svg"
    figure.savefig(path)
    pyplot.close(figure)
    return str(path)
