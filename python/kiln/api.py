"""The functions of `kiln` itself: thin, argument-checking fronts of the C++ core."""

import copyreg
import functools
import inspect
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

from kiln import _C, backends, compiled_autograd, exc, module

# The code of what torch.compile makes of a function.
TORCH_WRAPPER = "_TorchDynamoContext.__call__.<locals>.compile_wrapper"
# What each mode changes in the option table. Kernels are chosen by measurement in every mode, so there is little to change.
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "reduce-overhead": {},
    "max-autotune": {},
    "max-autotune-no-cudagraphs": {},
}


def compile(
    f: Callable[..., Any] | None = None,
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    backend: str | Callable[..., Any] = "kiln",
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    disable: bool = False,
) -> Any:
    """Returns a callable that does what `f` does, compiled at its first call with arguments of a new kind.

    Args:
        f: a Python function, a method, a module, or any callable. None (or no f) makes a decorator.
        fullgraph: an error (kiln.exc.GraphBreakError) instead of a graph break.
        dynamic: which sizes one capture serves (docs/concepts.md). True: all; False: those of the call; None: those of the
            call, until another has other ones. Code is compiled for known sizes in each case.
        backend: a registered name (kiln.list_backends()) or `backend(gm: torch.fx.GraphModule, example_inputs) -> callable`.
        mode: "default", "reduce-overhead", "max-autotune" or "max-autotune-no-cudagraphs"; not together with options.
        options: options of the table (docs/options.md) for this callable alone. A backend other than "kiln" is given those
            that are not in the table, as `options=`.
        disable: return f as it is.

    A module gives a module (kiln.OptimizedModule): of the same class, with the same state, attributes, hooks and state_dict
    keys. Whatever cannot be compiled runs as it would have run without kiln.

    Raises:
        kiln.exc.UserError: for an unknown backend, mode or option, or an `f` that cannot be called.
    """
    arguments = checked(fullgraph=fullgraph, dynamic=dynamic, backend=backend, mode=mode, options=options)
    if f is None:
        if disable:
            return lambda function: function
        return functools.partial(compile_any, arguments=arguments)
    if disable:
        return f
    return compile_any(f, arguments)


def compile_in_place(target: torch.nn.Module, **arguments: Any) -> torch.nn.Module:
    """Makes the module's own calls run compiled, and returns the module. Takes kiln.compile's arguments."""
    if not isinstance(target, torch.nn.Module):
        raise exc.UserError(f"compile_in_place takes a torch.nn.Module, not {describe(target)}")
    if unknown := arguments.keys() - {"fullgraph", "dynamic", "backend", "mode", "options"}:
        raise exc.UserError(f"compile_in_place got unknown arguments: {', '.join(sorted(unknown))}")
    module.compile_in_place(target, module.Compiler(checked(**arguments)))
    return target


def checked(
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    backend: str | Callable[..., Any] = "kiln",
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    alone: bool = False,
) -> dict[str, Any]:
    """The arguments of compile_callable for those of kiln.compile. alone: what is compiled is not shared with callables of
    equal arguments, and is forgotten with this one."""
    backend = backends.check(backend)
    own, others = check_options(mode, options, takes_others=backend != backends.NATIVE)
    return {
        "fullgraph": bool(fullgraph),
        "dynamic": dynamic,
        "backend": backends.with_options(backend, others) if others else backend,
        "options": own,
        "alone": alone,
    }


def describe(f: Any) -> str:
    return f"{type(f).__name__} {f!r}"[:200]


