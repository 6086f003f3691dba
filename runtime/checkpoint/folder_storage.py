"""Reading and writing a checkpoint's folder: DCP says which rank writes and reads what, the files are our own.

Every rank writes its pieces into a safetensors file and its objects into a JSON file; the first rank then writes where
all of it is (``runtime.checkpoint.metadata``). Nothing in a checkpoint is a pickle.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult

from cost_models.files import parse_json, read_text
from runtime.agreement.ranks_together import num_ranks, rank_in
from runtime.checkpoint import directory as folders
from runtime.checkpoint.checked_blocks import BlockReader, BlockWriter
from runtime.checkpoint.metadata import StoredFile, StoredPlace, format_metadata, parse_metadata
from runtime.checkpoint.plain import decode, encode
from runtime.checkpoint.rectangles_of_tensors import Content, LoadPieces, Piece, SavePieces, names_under
from runtime.torch_compat.process_groups import groups_stay
from runtime.weight_files.format import bytes_of, make_header
from runtime.weight_files.rectangles import runs

# One process needs no process group: nothing to warn of.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

#: Tensors inside of objects, by the object's name and their number in it.
INSIDE = "inside/"


def put_object(content: Content, name: str, value: Any, *, where: str) -> None:
    """Add an object to what this rank writes, as it is now.

    Raises:
        ValueError: if it is not plain data; ``where`` names it.
    """
    encoded = encode(value, where=where)
    content[name] = encoded.text
    for number, tensor in enumerate(encoded.tensors):
        piece = Piece(tensor, tuple(tensor.shape), (0,) * tensor.dim())
        # A piece without elements is not written.
        if tensor.numel() == 0:
            raise ValueError(f"{where} holds an empty tensor of shape {list(tensor.shape)}, which cannot be stored")
        content[f"{INSIDE}{name}/{number}"] = piece.copied()


@dataclass(frozen=True)
class _Written:
    """What one rank wrote: where its pieces and objects are, and its files."""

    places: dict[MetadataIndex, StoredPlace]
    files: dict[str, StoredFile]


class _FolderWriter(StorageWriter):
    """Commits the checkpoint where DCP finishes it: on one rank, once all ranks have written and synced their files."""

    def __init__(
        self, directory: Path, name: str, manifest: Mapping[str, Any], *, rank: int, keep_last: int | None
    ) -> None:
        self.folder = directory / (folders.UNFINISHED + name)
        self._commit = (directory, name, manifest)
        self._rank = rank
        self._keep_last = keep_last

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        objects = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
        written = _Written({}, {})
        if not self.folder.is_dir():
            raise ValueError(
                f"this rank does not see {self.folder}, which the first rank made: the directory must be on a file "
                "system that all ranks share"
            )
        if tensors:
            self._write_tensors(tensors, planner, written)
        if objects:
            self._write_objects(objects, planner, written)
        future: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        future.set_result([WriteResult(index=MetadataIndex(""), size_in_bytes=0, storage_data=written)])
        return future

    def _write_tensors(self, items: list[WriteItem], planner: SavePlanner, written: _Written) -> None:
        file = f"rank-{self._rank:05d}.safetensors"
        by_key = {_key_of(item.index): item for item in items}
        header, begins = make_header([(key, *_described(item)) for key, item in by_key.items()])
        with BlockWriter(self.folder / file) as writer:
            writer.write(header)
            for key in sorted(begins, key=begins.__getitem__):
                item = by_key[key]
                # One piece at a time: beside its own shards a rank holds no more than the largest of them.
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, torch.Tensor) and writer.size == begins[key]
                writer.write(bytes_of(tensor.detach().to("cpu").contiguous()))
                written.places[item.index] = StoredPlace(file, begins[key], tuple(tensor.shape))
        written.files[file] = StoredFile(writer.size, tuple(writer.checksums))

    def _write_objects(self, items: list[WriteItem], planner: SavePlanner, written: _Written) -> None:
        file = f"rank-{self._rank:05d}.json"
        entries = [f"{json.dumps(item.index.fqn)}: {_text_of(planner.resolve_data(item))}" for item in items]
        with BlockWriter(self.folder / file) as writer:
            writer.write(("{" + ",\n".join(entries) + "}\n").encode())
        written.places.update((item.index, StoredPlace(file, 0)) for item in items)
        written.files[file] = StoredFile(writer.size, tuple(writer.checksums))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written: list[_Written] = [result.storage_data for part in results for result in part]
        places = {index: place for one in written for index, place in one.places.items()}
        files = {name: file for one in written for name, file in one.files.items()}
        for file in files:
            if not (self.folder / file).exists():
                raise ValueError(
                    f"the first rank does not see {file}, which another wrote: {self._commit[0]} must be on a file "
                    "system that all ranks share"
                )
        folders.write_synced(self.folder / folders.METADATA, format_metadata(metadata, places, files))
        folders.commit(*self._commit, keep_last=self._keep_last)


def _key_of(index: MetadataIndex) -> str:
    """Name of a piece in its safetensors file: ``model/w[0,8]`` begins at row 0, column 8."""
    return f"{index.fqn}[{','.join(map(str, index.offset or ()))}]"


def _described(item: WriteItem) -> tuple[torch.dtype, tuple[int, ...]]:
    assert item.tensor_data is not None
    return item.tensor_data.properties.dtype, tuple(item.tensor_data.chunk.sizes)


def _text_of(value: Any) -> str:
    assert isinstance(value, str)
    return value


def write(
    content: Content,
    directory: Path,
    name: str,
    manifest: Mapping[str, Any],
    *,
    keep_last: int | None,
    group: dist.ProcessGroup | None,
    asynchronous: bool,
    device: torch.device | None = None,
) -> Future[Any] | None:
    """Write what all ranks bring as one checkpoint; the future of its end if asked for, else it has ended.

    Args:
        device: the accelerator of this rank, if it has one: a new thread would use that of the host's first.
    """
    arguments: dict[str, Any] = {
        "storage_writer": _FolderWriter(directory, name, manifest, rank=rank_in(group), keep_last=keep_last),
        "planner": SavePieces(),
        "process_group": group,
        "no_dist": num_ranks(group) == 1,
    }
    if not asynchronous:
        dcp.save(content, **arguments)
        return None
    executor = ThreadPoolExecutor(
        max_workers=1, thread_name_prefix="checkpoint", initializer=_use_device, initargs=(device,)
    )
    future = executor.submit(_save_beside_training, content, arguments)
    executor.shutdown(wait=False)
    return future


def _save_beside_training(content: Content, arguments: Mapping[str, Any]) -> Any:
    """Write what this rank brings while another thread trains, and may check new programs on groups of its own."""
    with groups_stay():
        return dcp.save(content, **arguments)


def _use_device(device: torch.device | None) -> None:
    """Make ``device`` the current one of this thread."""
    if device is not None:
        torch.get_device_module(device).set_device(device)


class StoredCheckpoint:
    """A checkpoint's folder, to be read from: ``metadata`` says what there is."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError if what is there cannot be read."""
        self.folder = folder
        self._parsed: dict[str, Any] = {}
        file = folder / folders.METADATA
        try:
            self.metadata, self._files = parse_metadata(read_text(file))
        except ValueError as error:
            raise ValueError(f"{file} cannot be read: {error}") from error

    def read(self, content: Content, *, group: dist.ProcessGroup | None = None, alone: bool = False) -> None:
        """Fill the pieces of ``content``; ``alone`` without the other ranks.

        Raises:
            ValueError: if the files cannot be read, or are not what was written.
        """
        load_pieces(_FolderReader(self), content, self.folder, group=group, alone=alone)

    def object(self, name: str) -> Any:
        """The object that was stored as ``name``.

        Raises:
            ValueError: if it cannot be read, or is not what was written.
        """
        assert self.metadata.storage_data is not None
        place: StoredPlace = self.metadata.storage_data[MetadataIndex(name)]
        inside = names_under(self.metadata, f"{INSIDE}{name}/")
        content = {key: self._empty(key) for key in inside}
        self.read(content, alone=True)
        tensors = [content[f"{INSIDE}{name}/{number}"].tensor for number in range(len(inside))]
        try:
            return decode(self._objects(place.file)[name], tensors)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.folder / place.file} cannot be read: {error}") from error

    def _objects(self, file: str) -> Any:
        """All objects that one rank stored."""
        if file not in self._parsed:
            with self.opened(file) as reader:
                text = bytearray(reader.size)
                reader.read(memoryview(text), 0)
            self._parsed[file] = parse_json(bytes(text))
        return self._parsed[file]

    def _empty(self, name: str) -> Piece:
        stored: Any = self.metadata.state_dict_metadata[name]
        shape = tuple(stored.size)
        return Piece(torch.empty(shape, dtype=stored.properties.dtype, device="cpu"), shape, (0,) * len(shape))

    def opened(self, file: str) -> BlockReader:
        """A file of the checkpoint."""
        return BlockReader(self.folder / file, self._files[file].size, self._files[file].checksums)


