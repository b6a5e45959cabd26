"""The commands and their arguments; the work is in the modules next to this one."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False)
console = Console()

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@app.command()
def doctor() -> None:
    """Check this installation, and say what to do about what is wrong."""
    from kiln.cli import doctor as command

    raise typer.Exit(command.run(console))


@app.command()
def bench(
    model: Annotated[
        list[str], typer.Option(help="Model to measure; may be given several times. --list shows them.")
    ] = [],  # noqa: B006
    phase: Annotated[str, typer.Option(help="train or infer")] = "train",
    compilers: Annotated[
        str, typer.Option(help="Comma-separated: eager, torch, torch-max-autotune, torch-freezing, kiln.")
    ] = "eager,torch,kiln",
    suite: Annotated[
        str, typer.Option(help="figures: the published table. quick: on small models. patterns: of small programs.")
    ] = "",
    rounds: Annotated[int, typer.Option(help="Interleaved rounds of each cell.")] = 3,
    size: Annotated[str, typer.Option(help="full or small")] = "full",
    threads: Annotated[int, typer.Option(help="Threads of each cell; 0 for PyTorch's default.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for results.json and the plot.")] = Path("bench-results"),
    only: Annotated[str, typer.Option(help="Run only rows of the suite whose name contains this.")] = "",
    list_: Annotated[bool, typer.Option("--list", help="List the models.")] = False,
) -> None:
    """Measure compilers against each other, each cell in a process of its own."""
    from kiln.bench import models, runner

    if list_:
        console.print("\n".join([*models.names(), *runner.SPECIAL]))
        return
    raise typer.Exit(
        runner.main(
            console, models=model, phase=phase, compilers=compilers.split(","), suite=suite, rounds=rounds, size=size,
            threads=threads, out=out, only=only,
        )
    )  # fmt: skip


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def explain(
    context: typer.Context,
    target: Annotated[str, typer.Argument(help="script.py, or file.py:function (called without arguments).")],
    svg: Annotated[Path | None, typer.Option(help="Folder that receives the captured graphs as SVG.")] = None,
) -> None:
    """Run a program and print every graph, break, guard and stage time. Further arguments go to the script."""
    from kiln.cli import explain as command

    raise typer.Exit(command.run(console, target, context.args, svg))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bisect(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            help="file.py:case, where case() returns (function, args); or `--` and a command that exits with 0 if all is well."
        ),
    ] = "",
    by: Annotated[
        str, typer.Option(help="Comma-separated levels, of function, graph, pass, kernel.")
    ] = "function,graph,pass,kernel",
    rtol: Annotated[float, typer.Option(help="Relative tolerance of file.py:case; -1 for the dtype's.")] = -1.0,
    atol: Annotated[float, typer.Option(help="Absolute tolerance of file.py:case; -1 for the dtype's.")] = -1.0,
) -> None:
    """Find the function, graph, pass and kernel whose result differs from eager."""
    from kiln.cli import bisect as command

    raise typer.Exit(command.run(console, target, context.args, by.split(","), rtol, atol))


@app.command()
def autotune(
    target: Annotated[str, typer.Argument(help="file.py:case, where case() returns (function, args).")],
    backends: Annotated[str, typer.Option(help="Comma-separated backends to time.")] = "eager,aot_eager,kiln",
    calls: Annotated[int, typer.Option(help="Timed calls of each.")] = 30,
) -> None:
    """Time a function under several backends and say which is the fastest."""
    from kiln.cli import autotune as command

    raise typer.Exit(command.run(console, target, backends.split(","), calls))


@app.command()
def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove everything that is kept on disk.")] = False,
) -> None:
    """Show what kiln keeps on disk between processes."""
    from kiln.cli import cache as command

    raise typer.Exit(command.run(console, clear))
