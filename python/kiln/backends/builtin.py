"""The backends that come with kiln."""

from collections.abc import Callable
from typing import Any

import torch

from kiln.backends.registry import NATIVE, register_backend


@register_backend(name=NATIVE)
def kiln(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """kiln's own compiler, on an fx graph that another front end made."""
    from kiln import api

    return api.compile(gm.forward)


@register_backend(tags=("debug",))
def eager(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """Runs the captured graph as it is. Tells errors of capture from those of later stages."""
    return gm.forward


@register_backend(tags=("debug",))
def aot_eager(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """Traces forward and backward ahead of time and runs the ATen graphs as they are, without generated code."""
    from kiln import aot

    return aot.aot_module_simplified(gm, example_inputs, fw_compiler=_boxed)


def _boxed(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
    from kiln import aot

    return aot.make_boxed_func(gm.forward)


@register_backend(name="print", tags=("debug",))
def print_graph(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """Prints the captured graph as Python code, and runs it as it is."""
    print(gm.print_readable(print_output=False))
    return gm.forward
