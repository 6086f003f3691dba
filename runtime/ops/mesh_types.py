"""Mesh axes and types as the operators of this package need them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
from spmd_types import R, S

from passes.ir.types import largest_part
from runtime.torch_compat.spmd_internals import group_of_axis


def groups_of(axes: Sequence[str]) -> tuple[dist.ProcessGroup, ...]:
    """Process groups of mesh axes of the current mesh."""
    return tuple(group_of_axis(axis) for axis in axes)


def first_of_shard(whole: int, axes: Sequence[str], device: torch.device) -> torch.Tensor:
    """Index [1] of the first of this rank's entries of ``whole``, cut over ``axes`` (outermost first).

    It is the rank's entry of the list of all ranks' first indices, sharded as the entries are. One axis may cut them
    unevenly: all ranks but the last ones then have as many as the first.
    """
    count = math.prod(dist.get_world_size(group) for group in groups_of(axes))
    start = torch.arange(count, device=device) * largest_part(whole, count)
    for axis in axes:
        start = spmd.convert(start, axis, src=R, dst=S(0))
    return start


def retyped(
    outputs: Sequence[torch.Tensor], places: Collection[int], axis: str, **types: Any
) -> tuple[torch.Tensor, ...]:
    """``outputs`` with those at ``places`` retyped on ``axis``; ``src=`` and ``dst=`` as in ``spmd.convert``."""
    retype = spmd.convert if types["src"] is spmd.I else spmd.reinterpret
    return tuple(retype(output, axis, **types) if place in places else output for place, output in enumerate(outputs))
