"""`python -m kiln explain`: run a program and show what was captured of it."""

import runpy
import sys
from pathlib import Path

from rich.console import Console

from kiln.cli import targets
from kiln.drawing import save_svg
from kiln.explanation import Explanation, recording


def run(console: Console, target: str, args: list[str], svg: Path | None) -> int:
    status = 0
    with recording() as record:
        if ":" in target and not Path(target).is_file():
            function = targets.load(target)
            import kiln

            kiln.compile(function)() if not isinstance(function, kiln._C.CompiledCallable) else function()
        else:
            saved = sys.argv
            sys.argv = [target, *args]
            try:
                runpy.run_path(target, run_name="__main__")
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else 1
            finally:
                sys.argv = saved
    told = Explanation(record.entries)
    console.print(str(told), markup=False, highlight=False)
    if svg is not None:
        svg.mkdir(parents=True, exist_ok=True)
        number = 0
        for entry in told.entries:
            for dot in entry.dot:
                save_svg(dot, svg / f"graph_{number:02d}_{entry.function.replace('<', '').replace('>', '')}.svg")
                number += 1
        console.print(f"{number} graphs drawn in {svg}")
    return status or 0
