"""Python helpers that compiled code calls when it leaves a captured region."""

from __future__ import annotations

import functools
import linecache
import operator
import re
import sys
import types
import warnings
import weakref

import torch
import torch.utils.checkpoint
from torch.optim.adagrad import _single_tensor_adagrad
from torch.optim.sgd import _single_tensor_sgd

from kiln import _C
from kiln._arrays import call_of_numpy, copied_array, offset_in_array, view_of_array  # noqa: F401
from kiln._checkpoint import checkpoint, checkpoint_keeps  # noqa: F401
from kiln._comparisons import equal, is_among  # noqa: F401
from kiln._higher_order import (  # noqa: F401
    CondOp___call__,
    FlexAttentionHOP___call__,
    MapImpl___call__,
    ScanOp___call__,
    TagActivationCheckpoint___call__,
    TransformGetItemToIndex___torch_function__,
    WrapActivationCheckpoint___call__,
    _hop_compile_and_call,
    cond,
    foreach_map,
    invoke_subgraph_placeholder,
    while_loop,
)


def rebuild(function, args, state=None):
    """The object that ``__reduce__`` described as ``(function, args, state)``: an iterator at its position, a partial."""
    made = function(*args)
    if state is not None:
        setstate = getattr(made, "__setstate__", made.__dict__.update if hasattr(made, "__dict__") else None)
        setstate(state)
    return made


def get_items(subject, keys):
    return subject[keys[0]] if len(keys) == 1 else tuple([subject[key] for key in keys])


def get_attributes(subject, paths):
    found = []
    for path in paths:
        value = subject
        for name in path.split("."):
            value = getattr(value, name)
        found.append(value)
    return found[0] if len(found) == 1 else tuple(found)


def call_method(subject, name_and_arguments):
    return getattr(subject, name_and_arguments[0])(*name_and_arguments[1:])


# By class: what an object of it does with its subject and the arguments that it was made with.
GETTERS = {
    operator.itemgetter: get_items,
    operator.attrgetter: get_attributes,
    operator.methodcaller: call_method,
}


def with_source(stack):
    """A stack of lines `File "x.py", line 3, in f`, each followed by that line's text where the file can be read."""
    lines = []
    for line in stack.splitlines():
        lines.append(line)
        found = re.match(r'\s*File "(.*)", line (\d+), in ', line)
        if found and (text := linecache.getline(found[1], int(found[2])).strip()):
            lines.append("    " + text)
    return "\n".join(lines) + "\n"


def warning_action(filters, category, text, module, line):
    """What `filters`, as those of the module warnings, make of a warning: "error", "ignore", "default", ..."""
    for action, message, of, where, number in filters:
        if (
            (message is None or (message == text if isinstance(message, str) else message.match(text)))
            and issubclass(category, of)
            and (where is None or (where == module if isinstance(where, str) else where.match(module)))
            and number in (0, line)
        ):
            return action
    return warnings.defaultaction


def warning_raises(category, text, module, line):
    return warning_action(warnings.filters, category, text, module, line) == "error"


def warn_in(namespace, message, category, file, line):
    """warnings.warn from `line` of the module whose globals are `namespace`."""
    registry = namespace.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, file, line, namespace["__name__"], registry)


def optimizer_step(step, optimizer, *args, **kwargs):
    """``step(optimizer, ...)``, with gradients where the optimizer was made ``differentiable``."""
    before = torch.is_grad_enabled()
    try:
        torch.set_grad_enabled(optimizer.defaults["differentiable"])
        return step(optimizer, *args, **kwargs)
    finally:
        torch.set_grad_enabled(before)


def catch_warnings___init__(self, *, record=False, module=None, action=None, category=Warning, lineno=0, append=False):
    """As warnings', without a look at sys.modules, which changes with every import."""
    self._record = record
    self._module = warnings if module is None else module
    self._entered = False
    self._filter = None if action is None else (action, category, lineno, append)


