"""The model's part of a checkpoint: its state dict, by names of the original."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch.distributed.checkpoint.metadata import Metadata

from runtime.checkpoint.rectangles_of_tensors import Content, Piece, names_under
from runtime.state.owned import Owned
from runtime.weight_files import materialise

PREFIX = "model/"


def model_to_save(owned: Sequence[Owned], *, every_copy: bool = False) -> Content:
    """The pieces that this rank writes; with ``every_copy`` all that it holds, also outside of the state dict.

    Raises:
        ValueError: if one is still on meta.
    """
    content: Content = {}
    for piece in owned:
        if not every_copy and not (piece.persistent and piece.primary):
            continue
        if piece.tensor.is_meta:
            raise ValueError(f"{piece.name!r} is still on the meta device: load or initialise the model first")
        content[PREFIX + piece.name] = Piece(piece.tensor.detach(), piece.shape, piece.offsets)
    return content


def model_to_load(owned: Sequence[Owned]) -> Content:
    """The pieces that this rank requests; tensors are the model's own, possibly still on meta."""
    return {PREFIX + piece.name: Piece(piece.tensor, piece.shape, piece.offsets) for piece in owned if piece.persistent}


def check_model_names(metadata: Metadata, names: Collection[str]) -> None:
    """Refuse a checkpoint with tensors that the model has not.

    Raises:
        ValueError: naming some.
    """
    known_names = set(names)
    foreign = [name.removeprefix(PREFIX) for name in names_under(metadata, PREFIX)]
    foreign = [name for name in foreign if name not in known_names]
    if foreign:
        raise ValueError(
            f"the checkpoint is of another model: it has {', '.join(map(repr, foreign[:3]))}"
            f"{' and more' if len(foreign) > 3 else ''}, which this one has not"
        )


def with_memory(content: Content, owned: Sequence[Owned], device: torch.device | str) -> None:
    """Replace pieces on meta by the model's tensors with memory on ``device``."""
    by_tensor = {id(piece.tensor): piece for piece in owned}
    for name, value in content.items():
        if isinstance(value, Piece) and id(value.tensor) in by_tensor:
            content[name] = Piece(materialise(by_tensor[id(value.tensor)], device), value.shape, value.offsets)
