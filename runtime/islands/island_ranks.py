"""``planner.Islands``: which ranks are near each other, and the mesh of those around this one."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from passes.ir.types import MeshShape
from runtime.launch.groups import mesh_of_axes
from runtime.launch.process import init


class Islands:
    """All ranks of the job as islands of consecutive ones, with slow links between them.

    Args:
        sizes: how many islands of the same size there are, or the number of ranks of each, in rank order.

    Attributes:
        members: ranks of each island.
        index: the island of this rank.

    Raises:
        ValueError: for less than two islands, one without ranks, or sizes that do not add up to the world size.
    """

    def __init__(self, sizes: int | Sequence[int]) -> None:
        process = init()
        counts = _equal_sizes(sizes, process.world_size) if isinstance(sizes, int) else list(sizes)
        if len(counts) < 2 or min(counts) < 1 or sum(counts) != process.world_size:
            raise ValueError(
                f"islands of {counts} ranks: there must be at least two, each with a rank, and {process.world_size} "
                "ranks together, as many as processes were started"
            )
        ends = list(itertools.accumulate(counts))
        self.members = tuple(tuple(range(end - count, end)) for end, count in zip(ends, counts))
        self.index = next(index for index, ranks in enumerate(self.members) if process.rank in ranks)
        self._device_type = process.device.type

    @property
    def count(self) -> int:
        """Number of islands."""
        return len(self.members)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's island."""
        return self.members[self.index]

    def mesh(self, axes: Mapping[str, int] | str) -> DeviceMesh:
        """A mesh over this rank's island, for ``planner.compile``; all ranks of the island must call it.

        Args:
            axes: sizes (``"pp=2,dp=2"``); other islands may have others.

        Raises:
            ValueError: if the sizes do not multiply to the island's.
        """
        shape = MeshShape.parse(axes) if isinstance(axes, str) else MeshShape.from_dict(axes)
        if shape.num_devices != len(self.ranks):
            raise ValueError(f"mesh {shape} has {shape.num_devices} ranks, island {self.index} has {len(self.ranks)}")
        ranks = torch.tensor(self.ranks, device="cpu").reshape(shape.sizes)
        return mesh_of_axes(self._device_type, ranks, shape.names)

    def island_of(self, rank: int) -> int:
        """The island that a rank is on."""
        return next(index for index, ranks in enumerate(self.members) if rank in ranks)

    def __repr__(self) -> str:
        return f"Islands({[len(ranks) for ranks in self.members]}), rank {dist.get_rank()} on island {self.index}"


def _equal_sizes(count: int, world_size: int) -> list[int]:
    if count < 1 or world_size % count:
        raise ValueError(f"{world_size} processes are not {count} islands of the same size: say the size of each")
    return [world_size // count] * count
