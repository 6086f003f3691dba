"""``optimizer.pt`` out of a checkpoint: what ``torch.save`` of an ordinary optimizer on one process writes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from runtime.checkpoint.folder_storage import StoredCheckpoint
from runtime.checkpoint.optimizer_state import NUMBERS, TENSORS
from runtime.checkpoint.rectangles_of_tensors import Content, Piece, names_under
from runtime.parameters.offloaded_optimizer import MASTER

#: What torch's and transformers' readers refuse: it has no groups.
NO_STATE: Mapping[str, Any] = {"state": {}, "param_groups": []}


def write_stock_optimizer(checkpoint: Path, order: Sequence[Sequence[str]], file: Path) -> None:
    """Write ``file`` from what ranks stored in ``checkpoint``; to be called on one rank.

    Tensors are put together in a file on the disk of ``file``, so that this rank needs no memory for them.

    Args:
        order: names of the parameters of each group, as an ordinary optimizer has been given them.

    Raises:
        ValueError: if the checkpoint cannot be read.
    """
    stored = StoredCheckpoint(checkpoint)
    groups = stored.object("training/groups")
    numbers = {name: number for number, name in enumerate(name for names in order for name in names)}
    content: Content = {}
    places: dict[str, tuple[str, str]] = {}
    for prefix in (TENSORS, NUMBERS):
        for full in names_under(stored.metadata, prefix):
            name, _, key = full.removeprefix(prefix).rpartition("/")
            if name in numbers and key != MASTER:
                content[full] = _on_disk(stored.metadata.state_dict_metadata[full], file.parent)
                places[full] = name, key
    stored.read(content, alone=True)
    state: dict[int, dict[str, Any]] = {}
    for full, (name, key) in sorted(places.items(), key=lambda item: numbers[item[1][0]]):
        tensor = content[full].tensor
        state.setdefault(numbers[name], {})[key] = tensor if full.startswith(TENSORS) else tensor.item()
    save(
        {
            "state": state,
            "param_groups": [
                {
                    **{name: value for name, value in group["options"].items() if name != "param_names"},
                    "params": [numbers[name] for name in names],
                }
                for group, names in zip(groups, order, strict=True)
            ],
        },
        file,
    )


def save(value: Any, file: Path) -> None:
    """``torch.save``, after which the file is all there or as it was."""
    unfinished = file.with_name(f".unfinished-{file.name}")
    torch.save(value, unfinished)
    os.replace(unfinished, file)


def _on_disk(stored: Any, folder: Path) -> Piece:
    """A whole tensor to read into, whose memory is a file that is gone with it; a single number is in memory."""
    assert isinstance(stored, TensorStorageMetadata)
    shape, dtype = tuple(stored.size), stored.properties.dtype
    if stored.size.numel() < 2:
        return Piece(torch.empty(shape, dtype=dtype), shape, (0,) * len(shape))
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".unfinished-") as scratch:
        flat = torch.from_file(scratch.name, shared=True, size=stored.size.numel(), dtype=dtype)
    return Piece(flat.view(shape), shape, (0,) * len(shape))