def Logger_isEnabledFor(self, level):
    """As logging's, without the lock and the cache that it keeps of its answers."""
    return not self.disabled and self.manager.disable < level and level >= self.getEffectiveLevel()


def resume_dict_iterator(mapping, view, consumed):
    """An iterator over a view of `mapping` ("keys", "values" or "items") that has passed `consumed` elements."""
    return _advanced(iter(getattr(dict, view)(mapping)), consumed)


def resume_set_iterator(elements, consumed):
    """An iterator over a set or frozenset that has passed `consumed` elements, whatever its class says of iterating."""
    return _advanced((set if isinstance(elements, set) else frozenset).__iter__(elements), consumed)


def _advanced(iterator, consumed):
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


def cached_property___get__(self, instance, owner=None):
    """functools.cached_property.__get__ without its lock, which nobody may hold when a capture is given up."""
    cache = getattr(instance, "__dict__", None)
    if type(cache) is not dict or self.attrname is None:
        return NotImplemented
    if self.attrname not in cache:
        cache[self.attrname] = self.func(instance)
    return cache[self.attrname]


class FunctionContext:
    """The `ctx` that a captured torch.autograd.Function gets: the members of PyTorch's own."""

    def __init__(self, needs_input_grad):
        self.needs_input_grad = needs_input_grad
        self._kiln_saved = ()
        self._kiln_plain = ()
        self._kiln_refused = ""
        self._kiln_materialize = True

    @property
    def saved_tensors(self):
        return self._kiln_saved

    saved_variables = saved_tensors  # the old name; PyTorch's own also warns, when the backward runs

    def save_for_backward(self, *tensors):
        self._kiln_saved = tensors

    def save_for_forward(self, *tensors):
        pass

    def mark_non_differentiable(self, *tensors):
        self._kiln_plain = tensors

    def mark_dirty(self, *tensors):
        self._kiln_refused = "it changes its inputs in place (mark_dirty)"

    def set_materialize_grads(self, value):
        self._kiln_materialize = value


class GradientHookHandle(torch.utils.hooks.RemovableHandle):
    """What captured code gets of Tensor.register_hook(). The hook ends with the captured part, and its handle does nothing
    from then on."""

    def __init__(self, number):
        self._kiln_number = number

    def remove(self):
        _C._gradient_hook("remove", self._kiln_number)

    def __getstate__(self):
        return self._kiln_number

    def __setstate__(self, state):
        self._kiln_number = state


def Tensor_register_hook(self, hook):
    return GradientHookHandle(_C._gradient_hook("register", self, hook))


class _IdentityNode:
    """The grad_fn of a function that gives its arguments, of which the one at `index` has a gradient: that of `output`."""

    def __init__(self, output, index, count):
        self._kiln = (output, index, count)

    def register_hook(self, hook):
        output, index, count = self._kiln

        def on_gradient(grad):
            grads = tuple([grad if i == index else None for i in range(count)])
            replaced = hook(grads, grads)
            if replaced is None:
                return None
            if replaced[index] is None:
                raise NotImplementedError("a gradient is replaced by none")
            return replaced[index]

        return output.register_hook(on_gradient)


def BackwardHook__apply_on_tensors(self, fn, args):
    """For module hooks on gradients: as PyTorch's, where one of the tensors has a gradient."""
    where = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
    wanted = [i for i in where if args[i].requires_grad]
    if not (wanted and torch.is_grad_enabled()):
        return args, None
    if len(wanted) > 1 or type(args) is not tuple:
        return NotImplemented
    new, at = list(args), wanted[0]
    for i in where:
        if i != at:
            new[i] = args[i].view_as(args[i])
    (new[at],) = torch.nn.modules._functions.BackwardHookFunction.apply(args[at])
    fn(_IdentityNode(new[at], where.index(at), len(where)))
    return tuple(new), where


def hooks_in(hooks):
    return () if hooks is None else tuple(hooks.values())


_targets = weakref.WeakKeyDictionary()


