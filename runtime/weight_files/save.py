"""Saving safetensors files: every rank writes its rectangles to where they belong in files that all share.

The alternative is to send pieces to a rank that assembles a tensor. Writing in place needs no traffic and no memory
beside the rank's own pieces, and all ranks write at once; it asks that the directory is on a file system which all
ranks share (one machine's disk, Lustre, GPFS and the like), as a checkpoint that any plan can resume does anyway.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from cost_models.files import check_writable, write_text
from runtime.agreement.ranks_together import gathered, rank_in, together
from runtime.state.owned import Owned
from runtime.weight_files.find_files import INDEX_SUFFIX, STEM, SUFFIX
from runtime.weight_files.format import bytes_of, make_header, write_exactly
from runtime.weight_files.plan_free_names import named_alike
from runtime.weight_files.rectangles import runs


@dataclass(frozen=True)
class _Tensor:
    """A tensor to be stored, as all ranks agree on it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _File:
    """A file to be written, under a name of its own until it is complete."""

    path: Path
    header: bytes
    begins: dict[str, int]
    num_bytes: int

    @property
    def target(self) -> Path:
        """Where ``path`` leads."""
        return Path(os.path.realpath(self.path))

    @property
    def unfinished(self) -> Path:
        return self.target.with_name(f".{self.target.name}.part")


def save_weights(
    owned: Sequence[Owned],
    directory: str | Path,
    *,
    order: Sequence[str] = (),
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5_000_000_000,
    group: dist.ProcessGroup | None = None,
) -> tuple[Path, ...]:
    """Write the model's weights as safetensors files, with an index if there are several; all ranks must call it.

    Tied tensors are stored once, as Hugging Face does. A file takes its final name once all
    its bytes are on disk; files of an earlier set in the directory are then removed.

    Args:
        owned: this rank's pieces; ``primary`` ones are written.
        directory: made if need be; on a file system that all ranks share.
        order: names in the order in which tensors are put into files; those not named come last. A tied tensor is
            stored under the first of its names here.
        dtype: of floating-point tensors in the files; None to keep each one's own.
        max_file_bytes: a file ends before the tensor that would make it larger (a larger tensor has its own).

    Returns:
        the files, in order, on every rank.

    Raises:
        ValueError: on all ranks, if a tensor is still on meta, ranks disagree on one, no rank holds some part of
            one, or a rank cannot see the directory.
    """
    folder = Path(directory)
    owned = named_alike(owned, order)
    parts = gathered(together(lambda: _own_tensors(owned, dtype), group), group)
    # The same on all ranks, so that none needs to tell the others of an error.
    tensors = _agreed(parts, order)
    files = _files(folder, tensors, max_file_bytes)
    together(lambda: _start(files, folder) if rank_in(group) == 0 else None, group)
    together(lambda: _write(files, owned, dtype), group)
    together(lambda: _finish(files, folder, tensors) if rank_in(group) == 0 else None, group)
    return tuple(file.path for file in files)


def _own_tensors(owned: Sequence[Owned], dtype: torch.dtype | None) -> list[tuple[_Tensor, int]]:
    """The tensors that this rank will write, and how many elements of each."""
    written = []
    for piece in owned:
        if not piece.persistent or not piece.primary:
            continue
        if piece.tensor.is_meta:
            raise ValueError(f"{piece.name!r} is still on the meta device: load or initialise the model first")
        tensor = _Tensor(piece.name, _stored_dtype(piece.tensor, dtype), piece.shape)
        written.append((tensor, piece.tensor.numel()))
    return written