class _FolderReader(StorageReader):
    """Reads of every piece the rows that a rank asks for."""

    def __init__(self, stored: StoredCheckpoint) -> None:
        self._stored = stored

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any) -> Metadata:
        return self._stored.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        for file, items in self._by_file(plan):
            with self._stored.opened(file) as reader:
                for place, item in items:
                    _read_piece(reader, place, item, planner)
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future

    def _by_file(self, plan: LoadPlan) -> Iterator[tuple[str, list[tuple[StoredPlace, ReadItem]]]]:
        """The requested reads grouped by file, in file order."""
        assert self._stored.metadata.storage_data is not None
        by_file: dict[str, list[tuple[StoredPlace, ReadItem]]] = {}
        for item in plan.items:
            place: StoredPlace = self._stored.metadata.storage_data[item.storage_index]
            by_file.setdefault(place.file, []).append((place, item))
        for file, items in sorted(by_file.items()):
            yield file, sorted(items, key=lambda pair: pair[0].begin)


def _read_piece(reader: BlockReader, place: StoredPlace, item: ReadItem, planner: LoadPlanner) -> None:
    """Read the overlap of a stored piece with a rank's: straight into it, or through a buffer of its size."""
    target = planner.resolve_tensor(item).detach()
    stored: Any = planner.metadata.state_dict_metadata[item.storage_index.fqn]  # type: ignore[attr-defined]
    dtype: torch.dtype = stored.properties.dtype
    direct = target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous()
    buffer = target if direct else torch.empty(target.shape, dtype=dtype, device="cpu")
    memory, width = bytes_of(buffer), dtype.itemsize
    length, starts = runs(place.sizes, tuple(item.storage_offsets), tuple(item.lengths))
    for number, start in enumerate(starts):
        reader.read(memory[number * length * width : (number + 1) * length * width], place.begin + start * width)
    if not direct:
        target.copy_(buffer)
    planner.commit_tensor(item, target)


def load_pieces(
    reader: StorageReader, content: Content, folder: Path, *, group: dist.ProcessGroup | None, alone: bool
) -> None:
    """Fill the pieces of ``content`` through DCP's plan.

    Raises:
        ValueError: if the files cannot be read.
    """
    try:
        dcp.load(
            content,
            storage_reader=reader,
            planner=LoadPieces(),
            process_group=group,
            no_dist=alone or num_ranks(group) == 1,
        )
    except (CheckpointException, OSError, RuntimeError) as error:
        raise ValueError(f"{folder} cannot be read: {reason_of(error)}") from error


def reason_of(error: BaseException) -> str:
    """The first rank's error in what DCP raises."""
    if isinstance(error, CheckpointException):
        rank, (inner, _) = min(error.failures.items())
        return f"rank {rank}: {inner}"
    return str(error)