def custom_function_target(cls):
    """What a torch-level graph calls for cls.apply: a function with a name that torch.fx can print."""
    if cls not in _targets:

        def apply(*args):
            return cls.apply(*args)

        apply.__name__ = apply.__qualname__ = cls.__name__ + "_apply"
        apply.__module__ = cls.__module__
        _targets[cls] = apply
    return _targets[cls]


def custom_function(cls, args, differentiated):
    """torch.autograd.Function.apply as captured code runs it: forward, then, if its result may be `differentiated`, backward
    for gradients that stand for those to come."""
    split = cls.setup_context is not torch.autograd.Function.setup_context
    defaults = getattr(cls.forward, "__defaults__", ()) if split else None
    if defaults is not None:  # apply fills them in
        plain = isinstance(cls.forward, types.FunctionType) and cls.forward.__kwdefaults__ is None
        missing = cls.forward.__code__.co_argcount - len(args) if plain else -1
        if not 0 <= missing <= len(defaults):
            return NotImplemented
        args = (*args, *defaults[len(defaults) - missing :])
    if _C._custom_function("inside"):  # whose own backward the gradients' gradients would need
        _C._custom_function("refuse", "its backward calls another torch.autograd.Function")
    context = FunctionContext(tuple([isinstance(a, torch.Tensor) and a.requires_grad for a in args]))
    if differentiated:
        _C._custom_function("forward")
    with torch.no_grad():
        if split:
            result = cls.forward(*args)
            cls.setup_context(context, args, result)
        else:
            result = cls.forward(context, *args)
    outputs = list(result) if isinstance(result, tuple) else [result]
    for i, output in enumerate(outputs):
        if not isinstance(output, torch.Tensor):
            continue
        if is_among(output, args):
            if is_among(output, context._kiln_plain):
                _C._custom_function("refuse", "its forward returns an input that it marks as non-differentiable")
            with torch.no_grad():
                outputs[i] = output.view_as(output) if differentiated or not output.requires_grad else output.detach()
        _C._custom_function("output", outputs[i])
    result = tuple(outputs) if isinstance(result, tuple) else outputs[0]
    if context._kiln_refused:
        _C._custom_function("refuse", context._kiln_refused)
    if not differentiated:
        return result

    differentiable = []
    for output in outputs:
        if not isinstance(output, torch.Tensor):
            _C._custom_function("refuse", "its forward returns other things than tensors")
        differentiates = output.is_floating_point() or output.is_complex()
        differentiable.append(differentiates and not is_among(output, context._kiln_plain))
    inputs = tuple([a for a, needed in zip(args, context.needs_input_grad) if needed])
    wanted = tuple([o for o, yes in zip(outputs, differentiable) if yes])
    materialize = bool(context._kiln_materialize)
    if not materialize and len(wanted) > 1:
        reason = "its backward gets None for gradients that are zero (set_materialize_grads)"
        _C._custom_function("refuse", reason)
    grads = iter(_C._custom_function("begin", inputs, wanted, materialize))
    # In grad mode, as with create_graph=True; autograd sets the mode anew when the backward runs.
    try:
        with torch.enable_grad():
            others = [
                torch.zeros_like(o) if materialize and not yes else None for o, yes in zip(outputs, differentiable)
            ]
            grads = [next(grads) if yes else other for other, yes in zip(others, differentiable)]
            backward = cls.backward if cls.backward is not torch.autograd.Function.backward else cls.vjp
            found = backward(context, *grads)
    except Exception:  # it is raised when, and if, the backward runs
        _C._custom_function("refuse", "its backward raises an exception")
    found = found if isinstance(found, tuple) else (found,)
    if len(found) < len(args) or found[len(args) :] != (None,) * (len(found) - len(args)):
        _C._custom_function("refuse", "its backward returns another number of gradients than its forward has inputs")
    _C._custom_function("end", tuple([g for g, needed in zip(found, context.needs_input_grad) if needed]))
    return result


