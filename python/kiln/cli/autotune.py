"""`python -m kiln autotune`: the fastest of several backends for one function."""

import statistics
import time

from rich.console import Console
from rich.table import Table

from kiln.cli import targets


def measure(
    function: object, args: tuple[object, ...], backends: list[str], calls: int
) -> dict[str, tuple[float, float]]:
    """backend -> (seconds of the first call, median of the others). The backends take turns, so that a busy moment of the
    machine hits them alike."""
    import kiln

    compiled = {name: function if name == "none" else kiln.compile(function, backend=name) for name in backends}
    first, times = {}, {name: [] for name in backends}
    for name, run in compiled.items():
        start = time.perf_counter()
        run(*args)
        first[name] = time.perf_counter() - start
    for _ in range(calls):
        for name, run in compiled.items():
            start = time.perf_counter()
            run(*args)
            times[name].append(time.perf_counter() - start)
    return {name: (first[name], statistics.median(times[name])) for name in backends}


def run(console: Console, target: str, backends: list[str], calls: int) -> int:
    function, args = targets.load_case(target)
    results = measure(function, args, ["none", *backends], calls)
    best = min(results, key=lambda name: results[name][1])
    table = Table("backend", "first call ms", "median ms", "against none")
    for name, (first, median) in sorted(results.items(), key=lambda item: item[1][1]):
        row = [name, f"{first * 1e3:.2f}", f"{median * 1e3:.3f}", f"{results['none'][1] / median:.2f}x"]
        table.add_row(*row, style="bold" if name == best else None)
    console.print(table)
    console.print(f"fastest: {best}")
    return 0
