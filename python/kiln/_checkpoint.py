"""What compiled code has in place of torch.utils.checkpoint.checkpoint."""

from __future__ import annotations

import warnings

import torch
import torch.utils.checkpoint

from kiln import _C
from kiln._comparisons import is_among


def _constant_of(function, words):
    """The text with these words that `function` has, such as a warning."""
    return next(c for c in function.__code__.co_consts if isinstance(c, str) and words in c)


_UNSAID_REENTRANT = _constant_of(torch.utils.checkpoint.checkpoint.__wrapped__, "use_reentrant parameter")
_NO_GRADIENTS = _constant_of(torch.utils.checkpoint.check_backward_validity, "requires_grad")


def _of_reentrant(result, args, differentiable):
    """The result of a reentrant checkpoint, one autograd.Function in eager, unless that gives other tensors."""
    for output in result if isinstance(result, tuple) else (result,):
        if not isinstance(output, torch.Tensor):
            continue
        without_gradient = differentiable and output.is_floating_point() and not output.requires_grad
        if without_gradient or is_among(output, args):
            reason = "a reentrant checkpoint that returns what does not require gradients, or its input"
            _C._checkpoint("refuse", reason)
    return result


def checkpoint(
    function,
    *args,
    use_reentrant=None,
    context_fn=torch.utils.checkpoint.noop_context_fn,
    determinism_check="default",
    debug=False,
    early_stop=True,
    preserve_rng_state=True,
    **kwargs,
):
    """torch.utils.checkpoint.checkpoint: what `function` computes is marked, and the compiler computes it again for the
    backward, random numbers aside. What eager does in another way returns NotImplemented."""
    if debug or torch.utils.checkpoint._checkpoint_debug_enabled is not None:
        return NotImplemented
    differentiable = False
    for a in args:
        differentiable = differentiable or (isinstance(a, torch.Tensor) and a.requires_grad)
    selective = context_fn is not torch.utils.checkpoint.noop_context_fn
    if use_reentrant is not False and (kwargs or selective):  # eager raises an error
        return NotImplemented
    if use_reentrant is None:
        warnings.warn(_UNSAID_REENTRANT, stacklevel=2)
        use_reentrant = True
    if use_reentrant and not differentiable:
        warnings.warn(_NO_GRADIENTS, stacklevel=2)
        with torch.no_grad():
            result = function(*args)
        return _of_reentrant(result, args, differentiable)
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    policy = None
    if selective:
        contexts = context_fn()
        if not isinstance(contexts[0], torch.utils.checkpoint._CachingTorchDispatchMode):
            _C._checkpoint("refuse", "a checkpoint with contexts of its own")
        policy = contexts[0].policy_fn
    _C._checkpoint("begin", policy, bool(preserve_rng_state))
    try:
        result = function(*args, **kwargs)
    finally:
        _C._checkpoint("end")
    return _of_reentrant(result, args, differentiable) if use_reentrant else result


def checkpoint_keeps(policy, out, name, overload, args, kwargs):
    """Whether a selective checkpoint's policy has the results of a call of an operator kept."""
    namespace, name = name.split("::")
    operator = getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
    if operator in torch.utils.checkpoint.SAC_IGNORED_OPS:
        return False
    context = torch.utils.checkpoint.SelectiveCheckpointContext(is_recompute=False, op_output=out)
    answer = policy(context, operator, *args, **kwargs)
    policies = torch.utils.checkpoint.CheckpointPolicy
    return answer if isinstance(answer, bool) else answer in (policies.MUST_SAVE, policies.PREFER_SAVE)