def TransformerEncoder_forward(self, src, mask=None, src_key_padding_mask=None, is_causal=None):
    """What inference makes nested tensors for, in dense ones: padding is masked in each layer and zero at the end."""
    first = self.layers[0]
    if (
        src_key_padding_mask is None
        or mask is not None
        or is_causal is True
        or not getattr(self, "mask_check", True)
        or not getattr(self, "use_nested_tensor", False)  # it knows the first layer's class
        or not torch.backends.mha.get_fastpath_enabled()
        or first.training
        or src.dim() != 3
        or src_key_padding_mask.shape != src.shape[:2]
        or torch.is_autocast_enabled()
    ):
        return NotImplemented
    if torch.is_grad_enabled():
        attention = first.self_attn
        read = [src, attention.in_proj_weight, attention.in_proj_bias]
        for module in (attention.out_proj, first.norm1, first.norm2, first.linear1, first.linear2):
            read += [module.weight, module.bias]
        if any(t.requires_grad for t in read):
            return NotImplemented
    bias = torch.nn.functional._canonical_mask(
        mask=src_key_padding_mask,
        mask_name="src_key_padding_mask",
        other_type=None,
        other_name="mask",
        target_type=src.dtype,
    )
    output = src
    for layer in self.layers:
        output = layer(output, src_mask=None, is_causal=False, src_key_padding_mask=bias)
    padding = bias != 0
    # With holes in it no nested tensors are made, and what stands at padding is as it comes.
    left_aligned = (padding == (padding.cumsum(1) > 0)).all()
    output = output.masked_fill((padding & left_aligned).unsqueeze(-1), 0.0)
    return output if self.norm is None else self.norm(output)


def OptimizedModule___call__(self, *args, **kwargs):
    """A module that another compiler wraps: the flag that its own call sets is for that compiler."""
    return torch.nn.Module.__call__(self, *args, **kwargs)


class DisableTorchFunctionSubclass:
    """torch._C's context of this name: its state is where a capture sees it."""

    def __enter__(self):
        self.before = torch._C._is_torch_function_enabled(), torch._C._is_torch_function_all_disabled()
        if self.before[0]:
            torch._C._set_torch_function_state(torch._C._TorchFunctionState.SUBCLASSES_DISABLED)

    def __exit__(self, exc_type, exc_value, traceback):
        states = torch._C._TorchFunctionState
        enabled, disabled = self.before
        torch._C._set_torch_function_state(
            states.ENABLED if enabled else states.ALL_DISABLED if disabled else states.SUBCLASSES_DISABLED
        )


class DisableTorchFunction(DisableTorchFunctionSubclass):
    def __enter__(self):
        super().__enter__()
        torch._C._set_torch_function_state(torch._C._TorchFunctionState.ALL_DISABLED)


def inference_mode___enter__(self):
    if self.mode is not True or not _C._inference_mode(True):
        return NotImplemented
    return None


def inference_mode___exit__(self, exc_type, exc_value, traceback):
    if self.mode is not True or not _C._inference_mode(False):
        return NotImplemented
    return None


def _group_tensors_by_device_and_dtype(tensorlistlist, with_indices=False):
    """What torch._C's function of this name does: the lists' tensors by the device and dtype of the first list's."""
    groups = {}
    for i, first in enumerate(tensorlistlist[0]):
        key = (first.device, first.dtype)
        if key not in groups:
            groups[key] = ([[] for _ in tensorlistlist], [])
        lists, indices = groups[key]
        for group, tensors in zip(lists, tensorlistlist):
            if len(tensors) > 0:
                group.append(tensors[i])
        if with_indices:
            indices.append(i)
    return groups


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


# The fused kernels compute the same updates.
_fused_adam = _single_tensor_adam


