"""The backend that `torch.compile(model, backend="kiln")` finds through its entry point."""

from collections.abc import Callable
from typing import Any


def kiln(gm: Any, example_inputs: list[Any], **options: Any) -> Callable[..., Any]:
    """Compiles a graph that PyTorch's own front end captured. options: as kiln.compile's `options`."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    import kiln as package

    # Those that write their code at the first call would do so inside the capture.
    for module in gm.modules():
        _LazyGraphModule.force_recompile(module)
    return package.compile(gm.forward, options=options.get("options"), mode=options.get("mode"))
