"""Compiled autograd: the whole of a backward as one graph at run time, whatever made its nodes.

```python
with kiln.compiled_autograd.enable(kiln.compile):
    loss.backward()
```

Within the block each `backward()` of the process, and each `torch.autograd.grad`, is looked through when it starts. The formulas
of all its nodes, the hooks on the way and what leaves do with their gradients become one `torch.fx.GraphModule`, which is
given to `compiler_fn`; a backward of the same nodes, sizes and kinds of tensors is not traced again. So graphs of several
compiled parts, or of none, are joined, and hooks are compiled with what is around them. What cannot be traced runs in eager,
which is said once.

The functions `call_...` and `accumulate` stand in these graphs for what is no operator of PyTorch's.
"""

import contextlib
import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kiln import _C
from kiln.exc import BackendError

__all__ = ["disable", "enable"]

# Of compilers that were used last: what each has compiled is kept for the next `with enable(...)`.
_MAX_SESSIONS = 8
_sessions: dict[Any, Any] = {}


@contextlib.contextmanager
def _given_to(session: Any) -> Iterator[None]:
    before = _C.set_backward_session(session)
    try:
        yield
    finally:
        _C.set_backward_session(before)


def enable(
    compiler_fn: Callable[[torch.fx.GraphModule], Callable[..., Any]] | None = None,
) -> contextlib.AbstractContextManager[None]:
    """Compiles the backwards within a `with` block.

    compiler_fn: takes a `torch.fx.GraphModule` and returns a callable; None for `kiln.compile`. The module's forward is
        `forward(inputs, sizes, scalars, hooks, packed_inputs)`: the list of tensors that the backward reads and writes, an
        empty tuple, the numbers that tensors were multiplied by and the like, the hooks and contexts of Python functions, one
        more empty tuple. It returns the gradients that `torch.autograd.grad` asked for; those of leaves it adds to their `.grad`
        itself.

    Raises kiln.exc.BackendError if compiler_fn returns something that cannot be called.
    """
    if compiler_fn is None:
        from kiln import compile as compiler_fn
    return _given_to(_session(compiler_fn))


def disable() -> contextlib.AbstractContextManager[None]:
    """Gives the backwards within a `with` block to PyTorch's engine again."""
    return _given_to(None)


def reset() -> None:
    """Forgets all compiled backwards."""
    _sessions.clear()


def _session(compiler_fn: Any) -> Any:
    session = _sessions.pop(compiler_fn, None) or _C.BackwardSession(compiler_fn)
    _sessions[compiler_fn] = session
    while len(_sessions) > _MAX_SESSIONS:
        del _sessions[next(iter(_sessions))]
    return session


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=3)


def _compile(compiler_fn: Any, gm: torch.fx.GraphModule, kinds: list[str]) -> Callable[..., Any]:
    """What `compiler_fn` makes of a traced backward, whose placeholders are what it takes, one by one.
    kinds: in which of its arguments each is, "inputs" or "scalars"; "" for constants, which it does not take."""
    graph = gm.graph
    taken = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_before(next(iter(graph.nodes))):
        names = ("inputs", "sizes", "scalars", "hooks", "packed_inputs")
        arguments = {name: graph.placeholder(name) for name in names}
    for i, (node, kind) in enumerate(zip(taken, kinds, strict=True)):
        if kind:
            with graph.inserting_before(node):
                item = graph.call_function(operator.getitem, (arguments[kind], kinds[:i].count(kind)))
            if kind == "inputs":
                item.meta = node.meta
            else:
                for user in list(node.users):
                    user.target, user.args, user.kwargs = _OPERATORS[user.target], user.args[:2], {}
            node.replace_all_uses_with(item)
        graph.erase_node(node)
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _TAKE_HOOK:
            with graph.inserting_before(node):
                hook = graph.call_function(operator.getitem, (arguments["hooks"], node.args[0]))
            node.args = (hook, *node.args[1:])
    gm.recompile()
    compiled = compiler_fn(gm)
    if not callable(compiled):
        raise BackendError(
            f"the compiler of compiled autograd returned {type(compiled).__name__}, which cannot be called"
        )
    return compiled