def _fused_sgd(params, grads, momentum_buffer_list, grad_scale, found_inf, *, has_sparse_grad, **options):
    """torch.optim.sgd._fused_sgd."""
    missing = [buffer is None for buffer in momentum_buffer_list]
    if grad_scale is not None or found_inf is not None or has_sparse_grad or (any(missing) and not all(missing)):
        return NotImplemented
    _single_tensor_sgd(params, grads, momentum_buffer_list, None, None, has_sparse_grad=False, **options)
    return None


def _fused_adagrad(params, grads, state_sums, state_steps, grad_scale, found_inf, **options):
    """torch.optim.adagrad._fused_adagrad."""
    if grad_scale is not None or found_inf is not None:
        return NotImplemented
    if options["has_sparse_grad"] or options["has_complex"] or options["differentiable"]:
        return NotImplemented
    _single_tensor_adagrad(params, grads, state_sums, state_steps, None, None, **options)
    return None


def record_function___init__(self, name, args=None):
    """torch.autograd.profiler.record_function.__init__."""
    self.name, self.args = name, args
    self.run_callbacks_on_exit = True
    self.record = self._cupti_monitor_external_id = None


def record_function___enter__(self):
    """torch.autograd.profiler.record_function.__enter__: the label is left out. Should the block be left in eager, after
    a graph break, there is nothing to end."""
    self.run_callbacks_on_exit = False
    return self


def record_function___exit__(self, exc_type, exc_value, traceback):
    """torch.autograd.profiler.record_function.__exit__."""
    if self.record is not None:  # entered in eager
        return NotImplemented
    self.run_callbacks_on_exit = True


def Variable(data=None, requires_grad=False, volatile=None):
    """torch.autograd.Variable, which is a view without history."""
    if volatile is not None or not isinstance(data, torch.Tensor):
        return torch._C._LegacyVariableBase(data, requires_grad, volatile)
    made = data.detach()
    return made.requires_grad_() if requires_grad else made


def copied_tensor(data, *, dtype=None, device=None, requires_grad=False, pin_memory=False, rather_than="torch.tensor"):
    """torch.tensor of a tensor, or of a list of tensors of one element and numbers."""
    if isinstance(data, torch.Tensor):
        warnings.warn(
            "To copy construct from a tensor, it is recommended to use sourceTensor.detach().clone() or "
            f"sourceTensor.detach().clone().requires_grad_(True), rather than {rather_than}(sourceTensor).",
            UserWarning,
            stacklevel=2 if rather_than == "torch.tensor" else 3,
        )
        made = data.detach().to(device=device, dtype=dtype, copy=True)
    else:
        dtypes = item_dtypes(data)
        if pin_memory or not dtypes or None in dtypes:
            _C.graph_break()  # what else there is in lists, and what raises
        made = stacked(data, dtype or functools.reduce(torch.promote_types, dtypes), device)
    return made.requires_grad_() if requires_grad else made


def tensor_of_size(data, *, dtype=None, device=None, requires_grad=False, pin_memory=False):
    """torch.tensor and torch.as_tensor of a size that is left open, or of a float that is computed of such."""
    if requires_grad or pin_memory:
        _C.graph_break()
    if dtype is None and isinstance(data, float):
        dtype = torch.get_default_dtype() if type(data) is float else torch.float64  # that of np.float64
    return torch.full((), data, dtype=torch.int64 if dtype is None else dtype, device=device)


def new_tensor(self, data, *, dtype=None, device=None, requires_grad=False, pin_memory=False):
    """Tensor.new_tensor of what copied_tensor takes."""
    return copied_tensor(
        data,
        dtype=self.dtype if dtype is None else dtype,
        device=self.device if device is None else device,
        requires_grad=requires_grad,
        pin_memory=pin_memory,
        rather_than="tensor.new_tensor",
    )


def item_dtypes(data):
    """The dtypes that torch.tensor infers from the elements of a list of lists; None for what is no number."""
    if type(data) in (list, tuple, torch.Size):
        return [dtype for item in data for dtype in item_dtypes(item)]
    if isinstance(data, torch.Tensor):
        return [data.dtype if data.dim() == 0 else None]
    return [{bool: torch.bool, int: torch.int64, float: torch.get_default_dtype()}.get(type(data))]


