"""Ahead-of-time tracing: a function's forward and backward as two graphs of ATen operators, each given to a compiler.

A compiler is ``f(gm: torch.fx.GraphModule, example_inputs: list[Tensor]) -> callable``. `gm` is functional (changes of inputs stand
as ``copy_`` calls at its end); `example_inputs` are tensors without data that have the true shapes, strides, dtypes and
devices. The callable takes the graph's inputs as positional tensors, or as one list if it was made by `make_boxed_func`
(it may then empty the list to free inputs early), and returns the graph's outputs as a tuple or list.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from kiln import _C
from kiln.exc import Unsupported, UserError

__all__ = [
    "aot_function",
    "aot_module",
    "aot_module_simplified",
    "default_partition",
    "make_boxed_func",
    "min_cut_partition",
]

Compiler = Callable[[torch.fx.GraphModule, list[torch.Tensor]], Callable[..., Any]]


def make_boxed_func(f: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """`f(*args)` as a function of one list of arguments, marked as such for the callers of compiled graphs."""

    def boxed(args: list[Any]) -> Any:
        return f(*args)

    boxed._boxed_call = True
    return boxed


def default_partition(*args: Any, **kwargs: Any) -> Any:
    """Names the partition that keeps all that the backward reads. To be passed as `partition_fn`, not called."""
    raise UserError("default_partition is passed as partition_fn, not called")


def min_cut_partition(*args: Any, **kwargs: Any) -> Any:
    """Names the partition that keeps few bytes and computes cheap values again. To be passed as `partition_fn`, not called."""
    raise UserError("min_cut_partition is passed as partition_fn, not called")


def _partition_name(partition_fn: Callable[..., Any]) -> str:
    if partition_fn is default_partition:
        return "default"
    if partition_fn is min_cut_partition:
        return "min_cut"
    raise UserError("partition_fn must be kiln.aot.default_partition or kiln.aot.min_cut_partition")


class _Flat:
    """A function of a pytree as one of its tensors: which leaves these are, and what it returned besides tensors."""

    def __init__(self, fn, leaves, spec):
        self.fn, self.spec = fn, spec
        self.leaves = [None if isinstance(v, torch.Tensor) else v for v in leaves]
        self.positions = [i for i, v in enumerate(leaves) if isinstance(v, torch.Tensor)]
        self.out_leaves, self.out_positions, self.out_spec = [], [], None

    def tensors(self, leaves):
        return [leaves[i] for i in self.positions]

    def __call__(self, *tensors):
        leaves = list(self.leaves)
        for i, tensor in zip(self.positions, tensors, strict=True):
            leaves[i] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        out, self.out_spec = pytree.tree_flatten(self.fn(*args, **kwargs))
        self.out_positions = [i for i, v in enumerate(out) if isinstance(v, torch.Tensor)]
        self.out_leaves = [None if isinstance(v, torch.Tensor) else v for v in out]
        return [out[i] for i in self.out_positions]


class _Traced:
    """One compiled variant of a function of a pytree."""

    def __init__(self, fn, leaves, spec, fw_compiler, bw_compiler, partition):
        # The compiled function holds what it was made of, which must not hold it: no collector sees through it.
        self.flat = _Flat(fn, leaves, spec)
        self.call = _C.aot_compile(self.flat, self.flat.tensors(leaves), fw_compiler, bw_compiler, partition)

    def __call__(self, leaves):
        flat = self.flat
        out = list(flat.out_leaves)
        for i, tensor in zip(flat.out_positions, self.call(flat.tensors(leaves)), strict=True):
            out[i] = tensor
        return pytree.tree_unflatten(out, flat.out_spec)


def _key(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (leaf.dtype, leaf.device, tuple(leaf.shape), leaf.stride(), leaf.requires_grad, leaf.is_leaf, type(leaf))
    return (type(leaf), leaf)


def aot_function(
    fn: Callable[..., Any],
    fw_compiler: Compiler | None = None,
    bw_compiler: Compiler | None = None,
    partition_fn: Callable[..., Any] = default_partition,
    decompositions: Any = None,
    inference_compiler: Compiler | None = None,
) -> Callable[..., Any]:
    """`fn` with its tensor program compiled ahead of time, forward and backward.

    fn: function of any nesting of tensors and constants that reads tensors from its arguments only. It is run once for each new
        combination of shapes, strides, dtypes, requires_grad and constants, on tensors without data.
    fw_compiler, bw_compiler: see the module's text; None stands for kiln's own, bw_compiler defaults to fw_compiler.
    partition_fn: default_partition or min_cut_partition.
    decompositions: accepted for compatibility; graphs hold the operators that PyTorch's autograd uses.
    inference_compiler: used in place of fw_compiler where nothing requires grad.

    Raises kiln.exc.Unsupported for programs whose effects a functional graph cannot hold; what fn raises passes through.
    """
    partition = _partition_name(partition_fn)
    variants: dict[Any, _Traced] = {}

    def compiled(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = (torch.is_grad_enabled(), spec, *map(_key, leaves))
        traced = variants.get(key)
        if traced is None:
            training = torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in leaves)
            forward = fw_compiler if training or inference_compiler is None else inference_compiler
            traced = variants[key] = _Traced(fn, leaves, spec, forward, bw_compiler, partition)
        return traced(leaves)

    compiled.__wrapped__ = fn
    return compiled


class _State:
    """A module's parameters and buffers, each tensor once, with the places where it stands."""

    def __init__(self, module: torch.nn.Module):
        self.tensors: list[torch.Tensor] = []
        self.places: list[tuple[dict[str, Any], str, int]] = []
        seen: dict[int, int] = {}
        for child in module.modules():
            for table in (child._parameters, child._buffers):
                for name, tensor in table.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in seen:
                        seen[id(tensor)] = len(self.tensors)
                        self.tensors.append(tensor)
                    self.places.append((table, name, seen[id(tensor)]))

    def call(self, module: torch.nn.Module, tensors: Sequence[torch.Tensor], args: Any, kwargs: Any) -> Any:
        """Calls the module with `tensors` in the places of its own, and puts those back."""
        for table, name, i in self.places:
            table[name] = tensors[i]
        try:
            out = module(*args, **kwargs)
            for table, name, i in self.places:
                if table.get(name) is not tensors[i]:
                    raise UserError(
                        f"the module assigns its parameter or buffer '{name}' anew; change it in place instead"
                    )
            return out
        finally:
            for table, name, i in self.places:
                table[name] = self.tensors[i]


