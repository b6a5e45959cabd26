"""Helpers for tests of programs that are compiled with kiln."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch


class CompileCounter:
    """A backend that runs graphs as they are and counts them: frame_count graphs with op_count calls in all."""

    def __init__(self) -> None:
        self.frame_count = 0
        self.op_count = 0
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.frame_count += 1
        self.graphs.append(gm)
        self.op_count += sum(node.op.startswith("call") for node in gm.graph.nodes)
        return gm.forward

    def clear(self) -> None:
        self.frame_count = 0
        self.op_count = 0
        self.graphs.clear()


class CompileCounterWithBackend(CompileCounter):
    """As CompileCounter, with the graphs compiled by another backend."""

    def __init__(self, backend: str | Callable[..., Any]) -> None:
        super().__init__()
        self.backend = backend

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
        from kiln import backends

        super().__call__(gm, example_inputs)
        return backends.lookup_backend(self.backend)(gm, example_inputs)


# What float32 sums in another order may differ by, relative and absolute, per type.
TOLERANCES = {
    torch.float64: (1e-9, 1e-9),
    torch.float32: (1.3e-4, 1e-5),
    torch.bfloat16: (2e-2, 2e-2),
    torch.float16: (4e-3, 4e-3),
    torch.complex64: (1.3e-4, 1e-5),
    torch.complex128: (1e-9, 1e-9),
}


def difference(
    a: Any, b: Any, rtol: float | None = None, atol: float | None = None, path: str = "", strides: bool = True
) -> str | None:
    """How two results differ, in one line that names the place, or None if they are the same.

    Tensors are the same if type, dtype, shape, strides (of dimensions longer than 1), device, requires_grad and layout are
    equal and the values close (NaN equals NaN, infinities and zeros with their sign as such). Containers, dataclasses and
    objects with a __dict__ are compared part by part; other values by == and type.

    rtol, atol: 0 and 0 asks for equal bits; by default they follow from the dtype (TOLERANCES).
    """
    where = path or "result"
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return _tensor_difference(a, b, rtol, atol, where, strides)
    if type(a) is not type(b):
        return f"{where}: {type(a).__name__} and {type(b).__name__}"
    if a is b:
        return None
    if isinstance(a, Mapping):
        if list(a.keys()) != list(b.keys()):
            return f"{where}: keys {list(a.keys())} and {list(b.keys())}"
        parts = [(f"{where}[{k!r}]", a[k], b[k]) for k in a]
    elif isinstance(a, list | tuple):
        if len(a) != len(b):
            return f"{where}: lengths {len(a)} and {len(b)}"
        parts = [(f"{where}[{i}]", x, y) for i, (x, y) in enumerate(zip(a, b))]
    elif dataclasses.is_dataclass(a):
        parts = [(f"{where}.{f.name}", getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a)]
    elif isinstance(a, float):
        if (
            a == b
            or (math.isnan(a) and math.isnan(b))
            or math.isclose(a, b, rel_tol=rtol or 1e-5, abs_tol=atol or 1e-6)
        ):
            return None
        return f"{where}: {a!r} and {b!r}"
    else:
        try:
            if bool(a == b):
                return None
        except Exception:
            pass
        if hasattr(a, "__array__"):
            return _tensor_difference(torch.as_tensor(a), torch.as_tensor(b), rtol, atol, where, strides)
        if type(a).__eq__ is object.__eq__ and hasattr(a, "__dict__"):
            parts = [(where + ".__dict__", vars(a), vars(b))]
        else:
            return f"{where}: {a!r} and {b!r}"
    for name, x, y in parts:
        found = difference(x, y, rtol, atol, name, strides)
        if found is not None:
            return found
    return None


def _tensor_difference(a: Any, b: Any, rtol: float | None, atol: float | None, where: str, strides: bool) -> str | None:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return f"{where}: {type(a).__name__} and {type(b).__name__}"
    for what in ("dtype", "shape", "device", "layout", "requires_grad", "is_leaf"):
        x, y = getattr(a, what), getattr(b, what)
        if x != y:
            return f"{where}: {what} {x} and {y}"
    if type(a) is not type(b):
        return f"{where}: {type(a).__name__} and {type(b).__name__}"
    if a.device.type == "meta" or a.layout != torch.strided:
        return None
    if strides and a.numel() > 0:
        x = [s for s, n in zip(a.stride(), a.shape) if n > 1]
        y = [s for s, n in zip(b.stride(), b.shape) if n > 1]
        if x != y:
            return f"{where}: strides {a.stride()} and {b.stride()} for shape {tuple(a.shape)}"
    a, b = a.detach(), b.detach()
    if a.dtype not in TOLERANCES:
        if torch.equal(a, b):
            return None
        return f"{where}: {int((a != b).sum())} of {a.numel()} elements differ"
    default = TOLERANCES[a.dtype]
    rtol = default[0] if rtol is None else rtol
    atol = default[1] if atol is None else atol
    if torch.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True):
        return None
    wide = torch.complex128 if a.dtype.is_complex else torch.float64
    gap = (a.to(wide) - b.to(wide)).abs()
    bad = ~torch.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
    worst = gap[bad & ~gap.isnan()]
    largest = float(worst.max()) if worst.numel() else math.nan
    return f"{where}: {int(bad.sum())} of {a.numel()} elements differ, by up to {largest:.3g} (rtol {rtol:g}, atol {atol:g})"


def same(a: Any, b: Any, tol: float | None = None, *, rtol: float | None = None, atol: float | None = None) -> bool:
    """True if two results are the same (see `difference`). tol sets rtol and atol at once."""
    if tol is not None:
        rtol = atol = tol
    return difference(a, b, rtol, atol) is None


def assert_same(a: Any, b: Any, **tolerances: Any) -> None:
    """Raises AssertionError with the first difference (see `difference`)."""
    found = difference(a, b, **tolerances)
    if found is not None:
        raise AssertionError(found)
