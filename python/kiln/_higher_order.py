"""What kiln runs in place of PyTorch's higher-order operators, in capture and in eager code below it: Python that does the
same, of which the capture follows each operation, and derives the gradients.

The names are those of the functions that they replace, as in kiln._polyfills.
"""

from __future__ import annotations

import math

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from kiln import _C


def _hop_compile_and_call(fn, args, kwargs=None):
    return fn(*args, **(kwargs or {}))


def cond(pred, true_fn, false_fn, operands=()):
    if isinstance(pred, torch.Tensor):
        if pred.numel() != 1:
            raise RuntimeError(f"Expected pred to be bool or single-element tensor, but got {pred}")
        # vmap has no branches: as in eager, each lane gets its own result.
        if torch._C._functorch.is_batchedtensor(pred):
            return _of_lanes(pred.reshape(()).to(torch.bool), true_fn(*operands), false_fn(*operands))
        if _C._branch("may"):
            return _selected(pred.detach().reshape(()).to(torch.bool), true_fn, false_fn, operands)
    return true_fn(*operands) if pred else false_fn(*operands)


def _of_lanes(pred, first, second):
    return pytree.tree_map(lambda a, b: torch.where(pred, a, b), first, second)


def _selected(pred, true_fn, false_fn, operands):
    """What both branches compute, and of that what ``pred``, a 0-dim bool, says."""
    _C._branch("begin")
    first = true_fn(*operands)
    _C._branch("end", pred, True)
    _C._branch("begin")
    second = false_fn(*operands)
    _C._branch("end", pred, False)
    if isinstance(first, torch.Tensor):
        return _chosen(pred, first, second)
    first, structure = pytree.tree_flatten(first)
    second, other = pytree.tree_flatten(second)
    if structure != other:
        _C._branch("refuse", "branches of torch.cond that return results of different structure")
    return pytree.tree_unflatten([_chosen(pred, a, b) for a, b in zip(first, second)], structure)


def _chosen(pred, a, b):
    both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    if not both or a.shape != b.shape or not _C._branch("alike", a, b):
        _C._branch("refuse", "branches of torch.cond that return tensors of different kinds, or none")
    return torch.where(pred, a, b)


def CondOp___call__(self, pred, true_fn, false_fn, operands):
    return cond(pred, true_fn, false_fn, operands)


def WrapActivationCheckpoint___call__(self, function, *args, **kwargs):
    """A checkpoint in a graph of PyTorch's own front end. What is computed again for the backward draws the random numbers
    of the forward: the operator itself leaves that to the compiler behind it."""
    kwargs["use_reentrant"] = False
    return torch.utils.checkpoint.checkpoint(function, *args, **kwargs)


def TagActivationCheckpoint___call__(self, gmod, *args, **kwargs):
    if "_checkpoint_context_fn" in gmod.meta:
        kwargs["context_fn"] = gmod.meta["_checkpoint_context_fn"]
    return WrapActivationCheckpoint___call__(self, gmod, *args, **kwargs)


def while_loop(cond_fn, body_fn, carried_inputs):
    carried = None
    while cond_fn(*(carried_inputs if carried is None else carried)):
        carried = body_fn(*(carried_inputs if carried is None else carried))
        if not isinstance(carried, (tuple, list)):
            raise RuntimeError(f"body_fn must return a tuple or a list, as carried_inputs is, but returned {carried}")
    # The result never is what was given.
    return pytree.tree_map_only(torch.Tensor, torch.clone, carried_inputs) if carried is None else carried


def foreach_map(op, *operands, **kwargs):
    """`op` of each group of the lists' elements; what is no list goes to all calls."""
    lists = [operand for operand in operands if isinstance(operand, (list, tuple))]
    if not lists:
        return op(*operands, **kwargs)
    rows = range(min([len(items) for items in lists]))
    return [op(*[o[i] if isinstance(o, (list, tuple)) else o for o in operands], **kwargs) for i in rows]


