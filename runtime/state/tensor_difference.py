"""How far two tensors of one shape differ, whatever they hold: booleans, integers, complex numbers, infinities."""

from __future__ import annotations

import math

import torch


def largest_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Equal infinities and NaN do not differ; one beside any other value differs by infinity. Without entries: 0.

    Example:
        >>> largest_difference(torch.tensor([True, False]), torch.tensor([True, True]))
        1.0
    """
    if torch.equal(one, other):  # the usual answer, in one operator of ten
        return 0.0
    one, other = _wide(one), _wide(other)
    same = (one == other) | (one.isnan() & other.isnan())
    difference = (one - other).abs().masked_fill(same, 0.0).nan_to_num(nan=math.inf, posinf=math.inf)
    return float(difference.max()) if difference.numel() else 0.0


def largest_size(tensor: torch.Tensor) -> float:
    """The largest absolute value among the finite ones; 0 if there is none."""
    sizes = _wide(tensor).abs().nan_to_num(nan=0.0, posinf=0.0)
    return float(sizes.max()) if sizes.numel() else 0.0


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)