def stacked(data, dtype, device):
    """The tensor, without history, of a list of lists of numbers and of tensors of one element."""
    if type(data) in (list, tuple, torch.Size):
        return torch.stack([stacked(item, dtype, device) for item in data])
    if not isinstance(data, torch.Tensor):
        return torch.as_tensor(data, dtype=dtype, device=device)
    return data.detach().to(device=device, dtype=dtype)


def is_read(fill_value, options):
    """Whether PyTorch's bindings read the value of a tensor, which they do not refuse."""
    is_scalar = isinstance(fill_value, torch.Tensor) and fill_value.dim() == 0 and not fill_value.is_complex()
    return is_scalar and not fill_value.requires_grad and options.get("out") is None


def filled(made, value):
    """`made`, which may be a leaf that requires gradients, with `value` in all places."""
    with torch.no_grad():
        return made.fill_(value)


def full(size, fill_value, *, dtype=None, **options):
    """torch.full of a tensor's value."""
    if not is_read(fill_value, options):
        return NotImplemented
    if dtype is None:
        dtype = torch.get_default_dtype() if fill_value.is_floating_point() else torch.int64
        dtype = torch.bool if fill_value.dtype is torch.bool else dtype
    return filled(torch.empty(size, dtype=dtype, **options), fill_value)


def full_like(input, fill_value, **options):
    """torch.full_like of a tensor's value."""
    return filled(torch.empty_like(input, **options), fill_value) if is_read(fill_value, options) else NotImplemented


def new_full(self, size, fill_value, **options):
    """Tensor.new_full of a tensor's value."""
    return filled(self.new_empty(size, **options), fill_value) if is_read(fill_value, options) else NotImplemented


def one_hot(tensor, num_classes=-1):
    """torch.nn.functional.one_hot of a known number of classes, with eager's refusals as assertions."""
    if type(num_classes) is not int or num_classes <= 0 or tensor.dtype != torch.int64 or tensor.numel() == 0:
        return NotImplemented
    if (tensor < 0).any():
        raise RuntimeError("Class values must be non-negative.")
    if (tensor >= num_classes).any():
        raise RuntimeError("Class values must be smaller than num_classes.")
    return (tensor.contiguous().unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).to(torch.int64)


def ctc_loss(log_probs, targets, input_lengths, target_lengths, blank=0, reduction=1, zero_infinity=False):
    """torch.ctc_loss on the CPU, whose lengths an operator of the graph reads."""
    lengths = [length_tensor(given) for given in (input_lengths, target_lengths)]
    integers = all(isinstance(t, torch.Tensor) and t.dtype in (torch.int64, torch.int32) for t in [*lengths, targets])
    if not integers or log_probs.dim() != 3 or any(t.device.type != "cpu" for t in [log_probs, targets, *lengths]):
        return NotImplemented
    if torch._C._functorch.maybe_current_level() is not None or any(t.shape != log_probs.shape[1:2] for t in lengths):
        return NotImplemented
    loss, _ = torch.ops.kiln.ctc_loss(log_probs, targets, *lengths, blank, bool(zero_infinity))
    if zero_infinity:
        loss = torch.where(loss == torch.inf, torch.zeros((), dtype=loss.dtype), loss)
    if reduction == 1:
        return (loss / lengths[1].to(loss.dtype).clamp_min(1)).mean()
    return loss.sum() if reduction == 2 else loss


def length_tensor(given):
    return torch.tensor(given, dtype=torch.int64) if type(given) in (list, tuple) else given


def _check_tensor_all_with(error_type, condition, message=None):
    """torch._check_tensor_all_with, whose branch on the tensor is an assertion of the graph."""
    if not isinstance(condition, torch.Tensor) or condition.dtype != torch.bool:
        return NotImplemented
    if not condition.all():
        raise failed_check(error_type, message)


