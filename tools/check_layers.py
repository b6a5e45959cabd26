"""Checks the one-way order of csrc's folders.

Each folder may include its own headers and those of the folders above it in LAYERS. Pure folders include no PyTorch, no
Python and no LLVM header; LLVM headers are read in codegen/llvm only. Exits with 1 and one line per bad #include.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

CSRC = Path(__file__).resolve().parent.parent / "csrc"


@dataclass(frozen=True)
class Layer:
    """A folder of csrc, in the order of the table: a folder sees the rows above its own."""

    folder: str
    pure: bool = False  # neither PyTorch nor Python nor LLVM
    llvm: bool = False  # may read LLVM's headers


LAYERS = [
    Layer("base", pure=True),
    Layer("symbolic", pure=True),
    Layer("ops", pure=True),
    Layer("graph", pure=True),
    Layer("loops", pure=True),
    Layer("schedule", pure=True),
    Layer("codegen/common", pure=True),
    Layer("codegen/llvm", llvm=True),
    Layer("codegen/cpp", pure=True),
    Layer("codegen/triton", pure=True),
    Layer("aten"),
    Layer("decompose", pure=True),
    Layer("lower", pure=True),
    Layer("joint"),
    Layer("runtime"),
    Layer("backward"),
    Layer("compiler"),
    Layer("python/cpython"),
    Layer("python/guards"),
    Layer("python/capture"),
    Layer("python/frame"),
    Layer("python/bindings"),
]
# Headers that only declare the interface between stages, and may be read from above.
INTERFACES = {"runtime/compiled_graph.h", "python/pch.h", "aten/pch.h", "base/pch.h"}

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
TORCH = re.compile(r"^(ATen|c10|torch|caffe2)/")
PYTHON = re.compile(r"^(Python\.h|pybind11/|internal/pycore|frameobject\.h|structmember\.h|opcode\.h)")
LLVM = re.compile(r"^(llvm|llvm-c)/")


def layer_of(path: str) -> int | None:
    best = None
    for index, layer in enumerate(LAYERS):
        if path.startswith(layer.folder + "/") and (best is None or len(layer.folder) > len(LAYERS[best].folder)):
            best = index
    return best


def problems_in(path: Path) -> list[str]:
    name = path.relative_to(CSRC).as_posix()
    if name in INTERFACES:
        return []
    own = layer_of(name)
    if own is None:
        return [f"csrc/{name}: its folder is not in the layer table of tools/check_layers.py"]
    layer = LAYERS[own]
    found = []
    text = path.read_text()
    if path.suffix == ".h" and "#pragma once" not in text:
        found.append(f"csrc/{name}: no #pragma once")
    for number, line in enumerate(text.splitlines(), 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        header = match.group(2)
        where = f"csrc/{name}:{number}: "
        if header.startswith("."):
            found.append(where + f"{header}: includes are spelled from csrc/")
        if LLVM.match(header) and not layer.llvm:
            found.append(where + f"LLVM header {header} outside codegen/llvm")
        if layer.pure and (TORCH.match(header) or PYTHON.match(header)):
            found.append(where + f"{header} in a pure layer ({layer.folder})")
        if PYTHON.match(header) and not layer.folder.startswith("python/"):
            found.append(where + f"Python header {header} outside csrc/python")
        if match.group(1) == '"' and header not in INTERFACES:
            target = layer_of(header)
            if target is not None and target > own:
                found.append(where + f"{layer.folder} includes {header}, which lies below it")
            if layer.pure and target is not None and not LAYERS[target].pure:
                found.append(where + f"pure layer {layer.folder} includes {header}, which is not pure")
    return found


def main() -> int:
    files = sorted(p for suffix in ("*.h", "*.cpp", "*.def") for p in CSRC.rglob(suffix))
    problems = [problem for path in files for problem in problems_in(path)]
    for problem in problems:
        print(problem)
    print(f"check_layers: {len(files)} files, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
