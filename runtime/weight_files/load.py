"""Loading safetensors files: every rank reads the bytes of what it owns, and no others."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from runtime.agreement.ranks_together import together
from runtime.state.owned import Owned
from runtime.weight_files.find_files import files_by_name, model_names, tensors_by_file, without
from runtime.weight_files.format import Stored, bytes_of, read_exactly, read_header
from runtime.weight_files.materialise import materialise
from runtime.weight_files.rectangles import runs


@dataclass(frozen=True)
class LoadedFiles:
    """What loading did on this rank.

    Attributes:
        bytes_read: from the files, headers included.
        missing: names of the model that this rank owns and the files have not.
        unexpected: names in the files that the model has not.
    """

    bytes_read: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


@dataclass(frozen=True)
class _FileSource:
    """Where the tensor of an owned piece is stored."""

    owned: Owned
    stored: Stored


def load_weights(
    owned: Sequence[Owned],
    path: str | Path,
    *,
    names: Collection[str],
    strict: bool = True,
    device: torch.device | str = "cpu",
    prefix: str | None = None,
    ignore: Collection[str] = (),
    rename: Callable[[str], str] | None = None,
    group: dist.ProcessGroup | None = None,
) -> LoadedFiles:
    """Fill what this rank owns from safetensors files; all ranks of ``group`` must call it.

    A rank reads the byte ranges of its rectangles, each straight into the piece (or, where dtype or device differ,
    through one buffer of the piece's size). Dtypes are converted to the owner's. Nothing is written before all names
    and shapes are found to fit, on every rank.

    Args:
        owned: this rank's pieces; those on meta get memory on ``device``.
        path: a file, an index, or a directory that has either.
        names: all names of the model's state dict, those of other ranks and aliases included.
        strict: refuse missing and unexpected names.
        prefix: what the names of Hugging Face's base model begin with in a model with a head; it may be missing or
            extra in the files. None to infer it.
        ignore: regular expressions of names that the files may have in vain.
        rename: gives the model's name of a stored name that the model does not know.

    Raises:
        ValueError: on all ranks, for files that are absent, damaged or cut short; for a tensor of another shape, or a
            dtype that cannot become the owner's; with ``strict`` for missing and unexpected names.
    """
    sources, loaded = together(
        lambda: _find(owned, path, names=names, strict=strict, prefix=prefix, ignore=ignore, rename=rename), group
    )
    return together(lambda: _read(sources, loaded, device=device), group)


def _find(
    owned: Sequence[Owned],
    path: str | Path,
    *,
    names: Collection[str],
    strict: bool,
    prefix: str | None,
    ignore: Collection[str],
    rename: Callable[[str], str] | None,
) -> tuple[list[_FileSource], LoadedFiles]:
    headers = _Headers(files_by_name(path))
    stored_as = _stored_names(headers.names, names, prefix=prefix, rename=rename)
    piece_of, missing = {}, []
    for piece in owned:
        if not piece.persistent:
            continue
        stored_name = next((stored_as[name] for name in (piece.name, *piece.aliases) if name in stored_as), None)
        if stored_name is None:
            missing.append(piece.name)
        else:
            piece_of[stored_name] = piece
    held_beside = {name for piece in owned for name in (piece.name, *piece.aliases)}
    unexpected = without((stored_as[name] for name in stored_as.keys() - set(names) - held_beside), ignore)
    if strict and (missing or unexpected):
        raise ValueError(
            f"{path} does not fit the model: missing {_few(missing)}, unexpected {_few(unexpected)}; "
            "strict=False takes what fits"
        )
    stored_tensors = headers.tensors(piece_of)
    sources = [_FileSource(piece, stored_tensors[name]) for name, piece in piece_of.items()]
    for source in sources:
        _check(source)
    return sources, LoadedFiles(headers.bytes_read, tuple(missing), tuple(unexpected))


def _stored_names(
    stored: Collection[str], names: Collection[str], *, prefix: str | None, rename: Callable[[str], str] | None
) -> dict[str, str]:
    """The stored name of every name of the model's that the files have, and of names that the model has not."""
    own_names = set(names)
    renamed = {name: name if rename is None or name in own_names else rename(name) for name in stored}
    of_model = model_names(renamed.values(), own_names, prefix=prefix)
    stored_as: dict[str, str] = {}
    for name, new in renamed.items():
        stored_as.setdefault(of_model[new], name)
    return stored_as


class _Headers:
    """The headers of a set of files, each read when it is asked for."""

    def __init__(self, files: Mapping[str, Path] | Path) -> None:
        self.bytes_read = 0
        self._headers: dict[Path, dict[str, Stored]] = {}
        self.files = dict.fromkeys(self._header(files), files) if isinstance(files, Path) else dict(files)
        self.names = self.files.keys()

    def _header(self, file: Path) -> dict[str, Stored]:
        if file not in self._headers:
            self._headers[file], count = read_header(file)
            self.bytes_read += count
        return self._headers[file]

    def tensors(self, names: Collection[str]) -> dict[str, Stored]:
        """Where the named tensors are."""
        tensors_by_name: dict[str, Stored] = {}
        for file, inside in tensors_by_file(self.files, names).items():
            header = self._header(file)
            absent = [name for name in inside if name not in header]
            if absent:
                raise ValueError(f"{file} has no {_few(absent)}, though the index says so")
            tensors_by_name.update((name, header[name]) for name in inside)
        return tensors_by_name


def _check(source: _FileSource) -> None:
    owned, stored = source.owned, source.stored
    if stored.shape != owned.shape:
        raise ValueError(
            f"{owned.name!r} has shape {list(stored.shape)} in {stored.file}, but {list(owned.shape)} in the model"
        )
    if _kind(stored.dtype) != _kind(owned.tensor.dtype):
        raise ValueError(
            f"{owned.name!r} is {stored.dtype} in {stored.file}, which cannot become the model's {owned.tensor.dtype}"
        )


def _kind(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "bool"
    return "floating" if dtype.is_floating_point else "complex" if dtype.is_complex else "integer"


def _read(sources: Sequence[_FileSource], loaded: LoadedFiles, *, device: torch.device | str) -> LoadedFiles:
    count = loaded.bytes_read
    by_file: dict[Path, list[_FileSource]] = {}
    for source in sources:
        by_file.setdefault(source.stored.file, []).append(source)
    for file, inside in by_file.items():
        descriptor = os.open(file, os.O_RDONLY)
        try:
            # In the order of the file: disks and file systems read ahead.
            for source in sorted(inside, key=lambda one: one.stored.begin):
                count += _read_piece(descriptor, source, materialise(source.owned, device))
        finally:
            os.close(descriptor)
    return LoadedFiles(count, loaded.missing, loaded.unexpected)


def _read_piece(descriptor: int, source: _FileSource, target: torch.Tensor) -> int:
    """Read a rectangle into ``target``; the number of bytes."""
    stored, owned = source.stored, source.owned
    direct = target.device.type == "cpu" and target.dtype == stored.dtype and target.is_contiguous()
    buffer = target if direct else torch.empty(target.shape, dtype=stored.dtype, device="cpu")
    if buffer.numel() == 0:
        return 0
    memory, width = bytes_of(buffer), stored.dtype.itemsize
    length, starts = runs(stored.shape, owned.offsets, tuple(buffer.shape))
    for number, start in enumerate(starts):
        part = memory[number * length * width : (number + 1) * length * width]
        read_exactly(descriptor, part, stored.begin + start * width)
    if not direct:
        target.copy_(buffer)
    return len(memory)


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown or "none"
