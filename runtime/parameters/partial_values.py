"""Partial values of a parallel module's tensors that are added up before an operator computes with them.

DTensor lets a partial value stay partial over operators that it counts as linear. That is right for sums and extremes
of floating-point numbers. It is wrong for norms (the sum of parts of norms is no part of the sum of norms), for counts
and flags (a whole number is divided among the ranks to be added to a partial one), where a narrower type rounds the
parts, and where something whole is added: its cache takes a number for a tensor without dims. It fails beside plain
tensors without dims and for products.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial

from passes.torch_compat.operators import tree_leaves
from runtime.torch_compat.dtensors import is_norm_part, spec_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runtime.parameters.tensors import ParameterTensor

#: What puts values side by side and computes nothing: parts stay parts.
_JOINING = ("stack", "cat")
#: Norms, which are also those of parts that are norms of the same order.
_NORMS = ("linalg_vector_norm", "norm")
_ROUNDING = "_to_copy"
#: What DTensor adds to each rank's part if it has once added a tensor of the same dims.
_ADDING = ("add", "sub", "rsub", "_foreach_add", "_foreach_sub")
#: Reductions of parts that DTensor has operators for.
_REDUCED_IN_PARTS = ("sum", "avg", "max", "min")


def incomplete_operands(
    name: str, args: Sequence[Any], kwargs: Any, tensors: Sequence[ParameterTensor]
) -> list[ParameterTensor]:
    """The ``tensors`` that must be added up before the operator ``name`` of ATen, without its overload, may run."""
    partial = [tensor for tensor in tensors if any(placement.is_partial() for placement in spec_of(tensor).placements)]
    if not partial:
        return []
    if name == _ROUNDING or _has_plain_number((args, kwargs)) or (name in _ADDING and _adds_whole(args, partial)):
        return partial
    order = args[1] if name in _NORMS and len(args) > 1 else 2
    return [tensor for tensor in partial if not _may_stay_partial(name, tensor, order)]


def _may_stay_partial(name: str, tensor: ParameterTensor, order: Any) -> bool:
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return False
    parts = [placement for placement in spec_of(tensor).placements if isinstance(placement, Partial)]
    if any(is_norm_part(placement) for placement in parts):
        return name in _JOINING or (name in _NORMS and all(is_norm_part(placement, order) for placement in parts))
    return all(placement.reduce_op in _REDUCED_IN_PARTS for placement in parts)


def _has_plain_number(arguments: Any) -> bool:
    """Whether a plain tensor without dims is among the operands."""
    leaves = tree_leaves(arguments)
    return any(isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor) and leaf.dim() == 0 for leaf in leaves)


def _adds_whole(args: Sequence[Any], partial: Sequence[ParameterTensor]) -> bool:
    """Whether an operand, a number or a tensor, is not partial."""
    partial_operands = set(map(id, partial))
    return any(id(leaf) not in partial_operands for leaf in tree_leaves(list(args)))
