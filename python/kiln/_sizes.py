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
