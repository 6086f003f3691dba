"""Saving and resuming training: model, optimizer, schedule, step, random states, data position, and what users add."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from runtime.agreement import gathered, num_ranks, rank_in, together
from runtime.checkpoint import directory as folders
from runtime.checkpoint.model_state import check_model_names, model_to_load, model_to_save, with_memory
from runtime.checkpoint.optimizer_state import (
    Group,
    Wanted,
    groups_of,
    matched_groups,
    merged_groups,
    optimizer_to_load,
    optimizer_to_save,
    put_groups,
    put_state,
    with_state_memory,
)
from runtime.checkpoint.pieces import Content, Piece, check_pieces, names_under
from runtime.checkpoint.rng import program_state, random_states, set_program_state, set_random_states
from runtime.checkpoint.storage import read, read_metadata, reason_of, write
from runtime.owned import Owned
from runtime.weight_files import named_alike

TRAINING = "training"
RANDOM = "random/"


class Owner(Protocol):
    """What a checkpoint needs of a model: ``ParallelModule`` has it."""

    @property
    def state_names(self) -> tuple[str, ...]: ...

    def owned(self) -> tuple[Owned, ...]: ...

    def weights_changed(self) -> None: ...


@dataclass(frozen=True)
class Checkpoint:
    """What was loaded beside the model: ``data`` and ``extra`` as they were given to ``save``."""

    path: Path
    step: int
    data: Any
    extra: Any


class CheckpointManager:
    """Checkpoints of one training run; all ranks must make one, and call its methods together.

    Every tensor is stored under its original name as the rectangles that ranks hold, so a run on any other mesh, or
    with other pipeline stages and ZeRO stages, reads the rectangles that it needs. Checkpoints are complete or not
    there: a process killed while saving leaves the one before.

    A checkpoint is trusted like code: as with ``torch.load``, reading one that a stranger made may run anything.

    Args:
        directory: of the checkpoints, on a file system that all ranks share.
        keep_last: how many to keep; None for all.
        asynchronous: ``save`` copies the state and writes it in the background. The next ``save``, ``load`` or
            ``wait`` waits for it, and raises what went wrong; call ``wait`` before the process group is destroyed.
        device: where tensors still on meta get memory; None for the mesh's, or the CPU.

    Raises:
        ValueError: for ``keep_last`` below 1.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep_last: int | None = 2,
        asynchronous: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last={keep_last}: keep at least one checkpoint, or None to keep all")
        self.directory = Path(directory)
        self.keep_last = keep_last
        self.asynchronous = asynchronous
        self._device = device
        # A group of its own: writing in the background must not meet the collectives of training.
        self._group = dist.new_group(backend="gloo") if num_ranks() > 1 else None
        self._running: Future[Any] | None = None

    def save(
        self,
        parallel: Owner,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        step: int,
        scheduler: Any = None,
        data: Any = None,
        extra: Any = None,
    ) -> Path:
        """Store the state of training.

        Args:
            step: number of optimizer steps done; names the checkpoint.
            scheduler, data: anything with ``state_dict()`` (a learning-rate schedule, a data loader); ``data`` may
                also be a value that pickles. The first rank's is stored.
            extra: any value that pickles; the first rank's is stored.

        Returns:
            where the checkpoint is (or, if it is written in the background, will be).

        Raises:
            ValueError: on all ranks, if a tensor is on meta, the optimizer keeps state of other shapes than its
                parameters', ranks have different parameter groups, or the files cannot be written.
        """
        self.wait()
        content, groups = together(lambda: self._content(parallel, optimizer), self._group)
        # The same on all ranks, so that none needs to tell the others of an error.
        merged = merged_groups(gathered(groups, self._group))
        names = gathered(together(lambda: self._start(step), self._group), self._group)
        if rank_in(self._group) == 0:
            training = {
                "step": step,
                "optimizer": None if optimizer is None else type(optimizer).__name__,
                "groups": merged,
                "scheduler": None if scheduler is None else scheduler.state_dict(),
                "program_random": program_state(),
                "data": data.state_dict() if hasattr(data, "state_dict") else data,
                "extra": extra,
            }
            content[TRAINING] = copy.deepcopy(training) if self.asynchronous else training
        manifest = {"step": step, "num_ranks": num_ranks(self._group), "torch": torch.__version__}
        try:
            self._running = write(
                content,
                self.directory,
                names[0],
                manifest,
                keep_last=self.keep_last,
                group=self._group,
                asynchronous=self.asynchronous,
            )
        except CheckpointException as error:
            raise ValueError(f"the checkpoint of step {step} could not be written: {reason_of(error)}") from error
        return self.directory / names[0]

    def _start(self, step: int) -> str:
        return folders.start(self.directory, step) if rank_in(self._group) == 0 else ""

    def _content(self, parallel: Owner, optimizer: torch.optim.Optimizer | None) -> tuple[Content, tuple[Group, ...]]:
        owned = named_alike(parallel.owned(), parallel.state_names)
        content = model_to_save(owned)
        groups: tuple[Group, ...] = ()
        if optimizer is not None:
            content.update(optimizer_to_save(owned, optimizer))
            groups = groups_of(owned, optimizer)
        if self.asynchronous:
            content = {name: value.copied() if isinstance(value, Piece) else value for name, value in content.items()}
        content[f"{RANDOM}{rank_in(self._group)}"] = random_states()
        return content, groups

    def wait(self) -> None:
        """Wait until a checkpoint that is written in the background is complete.

        Raises:
            ValueError: if it could not be written.
        """
        running, self._running = self._running, None
        if running is not None:
            try:
                running.result()
            except CheckpointException as error:
                raise ValueError(f"the last checkpoint could not be written: {reason_of(error)}") from error

    def latest(self) -> Path | None:
        """The last complete checkpoint, or None."""
        self.wait()
        name = folders.latest_name(self.directory)
        return None if name is None else self.directory / name

    def steps(self) -> tuple[int, ...]:
        """Steps of the complete checkpoints, ascending."""
        self.wait()
        return tuple(dict.fromkeys(folders.step_of(name) for name in folders.complete_names(self.directory)))

    def load(
        self,
        parallel: Owner,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        scheduler: Any = None,
        data: Any = None,
        step: int | None = None,
    ) -> Checkpoint:
        """Go back to a checkpoint, of any plan of the same model.

        Everything is checked before a tensor is overwritten.

        Args:
            optimizer, scheduler, data: get their stored state (``data`` by ``load_state_dict``); None leaves it out.
            step: which checkpoint; None for the latest.

        Raises:
            ValueError: on all ranks, if there is none, or it is cut short, of another kind, of another model or
                optimizer, saying what is wrong; with an optimizer also if the model has no plan yet.
        """
        self.wait()
        owned = named_alike(parallel.owned(), parallel.state_names)
        folder, metadata, training = together(lambda: self._open(step), self._group)
        model = model_to_load(owned)
        wanted, options = together(
            lambda: self._fit(parallel, model, optimizer, scheduler, metadata, training), self._group
        )
        device = self._device_for(parallel)
        with_memory(model, owned, device)
        with_state_memory(wanted, device)
        random_name = _of_rank(metadata, rank_in(self._group))
        content = {**model, **wanted.content, random_name: None}
        together(lambda: read(content, folder, group=self._group), self._group)
        if optimizer is not None:
            put_state(wanted, optimizer)
            put_groups(optimizer, options)
        if scheduler is not None:
            scheduler.load_state_dict(training["scheduler"])
        if data is not None:
            data.load_state_dict(training["data"])
        set_program_state(training["program_random"])
        set_random_states(content[random_name])
        parallel.weights_changed()
        return Checkpoint(folder, training["step"], training["data"], training["extra"])

    def _open(self, step: int | None) -> tuple[Path, Metadata, dict[str, Any]]:
        folder = self.directory / folders.named(self.directory, step)
        folders.check_complete(folder)
        metadata = read_metadata(folder)
        check_pieces({TRAINING: None, _of_rank(metadata, 0): None}, metadata)
        content: Content = {TRAINING: None}
        read(content, folder, alone=True)
        return folder, metadata, content[TRAINING]

    def _fit(
        self,
        parallel: Owner,
        model: Content,
        optimizer: torch.optim.Optimizer | None,
        scheduler: Any,
        metadata: Metadata,
        training: dict[str, Any],
    ) -> tuple[Wanted, Sequence[dict[str, Any]]]:
        """What to ask of the checkpoint for the optimizer, once all is found to fit."""
        check_model_names(metadata, parallel.state_names)
        check_pieces(model, metadata)
        if scheduler is not None and training["scheduler"] is None:
            raise ValueError("the checkpoint has no learning-rate schedule: load it without scheduler=")
        if optimizer is None:
            return Wanted({}, {}), ()
        if training["optimizer"] != type(optimizer).__name__:
            raise ValueError(
                f"the checkpoint's optimizer is {training['optimizer'] or 'not in it'}, not "
                f"{type(optimizer).__name__}: give the same, or none"
            )
        # Without a plan tensors are whole, and the state read for them would not be cut with them.
        getattr(parallel, "plan", None)
        owned = named_alike(parallel.owned(), parallel.state_names)
        options = matched_groups(owned, optimizer, training["groups"])
        wanted = optimizer_to_load(owned, optimizer, metadata)
        check_pieces(wanted.content, metadata)
        return wanted, options

    def _device_for(self, parallel: Owner) -> torch.device | str:
        layout = getattr(parallel, "layout", None)
        return self._device or (layout.device if layout is not None else "cpu")


def _of_rank(metadata: Metadata, rank: int) -> str:
    """Name of a rank's random states; a larger world takes those of the stored ranks in turn."""
    stored = len(names_under(metadata, RANDOM))
    return f"{RANDOM}{rank % max(stored, 1)}"
