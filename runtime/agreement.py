"""Ranks that fail together: an error that one of them finds is raised on all, so that none waits for the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

Result = TypeVar("Result")


def num_ranks(group: dist.ProcessGroup | None = None) -> int:
    """Ranks of ``group`` (None: of all); 1 without a process group."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def rank_in(group: dist.ProcessGroup | None = None) -> int:
    """This rank's number in ``group`` (None: in all); 0 without a process group."""
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0


def gathered(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """``value`` of every rank, in their order, on every rank."""
    values: list[Any] = [value] * num_ranks(group)
    if len(values) > 1:
        dist.all_gather_object(values, value, group=group)
    return values


def together(function: Callable[[], Result], group: dist.ProcessGroup | None = None) -> Result:
    """``function()`` on every rank; what it raises on one of them ends it on all.

    Raises:
        ValueError: on every rank, with the message of the first that failed; a rank that met another error than a
            ValueError or an OSError raises that.
    """
    result, error = None, None
    try:
        result = function()
    except Exception as found:
        error = found
    messages = gathered(None if error is None else str(error), group)
    if isinstance(error, OSError):
        raise ValueError(str(error)) from error
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise ValueError(f"rank {rank}: {message}")
    return result  # type: ignore[return-value]
