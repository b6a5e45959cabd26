"""Compares the operator table's shape rules with what eager's CPU kernels return, call by call."""

import collections
import warnings

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from kiln import _C

# Results whose strides or values are no rule's business: memory that is not a plain strided tensor.
_PLAIN = {
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
}  # fmt: skip


def _plain(t):
    return (
        t.layout is torch.strided
        and t.device.type == "cpu"
        and t.dtype in _PLAIN
        and not t.is_conj()
        and not t.is_neg()
    )


def _full_args(func, args, kwargs):
    out = []
    for i, a in enumerate(func._schema.arguments):
        if i < len(args):
            out.append(args[i])
        elif a.name in kwargs:
            out.append(kwargs[a.name])
        elif a.has_default_value():
            out.append(a.default_value)
        else:
            raise TypeError(f"{func}: no value for {a.name}")
    return out


def _describe(t, with_offset):
    if t is None:
        return None
    d = (t.dtype, tuple(t.shape), tuple(t.stride()))
    return d + (t.storage_offset(),) if with_offset else d


# Kernels of eager's own that read out of bounds when a saved tensor has other strides than they expect.
_NO_RELAYOUT = (
    "adaptive_max_pool",
    "fractional_max_pool",
    "embedding_bag",
    "ctc_loss",
    "max_unpool",
    "max_pool3d_with_indices_b",
)


class Recorder(TorchDispatchMode):
    """Checks every ATen call below it. `failures`: (op, text); `missing`, `checked`: counts by op."""

    def __init__(self, relayout=False):
        super().__init__()
        self.failures = []
        self.missing = collections.Counter()
        self.checked = collections.Counter()
        self.relayout = relayout
        self.refused = []  # what rules raised

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name + ("." + func._schema.overload_name if func._schema.overload_name else "")
        if not name.startswith("aten::"):
            return func(*args, **kwargs)
        flat, _ = tree_flatten((args, kwargs))
        tensors = [t for t in flat if isinstance(t, torch.Tensor)]
        usable = all(_plain(t) for t in tensors)
        full = None
        inferred = error = None
        has_rule = _C._has_rule(name)
        if usable and has_rule:
            full = _full_args(func, args, kwargs)
            try:
                inferred = _C._infer(name, full)
            except Exception as e:  # noqa: BLE001  compared with what eager does
                error = e
                self.refused.append(e)
        elif usable:
            self.missing[name] += 1
        inputs = [_describe(t, True) for t in tensors]
        out = func(*args, **kwargs)
        if full is not None:
            self.compare(name, full, inputs, inferred, error, out)
            if self.relayout and not func._schema.is_mutable and not any(n in name for n in _NO_RELAYOUT):
                self.relayouts(func, name, args, kwargs)
        return out

    def compare(self, name, full, inputs, inferred, error, out):
        results = [] if out is None else [r for r in tree_flatten(out)[0] if r is None or isinstance(r, torch.Tensor)]
        if not all(_plain(r) for r in results if r is not None):
            return
        if error is not None:
            if type(error).__name__ == "Unsupported":
                self.missing[name + " (" + str(error) + ")"] += 1
            else:
                self.failures.append((name, f"{inputs} {_consts(full)}: rule raised {error!r}"))
            return
        self.checked[name] += 1
        view = any(len(d) > 0 for d in inferred if d) and _is_view(results, full)
        got = [d if d is None or view else d[:3] for d in inferred]
        want = [_describe(r, view) for r in results]
        if got != want:
            self.failures.append((name, f"{inputs} {_consts(full)}: eager {want}, rule {got}"))

    def relayouts(self, func, name, args, kwargs):
        """The same call on inputs of other memory layouts."""
        for kind in ("channels_last", "permuted", "sliced"):
            changed = False

            def other(t, kind=kind):
                nonlocal changed
                if not isinstance(t, torch.Tensor) or t.dim() < 2 or t.numel() == 0:
                    return t
                new = _relayout(t, kind)
                changed |= new.stride() != t.stride()
                return new

            new_args, new_kwargs = torch.utils._pytree.tree_map(other, (args, kwargs))
            if not changed:
                continue
            full = _full_args(func, new_args, new_kwargs)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    out = func(*new_args, **new_kwargs)
            except RuntimeError:
                continue
            inputs = [
                _describe(t, True) for t in tree_flatten((new_args, new_kwargs))[0] if isinstance(t, torch.Tensor)
            ]
            try:
                inferred, error = _C._infer(name, full), None
            except Exception as e:  # noqa: BLE001
                inferred, error = None, e
            self.compare(name, full, inputs, inferred, error, out)


def _relayout(t, kind):
    if kind == "channels_last":
        if t.dim() == 4:
            return t.contiguous(memory_format=torch.channels_last)
        if t.dim() == 5:
            return t.contiguous(memory_format=torch.channels_last_3d)
        return t
    if kind == "permuted":
        return t.transpose(0, -1).contiguous().transpose(0, -1)
    wide = torch.empty((*t.shape[:-1], t.shape[-1] * 2), dtype=t.dtype)[..., ::2]
    return wide.copy_(t)


def _is_view(results, full):
    inputs = [t for t in tree_flatten(full)[0] if isinstance(t, torch.Tensor)]
    storages = {t.untyped_storage()._cdata for t in inputs}
    return bool(results) and all(r is not None and r.untyped_storage()._cdata in storages for r in results)


def _consts(full):
    return [a for a in tree_flatten(full)[0] if not isinstance(a, torch.Tensor)]


def run_sample(op, sample, recorder, backward=True):
    """op(sample) forward, and backward from ones, under the recorder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with recorder:
            out = op(sample.input, *sample.args, **sample.kwargs)
            if not backward:
                return
            outs = [
                t
                for t in tree_flatten(out)[0]
                if isinstance(t, torch.Tensor) and t.requires_grad and (t.is_floating_point() or t.is_complex())
            ]
            if outs:
                torch.autograd.backward(outs, [torch.ones_like(t) for t in outs])
