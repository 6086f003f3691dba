"""Functions of plain tensors on every rank of ``LocalTensorMode`` in turn, where ranks have tensors of other shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from runtime.torch_compat.spmd_internals import local_tensor_mode_of


class ByRank(dict[int, Any]):
    """A plain value for every rank."""


def on_each_rank(function: Callable[..., tuple[Any, ...]], *arguments: Any) -> tuple[Any, ...]:
    """``function(*arguments)`` on this rank, or on every rank of the mode that one of the tensors belongs to.

    ``function`` must not communicate. Of every rank's results, tensors become one tensor of all, the rest a ``ByRank``.
    """
    ranks = _ranks_of(arguments)
    if ranks is None:
        return function(*arguments)
    from runtime.torch_compat.local_tensors import LocalTensor, maybe_disable_local_tensor_mode

    def of_rank(argument: Any, rank: int) -> Any:
        if isinstance(argument, LocalTensor):
            return argument._local_tensors[rank]
        return argument[rank] if isinstance(argument, ByRank) else argument

    with maybe_disable_local_tensor_mode():
        results = {rank: function(*(of_rank(argument, rank) for argument in arguments)) for rank in ranks}
    columns = [ByRank((rank, results[rank][place]) for rank in ranks) for place in range(len(results[ranks[0]]))]
    return tuple(LocalTensor(column) if isinstance(column[ranks[0]], torch.Tensor) else column for column in columns)


def as_sizes(sizes: Sequence[int] | ByRank) -> list[Any]:
    """Sizes as torch's collectives take them; a ``ByRank`` of lists as integers that differ between ranks."""
    if not isinstance(sizes, ByRank):
        return list(sizes)
    from runtime.torch_compat.local_tensors import LocalIntNode

    count = len(next(iter(sizes.values())))
    return [
        torch.SymInt(LocalIntNode({rank: of_rank[place] for rank, of_rank in sizes.items()})) for place in range(count)
    ]


def _ranks_of(arguments: Sequence[Any]) -> list[int] | None:
    """The ranks of ``LocalTensorMode``; None where a tensor is one rank's."""
    tensors = (argument for argument in arguments if isinstance(argument, torch.Tensor))
    if all(local_tensor_mode_of(tensor) is None for tensor in tensors):
        return None
    from runtime.torch_compat.local_tensors import LocalTensor

    several = next(argument for argument in arguments if isinstance(argument, LocalTensor))
    return sorted(several._local_tensors)
