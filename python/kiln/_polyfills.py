"""Python helpers that compiled code calls when it leaves a captured region."""

from __future__ import annotations

import linecache
import re

import torch


def rebuild(function, args, state=None):
    """The object that ``__reduce__`` described as ``(function, args, state)``: an iterator at its position, a partial."""
    made = function(*args)
    if state is not None:
        made.__setstate__(state)
    return made


def with_source(stack):
    """A stack of lines `File "x.py", line 3, in f`, each followed by that line's text where the file can be read."""
    lines = []
    for line in stack.splitlines():
        lines.append(line)
        found = re.match(r'\s*File "(.*)", line (\d+), in ', line)
        if found and (text := linecache.getline(found[1], int(found[2])).strip()):
            lines.append("    " + text)
    return "\n".join(lines) + "\n"


def resume_dict_iterator(mapping, view, consumed):
    """An iterator over a view of `mapping` ("keys", "values" or "items") that has passed `consumed` elements."""
    iterator = iter(getattr(dict, view)(mapping))
    for _ in range(consumed):
        next(iterator)
    return iterator


def attrgetter(name, *names):
    """operator.attrgetter, in Python."""

    def get(obj, path):
        for part in path.split("."):
            obj = getattr(obj, part)
        return obj

    if names:
        return lambda obj: tuple(get(obj, path) for path in (name, *names))
    return lambda obj: get(obj, name)


def methodcaller(name, /, *args, **kwargs):
    """operator.methodcaller, in Python."""
    return lambda obj: getattr(obj, name)(*args, **kwargs)


def _single_tensor_adam(
    params,
    grads,
    exp_avgs,
    exp_avg_sqs,
    max_exp_avg_sqs,
    state_steps,
    grad_scale,
    found_inf,
    *,
    amsgrad,
    has_complex,
    beta1,
    beta2,
    lr,
    weight_decay,
    eps,
    maximize,
    capturable,
    differentiable,
    decoupled_weight_decay,
):
    """Adam's update with the step counter kept in the graph.

    PyTorch reads the counter (``item()``) and corrects the biases in Python floats; here the same float64 arithmetic runs
    on 0-dim tensors. Rare settings return NotImplemented.
    """
    if grad_scale is not None or found_inf is not None or capturable or differentiable or has_complex:
        return NotImplemented
    if isinstance(lr, torch.Tensor) or isinstance(beta1, torch.Tensor) or isinstance(beta2, torch.Tensor):
        return NotImplemented
    for i, param in enumerate(params):
        grad = grads[i] if not maximize else -grads[i]
        exp_avg, exp_avg_sq, step_t = exp_avgs[i], exp_avg_sqs[i], state_steps[i]
        step_t += 1
        if weight_decay != 0:
            if decoupled_weight_decay:
                param.mul_(1 - lr * weight_decay)
            else:
                grad = grad.add(param, alpha=weight_decay)
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        step = step_t.to(torch.float64)
        step_size = lr / (1 - torch.pow(beta1, step))
        correction = torch.sqrt(1 - torch.pow(beta2, step))
        if amsgrad:
            torch.maximum(max_exp_avg_sqs[i], exp_avg_sq, out=max_exp_avg_sqs[i])
            denom = (max_exp_avg_sqs[i].sqrt() / correction).add_(eps)
        else:
            denom = (exp_avg_sq.sqrt() / correction).add_(eps)
        param.add_(exp_avg * -step_size / denom)
    return None


# The fused kernel computes the same update.
_fused_adam = _single_tensor_adam