def _laid_out_as(changed: Any, grad: Any) -> Any:
    """What a hook made of a gradient, in the layout of the gradient, as the rest of the graph expects it."""
    if grad is None or changed is None or changed.stride() == grad.stride() or changed.shape != grad.shape:
        return changed
    if 0 in grad.stride():  # expanded: whatever the graph does with that, it can do with all elements in a row
        return changed.contiguous()
    return torch.empty_strided(grad.shape, grad.stride(), dtype=grad.dtype, device=grad.device).copy_(changed)


def call_tensor_hook(hook: Any, grad: torch.Tensor) -> torch.Tensor:
    """The gradient after a hook of Tensor.register_hook."""
    changed = hook(grad)
    return grad if changed is None else _laid_out_as(changed, grad)


def _after_hook(changed: Any, grads: list[Any]) -> Any:
    if changed is None:
        return tuple(grads)
    if not isinstance(changed, tuple):
        changed = (changed,)
    return tuple(_laid_out_as(new, old) for new, old in zip(changed, grads, strict=True))


def call_node_pre_hook(hook: Any, grads: list[Any]) -> Any:
    """What reaches a node after a hook of Node.register_prehook."""
    return _after_hook(hook(tuple(grads)), grads)


def call_node_hook(hook: Any, outputs: list[Any], inputs: list[Any]) -> Any:
    """What a node returns after a hook of Node.register_hook."""
    return _after_hook(hook(tuple(outputs), tuple(inputs)), outputs)


class _Context:
    """The context of a torch.autograd.Function whose saved tensors are those of a graph: the node has given up its own."""

    def __init__(self, ctx: Any, saved_tensors: tuple[Any, ...]):
        self.__dict__["_ctx"] = ctx
        self.__dict__["saved_tensors"] = saved_tensors
        self.__dict__["saved_variables"] = saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ctx, name, value)


def call_function(ctx: Any, wanted: list[Any], saved_tensors: list[Any], grads: list[Any]) -> Any:
    """The gradients that the backward of a torch.autograd.Function returns. wanted: by input, None or (sizes, dtype) of the
    gradient, to which it is made to fit as the engine does it."""
    function = ctx._forward_cls
    backward = function.backward if function.vjp is torch.autograd.Function.vjp else function.vjp
    result = backward(_Context(ctx, tuple(saved_tensors)), *grads)
    if not isinstance(result, tuple):
        result = (result,)
    if [grad is not None for grad in result[: len(wanted)]] != [fit is not None for fit in wanted]:
        raise RuntimeError(
            f"kiln.compiled_autograd: the backward of {function.__name__} returns None for another input than it did the first "
            "time; call this backward under kiln.compiled_autograd.disable()"
        )
    return tuple(
        None if fit is None else grad.sum_to_size(fit[0]).to(fit[1]).contiguous()
        for grad, fit in zip(result, wanted, strict=False)
    )


def accumulate(variable: torch.Tensor, grad: torch.Tensor, strides: list[int] | None) -> None:
    """Adds `grad` to a leaf's gradient; the first is copied into memory of these strides. None: nobody else has `grad`'s
    memory, and it lies as the leaf does."""
    if variable.grad is not None:
        variable.grad.add_(grad)
    elif strides is None:
        variable.grad = grad
    else:
        variable.grad = torch.empty_strided(grad.shape, strides, dtype=grad.dtype, device=grad.device).copy_(grad)


def call_accumulated_hook(hook: Any, variable: torch.Tensor) -> None:
    """Calls a hook of Tensor.register_post_accumulate_grad_hook."""
    hook(variable)


# What takes a number beside a tensor, as Python writes it: it may be another number at each call.
_OPERATORS = {
    torch.ops.aten.add.Tensor: operator.add,
    torch.ops.aten.sub.Tensor: operator.sub,
    torch.ops.aten.mul.Tensor: operator.mul,
    torch.ops.aten.div.Tensor: operator.truediv,
}
_TAKE_HOOK = {call_tensor_hook, call_node_pre_hook, call_node_hook, call_function, call_accumulated_hook}
