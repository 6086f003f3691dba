"""What the islands have of one model: where each tensor lies on all ranks, and which are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from runtime.agreement.ranks_together import gathered
from runtime.islands.island_ranks import Islands
from runtime.islands.shared_cells import Extent, SharedCell, shared_cells
from runtime.state.owned import Owned


@dataclass(frozen=True)
class SharedState:
    """What all islands have.

    Attributes:
        cells: of every parameter and buffer, by name.
        trained: elements of the parameters that are trained, in the order in which the first island has them.
    """

    cells: dict[str, list[SharedCell]]
    trained: dict[str, int]


def shared_state(
    pieces: Mapping[str, Owned], trained: Sequence[str], islands: Islands, arguments: tuple[Any, ...]
) -> SharedState:
    """What all ranks hold of a model; all ranks must call this.

    Args:
        pieces: what this rank holds, by name.
        trained: names of what this rank holds that is trained.
        arguments: what must be the same on all ranks.

    Raises:
        ValueError: on all ranks, if they have other arguments, or other parameters, or train others.
    """
    own = {
        name: (piece.shape, (piece.offsets, tuple(piece.tensor.shape)), name in trained)
        for name, piece in pieces.items()
        if piece.tensor.numel()
    }
    by_rank = gathered((islands.members, arguments, own))
    arguments_by_rank = [(members, others) for members, others, _ in by_rank]
    if len(set(arguments_by_rank)) > 1:
        rank = next(rank for rank, other in enumerate(arguments_by_rank) if other != arguments_by_rank[0])
        raise ValueError(
            "islands, inner_steps, fragments, wire_format and synchronous_steps must be the same on all ranks: rank 0 "
            f"has {arguments_by_rank[0]}, rank {rank} {arguments_by_rank[rank]}"
        )
    facts: dict[str, tuple[tuple[int, ...], bool]] = {}
    holders: dict[str, list[dict[Extent, tuple[int, ...]]]] = {}
    for rank, (_, _, rectangles) in enumerate(by_rank):
        for name, (shape, extent, trains) in rectangles.items():
            first_shape, first_trains = facts.setdefault(name, (shape, trains))
            if first_shape != shape:
                raise ValueError(f"{name!r} is {list(first_shape)} on one island and {list(shape)} on another")
            if first_trains != trains:
                raise ValueError(
                    f"{name!r} is trained on some ranks and not on others: freeze the same parameters on all islands, "
                    "and make the inner optimizers of the same"
                )
            around = holders.setdefault(name, [{} for _ in islands.members])[islands.island_of(rank)]
            around[extent] = (*around.get(extent, ()), rank)
    cells = {name: shared_cells(name, by_island) for name, by_island in holders.items()}
    sizes = {name: torch.Size(shape).numel() for name, (shape, trains) in facts.items() if trains}
    return SharedState(cells, sizes)
