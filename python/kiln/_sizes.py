"""Sizes of tensors that a captured graph leaves open."""

from __future__ import annotations

import torch

from kiln import _C


class Size(torch.SymInt):
    """Stands for an int: a size that may differ from call to call, or what is computed of such. PyTorch's bindings take it
    where they take ints; its methods are in csrc/python/capture/sizes.cpp. What needs its value gets it, and the graph is
    for that value alone from then on."""

    def __new__(cls, *args):
        """C code that asks for an object's class, and calls it (groupby by type), means int."""
        _C.graph_break()
        raise TypeError("the class of open sizes makes none itself")


class Real(torch.SymFloat):
    """Stands for a float that is computed of such sizes (n / 2, math.sqrt(n)); its methods are in
    csrc/python/capture/reals.cpp. What needs its value gets it, and the graph is for those sizes alone from then on."""

    def __new__(cls, *args):
        """As that of Size, of float."""
        _C.graph_break()
        raise TypeError("the class of floats of open sizes makes none itself")


def select_open(tensor, index):
    """What `tensor[index]` is a part of, and the index of that part in it, for a tuple of ints, some of which are open,
    slices, tensors of integers, None and at most one ellipsis, no more than the tensor has dims. Ints, slices and None give a
    view, operator by operator: PyTorch's bindings take an open int as the whole index alone."""
    rest, dim = [], 0  # what the view's dims are indexed by
    left = tensor.dim() - len([i for i in index if i is not None and i is not Ellipsis])
    for i in index:
        if i is Ellipsis:
            rest.extend([slice(None)] * left)
        elif i is None:
            tensor = tensor.unsqueeze(dim)
            rest.append(slice(None))
        elif isinstance(i, torch.Tensor):
            rest.append(i)
        elif isinstance(i, slice):
            tensor = tensor[(*[slice(None)] * dim, i)]
            rest.append(slice(None))
        else:
            tensor = torch.select(tensor, dim, i)
        dim = len(rest)
    return tensor, tuple(rest) if any(isinstance(i, torch.Tensor) for i in rest) else Ellipsis
