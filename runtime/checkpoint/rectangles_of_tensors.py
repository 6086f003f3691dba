"""Rectangles of named tensors as ``torch.distributed.checkpoint`` plans them.

DCP stores a tensor as chunks with offsets, and finds the chunks that a wanted rectangle overlaps. Its planners are the
public way to say what a rank holds without a DTensor: rectangles here may be of any size, empty ones included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list


@dataclass(frozen=True)
class Piece:
    """The rectangle from ``offsets`` to ``offsets + tensor.shape`` of a tensor of ``shape``."""

    tensor: torch.Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=self.tensor.shape)

    def copied(self) -> Piece:
        """The same on the CPU, in memory of its own."""
        tensor = self.tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        return Piece(tensor, self.shape, self.offsets)


#: What a rank stores or asks for: pieces by the tensor's name, other objects as JSON by name.
Content = dict[str, Any]


class SavePieces(DefaultSavePlanner):
    """Writes the pieces and objects of a ``Content``; every name of an object belongs to one rank."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        items = [
            _write_piece(name, value) if isinstance(value, Piece) else _write_object(name)
            for name, value in self.state_dict.items()
            if not isinstance(value, Piece) or value.tensor.numel()
        ]
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        value = self.state_dict[write_item.index.fqn]
        return value.tensor.detach() if isinstance(value, Piece) else value


def _write_piece(name: str, piece: Piece) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(name, torch.Size(piece.offsets)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=piece.chunk,
            properties=TensorProperties(dtype=piece.tensor.dtype),
            size=torch.Size(piece.shape),
        ),
    )


def _write_object(name: str) -> WriteItem:
    return WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO)


class LoadPieces(DefaultLoadPlanner):
    """Reads into the pieces of a ``Content``, which has no objects."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: Content, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, value in self.state_dict.items():
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            if value.tensor.numel():
                items.extend(create_read_items_for_chunk_list(name, stored, [value.chunk]))
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].tensor.detach()


def check_pieces(content: Mapping[str, Piece], metadata: Metadata) -> None:
    """Refuse a checkpoint that has not, or in another shape, what is asked for.

    Raises:
        ValueError: naming the tensor.
    """
    for name, value in content.items():
        stored = metadata.state_dict_metadata.get(name)
        if not isinstance(stored, TensorStorageMetadata):
            raise ValueError(f"the checkpoint has no tensor {name!r}: it is of another model")
        if tuple(stored.size) != value.shape:
            raise ValueError(
                f"{name!r} has shape {list(stored.size)} in the checkpoint, but {list(value.shape)} here: it is of "
                "another model"
            )
        covered = sum(math.prod(chunk.sizes) for chunk in stored.chunks)
        if covered != math.prod(value.shape):
            raise ValueError(f"the checkpoint holds {covered} of the {math.prod(value.shape)} elements of {name!r}")


def names_under(metadata: Metadata, prefix: str) -> Sequence[str]:
    """Names of the checkpoint that begin with ``prefix``."""
    return sorted(name for name in metadata.state_dict_metadata if name.startswith(prefix))