def _stored_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _agreed(parts: Sequence[Sequence[tuple[_Tensor, int]]], order: Sequence[str]) -> list[_Tensor]:
    """All tensors of all ranks, in order."""
    by_name: dict[str, _Tensor] = {}
    elements: dict[str, int] = {}
    for tensor, count in (entry for part in parts for entry in part):
        if by_name.setdefault(tensor.name, tensor) != tensor:
            raise ValueError(f"ranks disagree on {tensor.name!r}: {by_name[tensor.name]} and {tensor}")
        elements[tensor.name] = elements.get(tensor.name, 0) + count
    for name, tensor in by_name.items():
        if elements[name] != math.prod(tensor.shape):
            raise ValueError(
                f"ranks write {elements[name]} elements of {name!r}, which has {math.prod(tensor.shape)}: "
                "every part must have one primary owner"
            )
    places = {name: place for place, name in enumerate(order)}
    return sorted(by_name.values(), key=lambda tensor: places.get(tensor.name, len(places)))


def _files(folder: Path, tensors: Sequence[_Tensor], max_file_bytes: int) -> list[_File]:
    groups: list[list[_Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.num_bytes > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.num_bytes
    files = []
    for number, group in enumerate(groups, 1):
        name = STEM + SUFFIX if len(groups) == 1 else f"{STEM}-{number:05d}-of-{len(groups):05d}{SUFFIX}"
        header, begins = make_header([(tensor.name, tensor.dtype, tensor.shape) for tensor in group])
        files.append(_File(folder / name, header, begins, len(header) + sum(tensor.num_bytes for tensor in group)))
    return files


def _start(files: Sequence[_File], folder: Path) -> None:
    """Make the files, with their headers and their full length."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        check_writable(file.path)
    for file in files:
        file.unfinished.unlink(missing_ok=True)
        with file.unfinished.open("xb") as stream:  # never through a link that somebody else put there
            stream.write(file.header)
            stream.truncate(file.num_bytes)


def _write(files: Sequence[_File], owned: Sequence[Owned], dtype: torch.dtype | None) -> None:
    file_of = {name: file for file in files for name in file.begins}
    by_file: dict[Path, list[Owned]] = {}
    for piece in owned:
        if piece.persistent and piece.primary and piece.tensor.numel():
            by_file.setdefault(file_of[piece.name].unfinished, []).append(piece)
    for unfinished, pieces in by_file.items():
        with _opened(unfinished) as descriptor:
            for piece in pieces:
                _write_piece(descriptor, piece, dtype, file_of[piece.name].begins[piece.name])


@contextmanager
def _opened(file: Path) -> Iterator[int]:
    try:
        descriptor = os.open(file, os.O_WRONLY)
    except FileNotFoundError as error:
        raise ValueError(
            f"this rank does not see {file}, which the first rank made: the directory must be on a file system that "
            "all ranks share"
        ) from error
    try:
        yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_piece(descriptor: int, piece: Owned, dtype: torch.dtype | None, begin: int) -> None:
    tensor = piece.tensor.detach()
    stored = tensor.to("cpu", _stored_dtype(tensor, dtype)).contiguous()
    memory, width = bytes_of(stored), stored.dtype.itemsize
    length, starts = runs(piece.shape, piece.offsets, tuple(stored.shape))
    for number, start in enumerate(starts):
        part = memory[number * length * width : (number + 1) * length * width]
        write_exactly(descriptor, part, begin + start * width)


def _finish(files: Sequence[_File], folder: Path, tensors: Sequence[_Tensor]) -> None:
    """Give the files their names, and remove those of an earlier set."""
    for file in files:
        os.replace(file.unfinished, file.target)
    index = folder / (STEM + INDEX_SUFFIX)
    if len(files) > 1:
        write_text(index, _index(files, tensors))
    else:
        index.unlink(missing_ok=True)
    written = {file.path for file in files}
    for old in (*folder.glob(f"{STEM}-*-of-*{SUFFIX}"), folder / (STEM + SUFFIX)):
        if old not in written:
            old.unlink(missing_ok=True)


def _index(files: Sequence[_File], tensors: Sequence[_Tensor]) -> str:
    weight_map = {name: file.path.name for file in files for name in file.begins}
    total = sum(tensor.num_bytes for tensor in tensors)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, indent=2)
