"""Reading and writing a checkpoint's folder with ``torch.distributed.checkpoint``."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from runtime.agreement import num_ranks
from runtime.checkpoint import directory as folders
from runtime.checkpoint.pieces import Content, LoadPieces, SavePieces

# One process needs no process group: nothing to warn of.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class _CommittingWriter(FileSystemWriter):
    """Commits the checkpoint where DCP finishes it: on one rank, once all ranks have written and synced their files."""

    def __init__(self, directory: Path, name: str, manifest: Mapping[str, Any], *, keep_last: int | None) -> None:
        super().__init__(directory / (folders.UNFINISHED + name), sync_files=True)
        self._commit = (directory, name, manifest)
        self._keep_last = keep_last

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        for file in {result.storage_data.relative_path for part in results for result in part}:
            if not (Path(self.path) / file).exists():
                raise ValueError(
                    f"the first rank does not see {file}, which another wrote: {self._commit[0]} must be on a file "
                    "system that all ranks share"
                )
        super().finish(metadata, results)
        folders.commit(*self._commit, keep_last=self._keep_last)


def write(
    content: Content,
    directory: Path,
    name: str,
    manifest: Mapping[str, Any],
    *,
    keep_last: int | None,
    group: dist.ProcessGroup | None,
    asynchronous: bool,
) -> Future[Any] | None:
    """Write what all ranks bring as one checkpoint; the future of its end if asked for, else it has ended."""
    arguments: dict[str, Any] = {
        "storage_writer": _CommittingWriter(directory, name, manifest, keep_last=keep_last),
        "planner": SavePieces(),
        "process_group": group,
        "no_dist": num_ranks(group) == 1,
    }
    if not asynchronous:
        dcp.save(content, **arguments)
        return None
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
    future = executor.submit(dcp.save, content, **arguments)
    executor.shutdown(wait=False)
    return future


def read(content: Content, folder: Path, *, group: dist.ProcessGroup | None = None, alone: bool = False) -> None:
    """Fill the pieces and replace the objects of ``content``; ``alone`` without the other ranks.

    Raises:
        ValueError: if the files cannot be read.
    """
    try:
        dcp.load(
            content,
            storage_reader=FileSystemReader(folder),
            planner=LoadPieces(),
            process_group=group,
            no_dist=alone or num_ranks(group) == 1,
        )
    except (CheckpointException, OSError, pickle.UnpicklingError, RuntimeError) as error:
        raise ValueError(f"{folder} cannot be read: {reason_of(error)}") from error


def read_metadata(folder: Path) -> Metadata:
    """Names, shapes and chunks of a checkpoint.

    Raises:
        ValueError: if they cannot be read.
    """
    try:
        return FileSystemReader(folder).read_metadata()
    except Exception as error:  # a pickle of anything else may raise anything
        raise ValueError(f"{folder / folders.METADATA} cannot be read ({error!r})") from error


def reason_of(error: BaseException) -> str:
    """The first rank's error in what DCP raises."""
    if isinstance(error, CheckpointException):
        rank, (inner, _) = min(error.failures.items())
        return f"rank {rank}: {inner}"
    return str(error)
