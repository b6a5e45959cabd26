"""Records ATen calls of a function as a functional graph's text, so that stages below the joint graph can be tested alone."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

DTYPES = {
    torch.bool: "b8",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.complex64: "c64",
    torch.complex128: "c128",
}
FORMATS = {
    torch.contiguous_format: "contiguous_format",
    torch.preserve_format: "preserve_format",
    torch.channels_last: "channels_last",
    torch.channels_last_3d: "channels_last_3d",
}


class NotText(Exception):
    """The call cannot be written down: an argument of another kind, an op that mutates, a data-dependent result."""


def meta(t: torch.Tensor) -> str:
    """Type text of a tensor: f32[2, 3]<1, 2>+4."""
    sizes = list(t.shape)
    text = f"{DTYPES[t.dtype]}{sizes}"
    row_major, n = [], 1
    for s in reversed(sizes):
        row_major.insert(0, n)
        n *= max(s, 1)
    if list(t.stride()) != row_major:
        text += "<" + ", ".join(map(str, t.stride())) + ">"
    if t.storage_offset():
        text += f"+{t.storage_offset()}"
    return text


class Recorder(TorchDispatchMode):
    """Collects statements; tensors not made by a recorded call become inputs."""

    def __init__(self):
        super().__init__()
        self.lines: list[str] = []
        self.names: dict[int, str] = {}
        self.keep: list[torch.Tensor] = []
        self.inputs: list[torch.Tensor] = []
        self.ops: list[str] = []

    def tensor(self, t: torch.Tensor) -> str:
        if id(t) not in self.names:
            name = f"%in{len(self.inputs)}"
            self.inputs.append(t)
            self.keep.append(t)
            self.names[id(t)] = name
        return self.names[id(t)]

    def arg(self, a) -> str:
        if isinstance(a, torch.Tensor):
            return self.tensor(a)
        if a is None or isinstance(a, bool):
            return str(a)
        if isinstance(a, (list, tuple)):
            return "[" + ", ".join(self.arg(x) for x in a) + "]"
        if isinstance(a, torch.dtype):
            return DTYPES[a]
        if isinstance(a, torch.device):
            return f"device({a.type})"
        if isinstance(a, torch.memory_format):
            return FORMATS[a]
        if isinstance(a, torch.layout):
            return "strided"
        if isinstance(a, int):
            return str(a)
        if isinstance(a, float):
            text = repr(a)
            return text if any(c in text for c in ".en") else text + ".0"
        if isinstance(a, str):
            return '"' + a + '"'
        raise NotText(f"argument {a!r}")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        schema = func._schema
        if schema.is_mutable:
            raise NotText(f"{func} mutates")
        full = []
        for i, formal in enumerate(schema.arguments):
            if i < len(args):
                full.append(args[i])
            elif formal.name in kwargs:
                full.append(kwargs[formal.name])
            else:
                full.append(formal.default_value)
        texts = []
        for formal, a in zip(schema.arguments, full):
            kind = str(formal.real_type if hasattr(formal, "real_type") else formal.type)
            if isinstance(a, int) and "ScalarType" in kind:
                raise NotText("a dtype given as a number")
            texts.append(self.arg(a))
        result = func(*args, **kwargs)
        results = result if isinstance(result, (tuple, list)) else [result]
        if len(schema.returns) == 1 and not isinstance(result, (tuple, list)):
            if not isinstance(result, torch.Tensor):
                raise NotText(f"{func} returns no tensor")
            types_text = meta(result)
        else:
            opening, closing = ("[", "]") if isinstance(result, list) else ("(", ")")
            parts = [
                meta(r) if r is not None and r.numel() >= 0 else "none"
                for r in results
                if r is None or isinstance(r, torch.Tensor)
            ]
            types_text = opening + ", ".join(parts) + closing
        name = f"%v{len(self.lines)}"
        op = schema.name + ("." + schema.overload_name if schema.overload_name else "")
        self.ops.append(op)
        self.lines.append(f"  {name} = {op}({', '.join(texts)}) : {types_text}")
        k = 0
        for r in results:
            if r is None or isinstance(r, torch.Tensor):
                if r is not None:
                    self.names[id(r)] = name if types_text[0] not in "([" else f"{name}#{k}"
                    self.keep.append(r)
                k += 1
        return result


def record(fn, *args, grad=False, **kwargs):
    """Runs fn (with `grad`, its autograd calls are recorded too) and returns (graph text, the graph's inputs, the tensors that fn returned, op names)."""
    recorder = Recorder()
    with torch.set_grad_enabled(grad), recorder:
        result = fn(*args, **kwargs)
    flat = [r for r in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(r, torch.Tensor)]
    outs = [recorder.tensor(r) for r in flat]
    inputs = [f"  input {recorder.names[id(t)]} : {meta(t)}" for t in recorder.inputs]
    text = "\n".join(["graph recorded {", *inputs, *recorder.lines, f"  return ({', '.join(outs)})", "}"])
    return text, recorder.inputs, flat, recorder.ops
