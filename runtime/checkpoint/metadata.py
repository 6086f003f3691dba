"""What a checkpoint holds and where, as JSON: DCP's metadata without its pickle.

::

    {"tensors": {"model/w": {"dtype": "F32", "shape": [4, 8],
                             "pieces": [{"offsets": [0, 0], "sizes": [2, 8], "file": "rank-00000.safetensors",
                                         "begin": 4096}]}},
     "objects": {"training": "rank-00000.json"},
     "files": {"rank-00000.safetensors": {"size": 4224, "blocks": ["0a1b2c3d"]}}}

``begin`` is the byte at which a piece begins, row by row, in its file; ``blocks`` are CRC-32 checksums.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from cost_models.files import parse_json
from runtime.checkpoint.checked_blocks import BLOCK
from runtime.weight_files.format import DTYPE_NAMES, DTYPES


@dataclass(frozen=True)
class StoredPlace:
    """Where a piece, or an object, is stored."""

    file: str
    begin: int
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class StoredFile:
    """A file of a checkpoint: its bytes, and the checksums of its blocks."""

    size: int
    checksums: tuple[int, ...]


def format_metadata(
    metadata: Metadata, places: Mapping[MetadataIndex, StoredPlace], files: Mapping[str, StoredFile]
) -> str:
    """The JSON of what DCP and the writers of all ranks say."""
    tensors: dict[str, Any] = {}
    objects: dict[str, str] = {}
    for name, stored in metadata.state_dict_metadata.items():
        if not isinstance(stored, TensorStorageMetadata):
            objects[name] = places[MetadataIndex(name)].file
            continue
        pieces = []
        for chunk in stored.chunks:
            place = places[MetadataIndex(name, chunk.offsets)]
            pieces.append(
                {"offsets": [*chunk.offsets], "sizes": [*chunk.sizes], "file": place.file, "begin": place.begin}
            )
        tensors[name] = {
            "dtype": DTYPE_NAMES[stored.properties.dtype], "shape": [*stored.size], "pieces": pieces
        }  # fmt: skip
    stored_files = {
        name: {"size": file.size, "blocks": [f"{checksum:08x}" for checksum in file.checksums]}
        for name, file in sorted(files.items())
    }
    return json.dumps({"tensors": tensors, "objects": objects, "files": stored_files}, indent=0)


def parse_metadata(text: str) -> tuple[Metadata, dict[str, StoredFile]]:
    """The inverse: DCP's metadata, with a ``StoredPlace`` for every piece and object, and the files.

    Raises:
        ValueError: if it is not of this form, or a piece does not lie in its tensor and its file.
    """
    try:
        data = parse_json(text)
        files = {name: _parse_file(name, entry) for name, entry in data["files"].items()}
        places: dict[MetadataIndex, Any] = {}
        entries: dict[str, Any] = {}
        for name, entry in data["tensors"].items():
            entries[name] = _parse_tensor(name, entry, files, places)
        for name, file in data["objects"].items():
            if file not in files:
                raise ValueError(f"{name!r} is in no file of the checkpoint")
            entries[name] = BytesStorageMetadata()
            places[MetadataIndex(name)] = StoredPlace(file, 0)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is not of the form that is written today ({error!r})") from error
    return Metadata(state_dict_metadata=entries, storage_data=places), files


def _parse_file(name: str, entry: Mapping[str, Any]) -> StoredFile:
    if name in ("", ".", "..") or os.path.basename(name) != name:
        raise ValueError(f"it names {name[:80]!r}, which is not the name of a file in the checkpoint")
    (size,) = _counts([entry["size"]])
    checksums = tuple(int(text, 16) for text in entry["blocks"])
    if len(checksums) != math.ceil(size / BLOCK):
        raise ValueError(f"{len(checksums)} checksums do not go with a file of {size} bytes")
    return StoredFile(size, checksums)


def _parse_tensor(
    name: str, entry: Mapping[str, Any], files: Mapping[str, StoredFile], places: dict[MetadataIndex, Any]
) -> TensorStorageMetadata:
    dtype, shape = DTYPES[entry["dtype"]], _counts(entry["shape"])
    chunks = []
    for piece in entry["pieces"]:
        offsets, sizes, (begin,) = _counts(piece["offsets"]), _counts(piece["sizes"]), _counts([piece["begin"]])
        inside = len(offsets) == len(sizes) == len(shape) and all(
            offset + size <= whole for offset, size, whole in zip(offsets, sizes, shape)
        )
        end = begin + math.prod(sizes) * dtype.itemsize
        if not inside or piece["file"] not in files or end > files[piece["file"]].size:
            raise ValueError(f"a piece of {name!r} does not lie in the tensor and in its file")
        chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
        places[MetadataIndex(name, chunk.offsets)] = StoredPlace(piece["file"], begin, sizes)
        chunks.append(chunk)
    return TensorStorageMetadata(properties=TensorProperties(dtype=dtype), size=torch.Size(shape), chunks=chunks)


def _counts(numbers: Any) -> tuple[int, ...]:
    if not isinstance(numbers, list) or not all(type(number) is int and 0 <= number < 2**62 for number in numbers):
        raise ValueError("sizes and offsets are whole numbers of at most 62 bits")
    return tuple(numbers)