class _AotModule(torch.nn.Module):
    def __init__(self, module: torch.nn.Module, **options: Any):
        super().__init__()
        self.module = module

        def functional(tensors, args, kwargs):  # holds nothing of self: see _Traced
            return _State(module).call(module, tensors, args, kwargs)

        self.__dict__["run"] = aot_function(functional, **options)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["run"](_State(self.module).tensors, args, kwargs)


def aot_module(
    mod: torch.nn.Module,
    fw_compiler: Compiler | None = None,
    bw_compiler: Compiler | None = None,
    partition_fn: Callable[..., Any] = default_partition,
    decompositions: Any = None,
    inference_compiler: Compiler | None = None,
) -> torch.nn.Module:
    """A module that runs `mod`, compiled as by aot_function; parameters and buffers are inputs of its graphs. Arguments as there."""
    return _AotModule(
        mod,
        fw_compiler=fw_compiler,
        bw_compiler=bw_compiler,
        partition_fn=partition_fn,
        decompositions=decompositions,
        inference_compiler=inference_compiler,
    )


def aot_module_simplified(
    mod: torch.nn.Module,
    args: Sequence[torch.Tensor],
    fw_compiler: Compiler | None = None,
    bw_compiler: Compiler | None = None,
    partition_fn: Callable[..., Any] = default_partition,
    decompositions: Any = None,
    inference_compiler: Compiler | None = None,
    **ignored: Any,
) -> Callable[..., Any]:
    """Compiles `mod` for inputs like `args` at once: what a backend calls on the graph that it was given.

    mod: a module or GraphModule that takes tensors. args: example inputs, real or without data. Returns a callable of such
    inputs that returns what `mod` returns and trains with autograd; the inputs' shapes are not checked again. Other arguments
    as in aot_function. Among `args` may be torch.SymInt, sizes that are left open: the compilers are called then for each
    combination of shapes and ints when it comes, as by aot_function.
    """
    state = _State(mod)
    num_state = len(state.tensors)

    def functional(*tensors: torch.Tensor) -> Any:
        return state.call(mod, tensors[:num_state], tensors[num_state:], {})

    if any(isinstance(v, torch.SymInt) for v in args):
        run = aot_function(functional, fw_compiler, bw_compiler, partition_fn, decompositions, inference_compiler)

        def traced_when_it_comes(*inputs: Any) -> Any:
            try:
                return run(*state.tensors, *inputs)
            except Unsupported as error:  # nothing has run yet
                warnings.warn(f"kiln: {type(mod).__name__} runs in eager: {error}", stacklevel=2)
                return mod(*inputs)

        return traced_when_it_comes
    leaves, spec = pytree.tree_flatten(((*state.tensors, *args), {}))
    training = torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in leaves)
    forward = fw_compiler if training or inference_compiler is None else inference_compiler
    traced = _Traced(functional, leaves, spec, forward, bw_compiler, _partition_name(partition_fn))

    def compiled(*inputs: torch.Tensor) -> Any:
        return traced([*state.tensors, *inputs])

    return compiled
