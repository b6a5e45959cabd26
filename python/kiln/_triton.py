"""Runs the Triton source that kiln writes with options={"emitter": "triton"}.

kiln's tensors lie in the host's memory, so kernels run in Triton's interpreter: every operation of a program by numpy. It
is slow, and there to check and to read kernels. Triton need not have been imported with TRITON_INTERPRET=1 for that:
the functions of a source are handed to the interpreter one by one, and use no function of Triton that is jitted itself.
"""

import atexit
import importlib.util
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import numpy as np
import torch

try:
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpretedFunction, TensorHandle
    from triton.runtime.jit import JITFunction
except ImportError as error:
    raise ImportError(
        f"emitter=triton needs Triton, which cannot be imported ({error}): pip install triton, or set emitter=llvm"
    ) from error

_lock = threading.RLock()  # the interpreter keeps the running program in globals
_numbers = itertools.count()


def _folder() -> Path:
    """Where sources lie as files while the process lives: Triton reads a function's text from its file."""
    global _files
    if _files is None:
        _files = TemporaryDirectory(prefix="kiln-triton-")
        atexit.register(_files.cleanup)
    return Path(_files.name)


_files: TemporaryDirectory | None = None


def execute(source: str) -> ModuleType:
    """The source as a module, its functions as @triton.jit makes them."""
    name = f"kernels_{next(_numbers)}"
    path = _folder() / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"kiln._triton.{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load(source: str, kernels: list[dict[str, Any]]) -> list[Callable[[list[torch.Tensor]], int]]:
    """Functions that run the source's kernels on flat tensors over their buffers, and return an error's number or 0.

    A description has the keys name, points (outer points of each segment), xblock, rblock, scratch (dtype and number of
    elements of one outer point), segmented and fails (whether the kernel takes an error pointer).
    """
    module = execute(source)
    for name, value in vars(module).items():
        if isinstance(value, JITFunction):  # else TRITON_INTERPRET is set
            setattr(module, name, InterpretedFunction(value.fn))
    module.libdevice = Libdevice()
    return [Kernel(getattr(module, k["name"]), **{key: v for key, v in k.items() if key != "name"}) for k in kernels]


@dataclass
class Kernel:
    """One kernel and how it is launched; the fields are those of the description that load() takes."""

    function: InterpretedFunction
    points: list[int]
    xblock: int
    rblock: int
    scratch: list[tuple[torch.dtype, int]]
    segmented: bool
    fails: bool

    def __call__(self, buffers: list[torch.Tensor]) -> int:
        error = torch.zeros(1, dtype=torch.int32, device="cpu")
        blocks = {"XBLOCK": self.xblock} | ({"RBLOCK": self.rblock} if self.rblock else {})
        each = len(buffers) // len(self.points)
        with _lock, _interpreting():
            for k, points in enumerate(self.points):
                programs = -(-points // self.xblock)
                if programs == 0:
                    continue
                arguments = buffers[k * each : (k + 1) * each]
                for dtype, numel in self.scratch:
                    arguments.append(torch.empty(programs * self.xblock * numel, dtype=dtype, device="cpu"))
                arguments += [points] * self.segmented + [error] * self.fails
                self.function[(programs,)](*arguments, **blocks)
        return int(error[0])


# --- the interpreter ---


class Libdevice:
    """CUDA's mathematical functions, as numpy and ATen compute them: the interpreter cannot call the library."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = _OTHER_NAMES.get(name) or getattr(np, name)
        return lambda *args: _elementwise(function, *args)


def _by_torch(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: function(torch.from_numpy(np.array(x))).numpy()


_OTHER_NAMES = {
    "acos": np.arccos,
    "acosh": np.arccosh,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "atanh": np.arctanh,
    "erf": _by_torch(torch.erf),
    "erfc": _by_torch(torch.erfc),
    "lgamma": _by_torch(torch.lgamma),
    "pow": np.power,
}


def _elementwise(function: Callable[..., np.ndarray], *args: Any) -> Any:
    dtype = args[0].dtype
    data = function(*(a.handle.data for a in args))
    is_block = any(a.type.is_block() for a in args)
    return tl.tensor(TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)) if is_block else dtype)


@contextmanager
def _interpreting() -> Iterator[None]:
    """Numbers that overflow say nothing; reductions call their function for whole arrays, where the interpreter does it
    for every element, which takes a hundred times as long; and bools spread over a block stay bools."""
    operations = (
        (interpreter.ReduceOps, "generic_reduce", _reduce),
        (interpreter.ScanOps, "generic_scan", _scan),
        (interpreter.InterpreterBuilder, "create_splat", _splat),
    )
    kept = [getattr(owner, name) for owner, name, _ in operations]
    try:
        for owner, name, ours in operations:
            setattr(owner, name, ours)
        with np.errstate(all="ignore"):
            yield
    finally:
        for (owner, name, _), own in zip(operations, kept):
            setattr(owner, name, own)


def _combine(operation: Any, inputs: tuple[Any, ...], left: list[np.ndarray], right: list[np.ndarray]) -> list[Any]:
    tensors = [operation.to_tensor(d, t.dtype) for d, t in zip(left + right, inputs * 2)]
    result = operation.combine_fn.fn(*tensors)
    return [t.handle.data for t in (result if isinstance(result, tuple) else (result,))]


def _reduce(self: Any, inputs: tuple[Any, ...]) -> list[Any]:
    """Neighbours are put together until one is left; a block's length is a power of two."""
    data = [np.moveaxis(t.handle.data, self.axis, -1) for t in inputs]
    while data[0].shape[-1] > 1:
        data = _combine(self, inputs, [d[..., 0::2] for d in data], [d[..., 1::2] for d in data])
    data = [np.moveaxis(d, -1, self.axis) if self.keep_dims else d[..., 0] for d in data]
    return [self.to_tensor(d, t.dtype) for d, t in zip(data, inputs)]


def _scan(self: Any, inputs: tuple[Any, ...]) -> list[Any]:
    """After each step, an element holds twice as many of those before it."""
    data = [np.moveaxis(t.handle.data, self.axis, -1) for t in inputs]
    length, step = data[0].shape[-1], 1
    while step < length:
        later = _combine(self, inputs, [np.roll(d, step, -1) for d in data], data)
        data = [np.concatenate([d[..., :step], new[..., step:]], -1) for d, new in zip(data, later)]
        step *= 2
    return [self.to_tensor(np.moveaxis(d, -1, self.axis), t.dtype) for d, t in zip(data, inputs)]


def _splat(self: Any, block: Any, scalar: TensorHandle) -> TensorHandle:
    """A comparison of scalars has the operands' dtype in the interpreter, its numbers have their own."""
    return TensorHandle(np.full(block.shape, scalar.data, dtype=scalar.data.dtype), scalar.dtype.scalar)
