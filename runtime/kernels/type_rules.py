"""Types that ``spmd_types``' checker gives to the outputs of operators of ours."""

from __future__ import annotations

from typing import Any

import spmd_types as spmd
import torch


def product_type(equation: str, *operands: torch.Tensor) -> Any:
    """``spmd_types.rules.einsum``, where an operand without a gradient may be R beside I, and I beside R or cut ones.

    R and I are the same numbers on all ranks and differ in their gradients alone. Weights that are frozen are R beside
    inputs that are I, and programs that compute no gradients leave out the conversions between them.
    """
    types = [spmd.get_local_type(operand) for operand in operands]
    # What a rule has typed before (a gathered operand) is no tensor: it counts as one with a gradient.
    either = [isinstance(operand, torch.Tensor) and not gets_gradient(operand) for operand in operands]
    typed: list[Any] = list(operands)
    for axis in dict.fromkeys(axis for each in types for axis in each):
        is_invariant = any(each.get(axis) == spmd.I for each, free in zip(types, either) if not free)
        source, target = (spmd.R, spmd.I) if is_invariant else (spmd.I, spmd.R)
        mixed = len({each[axis] for each in types if axis in each}) > 1
        for index, (each, free) in enumerate(zip(types, either)):
            if mixed and free and each.get(axis) == source:
                typed[index] = spmd.rules.convert(typed[index], axis, src=source, dst=target)
    return spmd.rules.einsum(equation, *typed)


def gets_gradient(operand: torch.Tensor | None) -> bool:
    """Whether autograd would compute this operand's gradient: never under ``no_grad``, which weights do not show."""
    return operand is not None and operand.requires_grad and torch.is_grad_enabled()
