"""Mesh axes and types as the operators of this package need them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
from spmd_types._mesh import _pg_for_axis


def groups_of(axes: Sequence[str]) -> tuple[dist.ProcessGroup, ...]:
    """Process groups of mesh axes of the current mesh."""
    return tuple(_pg_for_axis(axis) for axis in axes)


def retyped(
    outputs: Sequence[torch.Tensor], places: Collection[int], axis: str, **types: Any
) -> tuple[torch.Tensor, ...]:
    """``outputs`` with those at ``places`` retyped on ``axis``; ``src=`` and ``dst=`` as in ``spmd.convert``."""
    retype = spmd.convert if types["src"] is spmd.I else spmd.reinterpret
    return tuple(retype(output, axis, **types) if place in places else output for place, output in enumerate(outputs))
