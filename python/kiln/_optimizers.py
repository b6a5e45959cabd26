"""Makes optimizers without PyTorch's own compiler.

Methods of torch.optim.Optimizer are wrapped to keep that compiler away from them, and the first call of a wrapper imports
it to do so: a second and 70 MB of memory for everybody who makes an optimizer. A wrapper keeps what it calls then as an
attribute of the wrapped function. While the compiler is not loaded there is nothing to keep away, so that attribute is
the function itself, until somebody loads it.
"""

import sys
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

KEPT = "__dynamo_disable"  # the attribute
COMPILER = "torch._dynamo"  # the module that a wrapper imports


def call_directly() -> None:
    """Lets the wrappers of Optimizer's methods call the methods as long as PyTorch's compiler is not loaded."""
    if COMPILER in sys.modules:
        return
    for wrapper in vars(Optimizer).values():
        wrapped = getattr(wrapper, "__wrapped__", None)
        code = getattr(wrapper, "__code__", None)
        if wrapped is not None and code is not None and KEPT in code.co_consts and not hasattr(wrapped, KEPT):
            setattr(wrapped, KEPT, _direct(wrapper, wrapped))


def _direct(wrapper: Callable[..., Any], wrapped: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if COMPILER not in sys.modules:
            return wrapped(*args, **kwargs)
        wrapped.__dict__.pop(KEPT, None)  # from now on as PyTorch does it
        return wrapper(*args, **kwargs)

    return call
