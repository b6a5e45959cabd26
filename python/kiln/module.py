"""Compiled modules: a wrapper that is a module of the same class and shares the original's state."""

import copy
import inspect
from typing import Any

import torch


class OptimizedModule:
    """Marks what `kiln.compile(module)` returns.

    The wrapper's class derives from the module's own class, and its `__dict__` *is* the module's: parameters, buffers,
    hooks, attributes, `training` and `state_dict()` keys are one and the same, in both directions. Only the call differs, and
    `forward`: they run compiled. `_orig_mod` is the module that was wrapped.
    """

    __slots__ = ()
    _orig_mod: torch.nn.Module

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Not passed on: the user's class must not see (and register) a subclass that is only ours.
        pass

    def __copy__(self) -> "OptimizedModule":
        return wrap(copy.copy(self._orig_mod), self._kiln_compile)

    def __deepcopy__(self, memo: dict[int, Any]) -> "OptimizedModule":
        return wrap(copy.deepcopy(self._orig_mod, memo), self._kiln_compile)

    def __reduce_ex__(self, protocol: int) -> Any:
        return wrap, (self._orig_mod, self._kiln_compile)


class Compiler:
    """The arguments of a kiln.compile call, kept so that copies and unpickled wrappers compile in the same way."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments

    def __call__(self, function: Any) -> Any:
        from kiln import api

        return api.compile_callable(function, **self.arguments)


class CompiledForward:
    """`forward` of a wrapper: that of the module, without its hooks, compiled. The class keeps the plain function."""

    def __init__(self, module: torch.nn.Module, compiler: Compiler) -> None:
        self.cls, self.compiler = type(module), compiler
        self.make(module)

    def make(self, module: torch.nn.Module) -> Any:
        self.function = self.cls.forward
        self.compiled = self.compiler(self.function.__get__(module))
        return self.compiled

    def __get__(self, wrapper: OptimizedModule | None, owner: type) -> Any:
        if wrapper is None:
            return self.cls.forward
        # The class may have got another since.
        return self.compiled if self.cls.forward is self.function else self.make(wrapper._orig_mod)


def wrap(module: torch.nn.Module, compiler: Compiler) -> OptimizedModule:
    """A wrapper of `module` whose call is compiled by `compiler`."""
    if isinstance(module, OptimizedModule):
        module = module._orig_mod
    cls = type(module)
    entry = compiler(module.__call__)
    namespace = {
        "__slots__": ("_kiln_compile", "_kiln_entry", "_orig_mod"),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        # A static method, so that a call reaches the C++ callable with no Python frame between.
        "__call__": staticmethod(entry),
    }
    # A ScriptModule's class has a descriptor that answers for instances alone.
    forward = getattr(cls, "forward", None)
    if inspect.isfunction(forward) and forward is not torch.nn.Module.forward:
        namespace["forward"] = CompiledForward(module, compiler)
    wrapper_class = type(cls)(cls.__name__, (OptimizedModule, cls), namespace)
    # Not by the class's own __new__, which may make something else: fx.GraphModule's makes a class for each instance.
    wrapper = object.__new__(wrapper_class)
    object.__setattr__(wrapper, "__dict__", module.__dict__)
    object.__setattr__(wrapper, "_orig_mod", module)
    object.__setattr__(wrapper, "_kiln_compile", compiler)
    object.__setattr__(wrapper, "_kiln_entry", entry)
    return wrapper


def compile_in_place(module: torch.nn.Module, compiler: Compiler) -> None:
    """Makes calls of `module` itself run compiled; `module(...)`, its class and its attributes stay as they are."""
    module._compiled_call_impl = compiler(module._call_impl)