def invoke_subgraph_placeholder(func, *args, **kwargs):
    """A region that torch.compiler.nested_compile_region marks: equal kernels are compiled once without marks."""
    return func(*args, **kwargs)


def stacked_trees(trees):
    return pytree.tree_map(lambda *rows: torch.stack(rows) if isinstance(rows[0], torch.Tensor) else rows[0], *trees)


def MapImpl___call__(self, f, xs, pos_args):
    return stacked_trees([f(*row, *pos_args) for row in zip(*[x.unbind() for x in xs], strict=True)])


def ScanOp___call__(self, combine_fn, init, xs, additional_inputs):
    leaves, outs = init, []
    for row in zip(*[x.unbind() for x in xs], strict=True):
        carry, out = combine_fn(*leaves, *row, *additional_inputs)
        leaves = pytree.tree_leaves(carry)
        outs.append(out)
    return carry, stacked_trees(outs)


def TransformGetItemToIndex___torch_function__(self, func, types, args=(), kwargs=None):
    """The mode under which a mask's function is called with indices that are tensors: `x[i]` gathers instead of taking a
    view at the number i."""
    if func is torch.Tensor.__getitem__:
        x, index = args
        index = list(index) if isinstance(index, (tuple, list)) else [index]
        if all(isinstance(i, (torch.Tensor, int)) for i in index):
            return torch.ops.aten.index(
                x, [torch.tensor(i, dtype=torch.int64, device=x.device) if isinstance(i, int) else i for i in index]
            )
    return func(*args, **(kwargs or {}))


class IndicesAreTensors(TorchFunctionMode):
    __torch_function__ = TransformGetItemToIndex___torch_function__


def FlexAttentionHOP___call__(
    self,
    query,
    key,
    value,
    score_mod,
    block_mask,
    scale,
    kernel_options,
    score_mod_other_buffers=(),
    mask_mod_other_buffers=(),
):
    """Scores and sums over all keys; ``lse`` and ``max_scores`` are in base 2. (out, lse, max_scores)."""
    groups = query.size(1) // key.size(1)
    if query.size(0) != key.size(0) and key.size(0) != 1:
        raise RuntimeError(f"Bq and Bkv must broadcast. Got Bq={query.size(0)} and Bkv={key.size(0)}")
    key, value = (t.repeat_interleave(groups, dim=1).expand(query.size(0), -1, -1, -1) for t in (key, value))
    scores = _scores(
        query, key, score_mod, block_mask[-1], scale, tuple(score_mod_other_buffers), tuple(mask_mod_other_buffers)
    )
    out = torch._safe_softmax(scores, -1).to(query.dtype) @ value.to(query.dtype)
    return _laid_out_as(out, query), scores.logsumexp(-1) / math.log(2), scores.amax(-1) / math.log(2)


def _scores(query, key, score_mod, mask_mod, scale, score_buffers, mask_buffers):
    from torch.nn.attention.flex_attention import _vmap_for_bhqkv

    precise = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = (query.to(precise) @ key.to(precise).transpose(-2, -1)) * scale
    places = [torch.arange(n, device=scores.device) for n in scores.shape]
    scored = _vmap_for_bhqkv(score_mod, prefix=(0,), suffix=(None,) * len(score_buffers))
    kept = _vmap_for_bhqkv(mask_mod, prefix=(), suffix=(None,) * len(mask_buffers))
    with IndicesAreTensors():
        return torch.where(kept(*places, *mask_buffers), scored(scores, *places, *score_buffers), -math.inf)


def _laid_out_as(out, query):
    """``out`` with its dims in memory in the order of ``query``'s, but for the last, which is dense."""
    *order, last = sorted(range(out.dim()), key=lambda d: (d != out.dim() - 1, query.stride(d)))[::-1]
    order = [*order, last]
    return out.permute(order).contiguous().permute([order.index(d) for d in range(out.dim())])