def failed_check(error_type, message):
    """The exception of a failed check; made here, since a branch that is an assertion only raises, without jumps."""
    return error_type("a check of a tensor failed" if message is None else str(message()))


class UnloadedDynamo:
    """The module torch._dynamo for PyTorch's own code that tells it about tensors, while nobody has loaded it."""

    @staticmethod
    def mark_static(t, index=None):
        pass

    def __getattr__(self, name):
        return getattr(torch.__getattr__("_dynamo"), name)  # the program asks for it


unloaded_dynamo = UnloadedDynamo()


def leave_transforms():
    """Ends all levels of torch.func's transforms on this thread."""
    functorch = torch._C._functorch
    kinds = functorch.TransformType
    leave = {
        kinds.Vmap: functorch._vmap_decrement_nesting,
        kinds.Grad: functorch._grad_decrement_nesting,
        kinds.Jvp: functorch._jvp_decrement_nesting,
    }
    while (level := functorch.peek_interpreter_stack()) is not None:
        leave[level.key()]()


def _autograd_grad(outputs, inputs, grad_outputs=None, retain_graph=False, create_graph=True):
    """torch._functorch.eager_transforms._autograd_grad, without the look at another compiler's mode: gradients of those
    outputs that have a history, zeros where there is none."""
    given = [None] * len(outputs) if grad_outputs is None else grad_outputs
    pairs = [(out, grad) for out, grad in zip(outputs, given) if out.requires_grad]
    if not pairs:
        return tuple([torch.zeros_like(i) for i in inputs])
    roots, grads = zip(*pairs)
    found = torch.autograd.grad(
        roots, inputs, grads, retain_graph=retain_graph, create_graph=create_graph, allow_unused=True
    )
    return tuple([torch.zeros_like(i) if grad is None else grad for grad, i in zip(found, inputs)])


# torch._functorch.predispatch wraps these for PyTorch's own tracer.
_vmap_increment_nesting = torch._C._functorch._vmap_increment_nesting
_vmap_decrement_nesting = torch._C._functorch._vmap_decrement_nesting
_jvp_increment_nesting = torch._C._functorch._jvp_increment_nesting
_jvp_decrement_nesting = torch._C._functorch._jvp_decrement_nesting
_remove_batch_dim = torch._C._functorch._remove_batch_dim
_unwrap_for_grad = torch._C._functorch._unwrap_for_grad
_make_dual = torch._VF._make_dual


def _enter_dual_level():
    """torch.autograd.forward_ad's level. Where it is the outermost, operators are to be recorded with what they do to tangents,
    which a level of torch.func.jvp around it sees to."""
    if torch._C._functorch.maybe_current_level() is None:
        _C._dual_level(_jvp_increment_nesting())
    return torch._C._enter_dual_level()


def _exit_dual_level(*, level):
    torch._C._exit_dual_level(level=level)
    if _C._dual_level() != 0:
        _C._dual_level(0)
        _jvp_decrement_nesting()


def _unpack_dual(tensor, *, level):
    primal, tangent = torch._VF._unpack_dual(tensor, level=level)
    around = _C._dual_level()
    if around == 0 or around != torch._C._functorch.maybe_current_level():  # one of the program's own is above it
        return primal, tangent
    return _unwrap_for_grad(primal, around), None if tangent is None else _unwrap_for_grad(tangent, around)


def _add_batch_dim(self, batch_dim, level):
    return torch._C._functorch._add_batch_dim(self, batch_dim if batch_dim >= 0 else batch_dim + self.ndim, level)


def _frame_of_nobody():
    """A generator's frame has no caller while it waits: others keep the frames of whoever imports this module."""
    yield sys._getframe()


def _some_traceback():
    frame = next(_frame_of_nobody())
    return types.TracebackType(None, frame, frame.f_lasti, frame.f_lineno)


# In the place of each traceback of captured code (Machine::unknown_traceback).
UNKNOWN_TRACEBACK = _some_traceback()
