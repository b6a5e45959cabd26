"""`file.py:name` arguments of the commands."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer


def load(target: str) -> Callable[..., Any]:
    """The callable `name` of `file.py:name`. Raises typer.BadParameter saying what is wrong."""
    file, _, name = target.rpartition(":")
    if not file or not Path(file).is_file():
        raise typer.BadParameter(f"expected file.py:name with an existing file, got {target!r}")
    path = Path(file).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        raise typer.BadParameter(f"{file} has no callable {name!r}")
    return getattr(module, name)


def load_case(target: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What `case()` of a `file.py:case` gives: a function and its arguments."""
    case = load(target)()
    if not (isinstance(case, tuple) and len(case) == 2 and callable(case[0])):
        raise typer.BadParameter(f"{target} must return (function, args)")
    function, args = case
    return function, tuple(args) if isinstance(args, list | tuple) else (args,)
