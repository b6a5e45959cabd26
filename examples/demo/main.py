"""The demo: a ResNet on scanned digits and a small GPT on a text, each trained in eager and in kiln from the same seed.

The two runs of a task take turns, step by step, each in a process of its own. Prints a table and writes demo/report.html: loss
curves of both runs laid over each other, the captured graphs, and the time of each compiler stage. Exits with 1 if the losses
of the two runs differ by more than float tolerance at any step.

Usage: main.py [--steps N] [--out FOLDER]
"""

import argparse
import dataclasses
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

from report import write_report

# Losses are means of float32 sums in another order, and each step feeds its rounding to the next.
RELATIVE, ABSOLUTE = 1e-4, 1e-4


@dataclasses.dataclass
class Run:
    """What one training run gave. Seconds and bytes."""

    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    memory: int = 0
    accuracy: float = 0.0
    graphs: list[str] = dataclasses.field(default_factory=list)
    stages: dict[str, float] = dataclasses.field(default_factory=dict)
    summary: str = ""
    breaks: list[str] = dataclasses.field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds[1:] or self.seconds)


class Worker:
    def __init__(self, task: str, compiler: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "worker.py"), task, compiler],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.run = Run()
        self.hello = self.read()

    def read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a training process ended with status {self.process.wait()}")
        return json.loads(line)

    def ask(self, words: str) -> dict:
        self.process.stdin.write(words + "\n")
        self.process.stdin.flush()
        return self.read()

    def step(self, number: int) -> None:
        told = self.ask(f"step {number}")
        self.run.losses.append(told["loss"])
        self.run.seconds.append(told["seconds"])

    def end(self) -> None:
        told = self.ask("end")
        for name, value in told.items():
            setattr(self.run, name, value)
        self.run.memory = told["memory"] - self.hello["before"]
        self.process.stdin.close()
        self.process.wait()


def train(console: Console, name: str, steps: int | None) -> tuple[str, dict[str, Run]]:
    workers = {compiler: Worker(name, compiler) for compiler in ("eager", "kiln")}
    title = workers["eager"].hello["title"]
    count = min(steps or math.inf, workers["eager"].hello["steps"])
    columns = [
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[told]}"), TimeElapsedColumn()
    ]  # fmt: skip
    with Progress(*columns, console=console) as progress:
        bars = {c: progress.add_task(f"{title}, {c:5}", total=count, told="") for c in workers}
        for number in range(count):
            for compiler, worker in workers.items():
                worker.step(number)
                run = worker.run
                told = f"loss {run.losses[-1]:.4f}  {run.seconds[-1] * 1e3:7.1f} ms"
                progress.update(bars[compiler], advance=1, told=told)
    for worker in workers.values():
        worker.end()
    return title, {compiler: worker.run for compiler, worker in workers.items()}


def first_difference(eager: Run, ours: Run) -> int | None:
    """The first step at which the losses are further apart than float tolerance."""
    for number, (a, b) in enumerate(zip(eager.losses, ours.losses)):
        if not math.isclose(a, b, rel_tol=RELATIVE, abs_tol=ABSOLUTE):
            return number
    return None


def rows(runs: dict[str, Run]) -> list[tuple[str, str, str, str]]:
    """(what, eager, kiln, ratio) of the final table."""
    eager, ours = runs["eager"], runs["kiln"]

    def ratio(a: float, b: float) -> str:
        return f"{a / b:.2f}x" if b else ""

    def ms(seconds: float) -> str:
        return f"{seconds * 1e3:.1f} ms"

    gap = max(abs(a - b) for a, b in zip(eager.losses, ours.losses))
    return [
        ("first step", ms(eager.seconds[0]), ms(ours.seconds[0]), ratio(eager.seconds[0], ours.seconds[0])),
        ("median step", ms(eager.median), ms(ours.median), ratio(eager.median, ours.median)),
        (
            "peak memory",
            f"{eager.memory / 2**20:.0f} MB",
            f"{ours.memory / 2**20:.0f} MB",
            ratio(eager.memory, ours.memory),
        ),
        ("final loss", f"{eager.losses[-1]:.5f}", f"{ours.losses[-1]:.5f}", f"largest gap {gap:.1e}"),
        ("test accuracy", f"{eager.accuracy:.2%}", f"{ours.accuracy:.2%}", ratio(ours.accuracy, eager.accuracy)),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, help="at most so many steps of each task")
    parser.add_argument("--tasks", default="digits,text")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent.parent.parent / "demo")
    arguments = parser.parse_args()
    console = Console()
    results = dict(train(console, name, arguments.steps) for name in arguments.tasks.split(","))
    table = Table("", "", "eager", "kiln", "eager / kiln")
    status = 0
    for title, runs in results.items():
        for number, row in enumerate(rows(runs)):
            table.add_row(title if number == 0 else "", *row)
        table.add_section()
    console.print(table)
    for title, runs in results.items():
        found = first_difference(runs["eager"], runs["kiln"])
        if found is not None:
            a, b = runs["eager"].losses[found], runs["kiln"].losses[found]
            console.print(f"[red]{title}: the losses differ at step {found}: {a:.6f} in eager, {b:.6f} in kiln[/]")
            status = 1
    path = write_report(arguments.out, {title: (runs, rows(runs)) for title, runs in results.items()})
    console.print(f"report: {path}")
    return status


if __name__ == "__main__":
    sys.exit(main())
