"""Checkpoints of earlier versions: DCP's own files, with pickles that may run anything when they are read."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex

from runtime.checkpoint import directory as folders
from runtime.checkpoint.folder_storage import load_pieces
from runtime.checkpoint.rectangles_of_tensors import Content


class PickledCheckpoint:
    """A folder that an earlier version wrote; only for those who trust whoever did."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError if what is there cannot be read."""
        self.folder = folder
        try:
            self.metadata = FileSystemReader(folder).read_metadata()
        except Exception as error:  # a pickle of anything else may raise anything
            raise ValueError(f"{folder / folders.PICKLED_METADATA} cannot be read ({error!r})") from error

    def read(self, content: Content, *, group: dist.ProcessGroup | None = None, alone: bool = False) -> None:
        """Fill the pieces of ``content``; ``alone`` without the other ranks.

        Raises:
            ValueError: if the files cannot be read.
        """
        load_pieces(FileSystemReader(self.folder), content, self.folder, group=group, alone=alone)

    def object(self, name: str) -> Any:
        """The object that was stored as ``name``.

        Raises:
            ValueError: if it cannot be read.
        """
        place: Any = self.metadata.storage_data[MetadataIndex(name)]  # type: ignore[index]
        try:
            with (self.folder / place.relative_path).open("rb") as stream:
                stream.seek(place.offset)
                content = io.BytesIO(stream.read(place.length))
            return torch.load(content, map_location="cpu", weights_only=False)
        except Exception as error:  # see above
            raise ValueError(f"{self.folder / place.relative_path} cannot be read ({error!r})") from error
