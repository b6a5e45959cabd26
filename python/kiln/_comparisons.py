"""How polyfills compare tensors: by identity, and as torch.equal does, by operators whose result the program branches by."""

from __future__ import annotations

import torch


def equal(input, other):
    """torch.equal and Tensor.equal of tensors of one dtype."""
    if not isinstance(other, torch.Tensor) or input.dtype != other.dtype or input.layout != other.layout:
        return NotImplemented
    return input.shape == other.shape and (input == other).all().item()


def is_among(tensor, others):
    """Whether one of `others` is this very object: `in` would compare tensors."""
    for other in others:
        if other is tensor:
            return True
    return False
