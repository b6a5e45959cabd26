"""`python -m kiln bisect`: which part of a program differs from eager.

The program runs again and again in processes of its own, each time with less compiled: only the first n functions, then only
the first n graphs, then without one pass, then only the first n kernels with generated code. A binary search over n finds the
first part whose compilation turns a good run into a bad one.
"""

import os
import subprocess
import sys
from collections.abc import Callable

import typer
from rich.console import Console

from kiln.cli import targets

LIMITS = {"function": "KILN_FUNCTION_LIMIT", "graph": "KILN_GRAPH_LIMIT", "kernel": "KILN_KERNEL_LIMIT"}
LEVELS = ["function", "graph", "pass", "kernel"]


class Program:
    """Something that can be run under an environment and is then good or bad."""

    def __init__(self, command: list[str]) -> None:
        self.command = command
        self.runs = 0

    def run(self, **env: str) -> tuple[bool, str]:
        """(good, stderr) of one run."""
        self.runs += 1
        done = subprocess.run(
            self.command,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            check=False,
        )
        return done.returncode == 0, done.stderr

    def good(self, **env: str) -> bool:
        return self.run(**env)[0]


def counted(stderr: str, unit: str) -> dict[int, str]:
    """number -> name of the units that a run with KILN_LOGS=bisect counted."""
    names = {}
    for line in stderr.splitlines():
        words = line.strip().split(" ", 2)
        if len(words) == 3 and words[0] == unit and words[1].rstrip(":").isdigit():
            names[int(words[1].rstrip(":"))] = words[2].removesuffix(" (refused)")
    return names


def passes(stderr: str) -> list[str]:
    """Names of the passes that a run with KILN_LOGS=bisect reported, in order, each once."""
    found: dict[str, None] = {}
    for line in stderr.splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == "pass":
            found.setdefault(words[1])
    return list(found)


def first_bad(count: int, good: Callable[[int], bool]) -> int:
    """The smallest n in 1..count for which good(n) is false, given that good(count) is false and that goodness ends once."""
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        if good(middle):
            low = middle
        else:
            high = middle
    return high


def run(console: Console, target: str, extra: list[str], by: list[str], rtol: float, atol: float) -> int:
    unknown = [level for level in by if level not in LEVELS]
    if unknown:
        raise typer.BadParameter(f"unknown level {unknown[0]!r}; the levels are {', '.join(LEVELS)}")
    if ":" in target and target.rpartition(":")[0].endswith(".py"):
        program = Program([sys.executable, "-m", "kiln.cli.bisect", target, str(rtol), str(atol)])
    elif target:
        program = Program([target, *extra])
    else:
        raise typer.BadParameter("give file.py:case, or `--` and a command")
    good, stderr = program.run(KILN_LOGS="bisect")
    if good:
        console.print("the program is good: there is nothing to find")
        return 0
    console.print("[red]bad[/]: " + (stderr.strip().splitlines() or ["no message"])[-1], highlight=False)
    if not program.good(KILN_DISABLE="1"):
        console.print("it is bad without kiln too (KILN_DISABLE=1): the fault is elsewhere")
        return 2
    env: dict[str, str] = {}
    for level in [level for level in LEVELS if level in by]:
        if level == "pass":
            search_passes(console, program, env, passes(stderr))
        else:
            search(console, program, level, env, stderr)
    console.print(
        f"{program.runs} runs; the smallest bad setting: " + (" ".join(f"{k}={v}" for k, v in env.items()) or "none")
    )
    return 1


def search(console: Console, program: Program, level: str, env: dict[str, str], stderr: str) -> None:
    names = counted(stderr, level)
    variable = LIMITS[level]
    count = max(names, default=0)
    if count == 0:
        console.print(f"{level}: none was counted")
        return
    if not program.good(**env, **{variable: "0"}):
        console.print(f"{level}: bad with none of {count} compiled, so the fault lies before this level")
        return
    number = first_bad(count, lambda n: program.good(**env, **{variable: str(n)}))
    env[variable] = str(number)
    console.print(f"[bold]{level} {number} of {count}[/]: {names.get(number, '?')}", highlight=False)


def search_passes(console: Console, program: Program, env: dict[str, str], names: list[str]) -> None:
    found = []
    for name in names:
        if program.good(**env, KILN_DISABLE_PASSES=name):
            found.append(name)
    if found:
        console.print(f"[bold]pass[/]: good without {' or without '.join(found)}", highlight=False)
    else:
        console.print("pass: no single pass makes it good when it is left out")


def main(target: str, rtol: float, atol: float) -> int:
    """One run of a case: compares compiled with eager, exits with 0 if they are the same."""
    import copy

    import torch

    import kiln
    from kiln.testing import difference

    function, args = targets.load_case(target)
    # Two copies made together, so that modules inside the function's closure are the only thing shared.
    eager_args, kiln_args = copy.deepcopy(args), copy.deepcopy(args)
    torch.manual_seed(0)
    expected = function(*eager_args)
    torch.manual_seed(0)
    actual = kiln.compile(function)(*kiln_args)
    found = difference(
        (expected, eager_args), (actual, kiln_args), None if rtol < 0 else rtol, None if atol < 0 else atol
    )
    if found:
        print(found, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3])))
