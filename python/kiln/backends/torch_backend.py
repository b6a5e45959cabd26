"""The backend that `torch.compile(model, backend="kiln")` finds through its entry point."""

from collections.abc import Callable
from typing import Any


def kiln(gm: Any, example_inputs: list[Any], **options: Any) -> Callable[..., Any]:
    """Compiles a graph that PyTorch's own front end captured. options: as kiln.compile's `options`."""
    import kiln as package

    return package.compile(gm.forward, options=options.get("options"), mode=options.get("mode"))
