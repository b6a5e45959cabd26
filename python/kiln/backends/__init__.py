"""Backends: what turns a captured torch.fx graph into something that runs it.

A backend is `backend(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> callable`; the callable takes the graph's
inputs and returns a tuple or list of its outputs. The default, "kiln", is the C++ pipeline, which needs no fx graph.
"""

from kiln.backends.registry import (
    NATIVE,
    check,
    list_backends,
    lookup_backend,
    register_backend,
    resolve,
    with_options,
)

__all__ = ["NATIVE", "check", "list_backends", "lookup_backend", "register_backend", "resolve", "with_options"]