def check_options(
    mode: str | None, options: dict[str, Any] | None, takes_others: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options for one callable, checked against the table, and those that its backend alone knows."""
    if mode is not None and options is not None:
        raise exc.UserError("kiln.compile takes mode or options, not both")
    if mode is not None:
        if mode not in MODES:
            raise exc.UserError(f"unknown mode {mode!r}; the modes are {', '.join(MODES)}")
        return dict(MODES[mode]), {}
    known = {row[0]: row[1] for row in _C.option_table()}
    types_ = {"bool": bool, "int": int, "str": str}
    own, others = {}, {}
    for name, value in (options or {}).items():
        if name not in known:
            if not takes_others:
                raise exc.UserError(f"kiln has no option {name!r}; docs/options.md lists them")
            others[name] = value
            continue
        if type(value) is not types_[known[name]]:
            raise exc.UserError(f"option {name!r} takes a value of type {known[name]}, not {value!r}")
        own[name] = value
    return own, others


def _reduce(compiled: Any) -> Any:
    """A compiled callable as pickle and copy take it: by its name, as functions are, or made anew of a copy of what it wraps."""
    found: Any = sys.modules.get(compiled.__module__ or "")
    for name in compiled.__qualname__.split("."):
        found = getattr(found, name, None)
    if found is compiled:
        return compiled.__qualname__
    return compiled._kiln_compile, (compiled.__dict__.get("_kiln_adapted", compiled._kiln_wrapped),)


copyreg.pickle(_C.CompiledCallable, _reduce)


def compile_any(f: Any, arguments: dict[str, Any]) -> Any:
    if isinstance(f, torch.nn.Module):
        return module.wrap(f, module.Compiler(arguments))
    if isinstance(f, type):
        raise exc.UserError(
            f"kiln.compile takes a function, a method or a module, not a class. Compile an instance of {f.__name__}, "
            "or its method."
        )
    if not callable(f):
        raise exc.UserError(f"kiln.compile takes something that can be called, not {describe(f)}")
    return compile_callable(f, **arguments)


def compile_callable(
    f: Any, *, fullgraph: bool, dynamic: bool | None, backend: Any, options: dict[str, Any], alone: bool = False
) -> Callable[..., Any]:
    """The C++ callable for a function, a method or another callable object."""
    if inspect.isgeneratorfunction(f) or inspect.iscoroutinefunction(f) or inspect.isasyncgenfunction(f):
        warnings.warn(
            f"kiln: {getattr(f, '__qualname__', f)} is a generator or coroutine function and runs in eager; compile the "
            "functions that it calls",
            stacklevel=3,
        )
        return f
    target = f = original(f)
    if not is_python(f) or getattr(f, "__func__", None) is torch.autograd.Function.apply.__func__:
        target = adapt(f)
    entry = _C.compile(
        target,
        backend=backends.resolve(backend),
        fullgraph=fullgraph,
        dynamic=dynamic,
        options=options,
        alone=alone,
        name=getattr(f, "__qualname__", type(f).__qualname__),
    )
    if isinstance(target, types.FunctionType) and target is not f:
        entry._kiln_adapted = f
    entry._kiln_compile = module.Compiler(
        {"fullgraph": fullgraph, "dynamic": dynamic, "backend": backend, "options": options, "alone": alone}
    )
    return entry


def is_python(f: Any) -> bool:
    return isinstance(f, types.FunctionType) or (
        isinstance(f, types.MethodType) and isinstance(f.__func__, types.FunctionType)
    )


def adapt(f: Any) -> Callable[..., Any]:
    """A Python function that calls `f`: a builtin, a partial, an instance with __call__."""
    method = getattr(type(f), "__call__", None)  # noqa: B004
    if isinstance(method, types.FunctionType):
        return types.MethodType(method, f)

    def call(*args: Any, **kwargs: Any) -> Any:
        return f(*args, **kwargs)

    for name in ("__name__", "__qualname__", "__doc__", "__module__"):
        value = getattr(f, name, None)
        if isinstance(value, str):
            setattr(call, name, value)
    return call


def original(f: Any) -> Any:
    """What a compiled callable was made of, by kiln or by torch.compile; other callables as they are."""
    if is_compiled(f):
        return f._kiln_wrapped
    if isinstance(f, types.FunctionType) and f.__code__.co_qualname == TORCH_WRAPPER:
        return getattr(f, "_torchdynamo_orig_callable", f)
    return f


def is_compiled(f: Any) -> bool:
    """True for what kiln.compile returned for a function or a method."""
    return isinstance(f, _C.CompiledCallable)


def reset() -> None:
    """Forgets everything that was compiled, all counters and all warnings that were given once."""
    _C.reset()
    _C.reset_bisect()
    compiled_autograd.reset()


def run(f: Callable[..., Any] | None = None) -> Any:
    """A callable that runs `f` with what is compiled already, and compiles nothing new. A decorator without f."""
    if f is None:
        return run
    return _C.run(f)


def disable(f: Callable[..., Any] | None = None, recursive: bool = True) -> Any:
    """A callable that runs `f` in eager, also inside compiled code, where it breaks the graph. With recursive=False the
    functions that `f` calls may be compiled again. A decorator without f. A module is changed in place and returned."""
    if f is None:
        return functools.partial(disable, recursive=recursive)
    if isinstance(f, torch.nn.Module):
        f._compiled_call_impl = _C.disable(f._call_impl, recursive)
        return f
    if isinstance(f, type) or not callable(f):
        raise exc.UserError(f"kiln.disable takes a function, a method or a module, not {describe(f)}")
    return _C.disable(original(f), recursive)


def graph_break() -> None:
    """Ends the graph here when compiled; does nothing otherwise."""
    _C.graph_break()


def is_compiling() -> bool:
    """True while kiln captures the code that asks."""
    return _C.is_compiling()


def allow_in_graph(f: Any) -> Any:
    """Puts calls of `f` into the graph as one node, without looking inside. A list or tuple registers each element."""
    return _register(_C.allow_in_graph, f)


def disallow_in_graph(f: Any) -> Any:
    """Breaks the graph at calls of `f`."""
    return _register(_C.disallow_in_graph, f)


def assume_constant_result(f: Any) -> Any:
    """Calls `f` while capturing, with the tensors of that call, and takes its result as a constant from then on.

    Tensors that the captured code computes cannot be given to it: the graph breaks there.
    """
    return _register(_C.assume_constant_result, f)


def _register(register: Callable[[Any], None], f: Any) -> Any:
    if isinstance(f, list | tuple):
        return type(f)(_register(register, one) for one in f)
    if not callable(f):
        raise exc.UserError(f"expected a callable, not {describe(f)}")
    register(f)
    return f


def mark_dynamic(tensor: torch.Tensor, index: int | list[int] | tuple[int, ...]) -> None:
    """Says that the size of dimension `index` will vary: one capture serves all sizes that take the program the same way."""
    _mark(tensor, index, "_kiln_dynamic_dims", "_kiln_static_dims")


def mark_static(tensor: torch.Tensor, index: int | list[int] | tuple[int, ...] | None = None) -> None:
    """Says that the size of dimension `index` (all of them without index) will not vary."""
    _mark(tensor, range(tensor.dim()) if index is None else index, "_kiln_static_dims", "_kiln_dynamic_dims")


def _mark(tensor: Any, index: Any, to: str, away: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise exc.UserError(f"expected a tensor, not {describe(tensor)}")
    for dim in [index] if isinstance(index, int) else index:
        if not -tensor.dim() <= dim < tensor.dim():
            raise exc.UserError(f"dimension {dim} is out of range for a tensor of {tensor.dim()} dimensions")
        dim %= tensor.dim()
        setattr(tensor, to, getattr(tensor, to, frozenset()) | {dim})
        setattr(tensor, away, getattr(tensor, away, frozenset()) - {dim})


def set_logs(topics: str = "") -> None:
    """Switches log topics as KILN_LOGS does: a comma-separated list (docs/logs.md), "" for none."""
    _C.set_logs(topics)
