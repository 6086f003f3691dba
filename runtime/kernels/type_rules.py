"""Types that ``spmd_types``' checker gives to the outputs of operators of ours."""

from __future__ import annotations

from typing import Any

import spmd_types as spmd
import torch


def product_type(equation: str, *operands: torch.Tensor) -> Any:
    """``spmd_types.rules.einsum``, where an operand without a gradient may be I beside others that are not.

    R and I are the same numbers on all ranks and differ in their gradients alone. Programs that compute none leave out
    the conversions between them, so that an I weight meets inputs that are R or cut.
    """
    types = [spmd.get_local_type(operand) for operand in operands]
    typed: list[Any] = list(operands)
    for axis in dict.fromkeys(axis for each in types for axis in each):
        mixed = len({each[axis] for each in types if axis in each}) > 1
        for index, (operand, each) in enumerate(zip(operands, types)):
            if mixed and each.get(axis) == spmd.I and not gets_gradient(operand):
                typed[index] = spmd.rules.convert(typed[index], axis, src=spmd.I, dst=spmd.R)
    return spmd.rules.einsum(equation, *typed)


def gets_gradient(operand: torch.Tensor | None) -> bool:
    """Whether autograd would compute this operand's gradient: never under ``no_grad``, which weights do not show."""
    return operand is not None and operand.requires_grad and torch.is_grad_enabled()
