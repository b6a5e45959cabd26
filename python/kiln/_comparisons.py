"""Functions of PyTorch that compare tensors' values, as operators whose result the program branches by."""

from __future__ import annotations

import torch


def equal(input, other):
    """torch.equal and Tensor.equal of tensors of one dtype."""
    if not isinstance(other, torch.Tensor) or input.dtype != other.dtype or input.layout != other.layout:
        return NotImplemented
    return input.shape == other.shape and (input == other).all().item()
