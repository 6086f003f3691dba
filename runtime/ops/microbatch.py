"""Which micro-batch a program runs for, and what it takes of values that are whole over the batch.

A plan cuts the batch over the ranks of an axis and, on each rank, over micro-batches; in the program both are one
cut of the axis. Where no micro-batch is set (type checking) the operators here leave their argument as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from runtime.ops.mesh_types import groups_of


@dataclass(frozen=True)
class Microbatch:
    """One of ``count``, numbered from 0 on every rank; programs see them as part of the mesh axis ``axis``."""

    index: int
    count: int
    axis: str = "dp"


class _MicrobatchState:
    current: Microbatch | None = None


def current_microbatch() -> Microbatch | None:
    """The micro-batch that is being run; what runs again in the backward pass must be given it again."""
    return _MicrobatchState.current


@contextlib.contextmanager
def in_microbatch(microbatch: Microbatch | None) -> Iterator[None]:
    """Run the block's code for ``microbatch``."""
    before, _MicrobatchState.current = _MicrobatchState.current, microbatch
    try:
        yield
    finally:
        _MicrobatchState.current = before


def of_microbatch(x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
    """The entries of ``x`` [.., batch, ..] that the ranks of ``axis`` need together for this micro-batch.

    ``dim`` is cut first over the ranks, then over micro-batches.
    """
    microbatch = _MicrobatchState.current
    if microbatch is None or microbatch.count == 1:
        return x
    num_ranks = dist.get_world_size(groups_of((axis,))[0])
    pieces = x.unflatten(dim, (num_ranks, microbatch.count, -1))
    return pieces.select(dim + 1, microbatch.index).flatten(dim, dim + 1)


def of_first_microbatch(x: torch.Tensor) -> torch.Tensor:
    """``x`` for the first micro-batch, zeros for the others: what is added once for the whole batch."""
    microbatch = _MicrobatchState.current
    return x if microbatch is None or microbatch.index == 0 else x * 0
