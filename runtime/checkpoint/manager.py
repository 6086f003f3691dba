"""Saving and resuming training: model, optimizer, schedule, step, random states, data position, and what users add."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from runtime.agreement.ranks_together import gathered, num_ranks, rank_in, together
from runtime.checkpoint import directory as folders
from runtime.checkpoint.averages import Averages, averages_to_load, averages_to_save, listed_averages, put_averages
from runtime.checkpoint.folder_storage import StoredCheckpoint, put_object, reason_of, write
from runtime.checkpoint.model_state import check_model_names, model_to_load, model_to_save, with_memory
from runtime.checkpoint.optimizer_state import (
    Group,
    RequestedState,
    groups_of,
    matched_groups,
    merged_groups,
    optimizer_to_load,
    optimizer_to_save,
    put_groups,
    put_state,
    with_state_memory,
)
from runtime.checkpoint.pickled import PickledCheckpoint
from runtime.checkpoint.rectangles_of_tensors import Content, check_pieces, names_under
from runtime.checkpoint.rng import program_state, random_states, set_program_state, set_random_states
from runtime.checkpoint.staging import HostStaging, device_of
from runtime.launch.groups import group_of
from runtime.parameters.offloaded_optimizer import OffloadedOptimizer, update_rule
from runtime.state.owned import Owned
from runtime.weight_files import named_alike

TRAINING = "training"
#: What is stored of training, each as an object of its own.
FIELDS = ("step", "optimizer", "groups", "scheduler", "program_random", "data", "extra")
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

    A checkpoint is data: JSON and safetensors, with checksums of what is read, so that one that a stranger made runs
    nothing and one that a disk spoilt is noticed. Checkpoints of earlier versions had pickles in them, which may run
    anything: they load with ``trust=True`` alone. Only one job at a time saves into a directory.

    Args:
        directory: of the checkpoints, on a file system that all ranks share.
        keep_last: how many to keep; None for all.
        asynchronous: ``save`` copies the state (from a device into pinned memory, which is kept) and writes it in the
            background. The next ``save``, ``load`` or
            ``wait`` waits for it, and raises what went wrong; call ``wait`` before the process group is destroyed.
        device: where tensors still on meta get memory; None for the mesh's, or the CPU.
        ranks: that hold the model and save together; None for all. Others may have a directory of their own.

    Raises:
        ValueError: for ``keep_last`` below 1, and if this rank is not among ``ranks``.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep_last: int | None = 2,
        asynchronous: bool = False,
        device: torch.device | str | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last={keep_last}: keep at least one checkpoint, or None to keep all")
        self.directory = Path(directory)
        self.keep_last = keep_last
        self.asynchronous = asynchronous
        self._device = device
        # A group of its own: writing in the background must not meet the collectives of training.
        members = sorted(range(num_ranks()) if ranks is None else ranks)
        if rank_in() not in members:
            raise ValueError(f"rank {rank_in()} is not among the ranks {members} of this checkpoint manager")
        self._group = group_of(members, backend="gloo") if num_ranks() > 1 else None
        self._running: Future[Any] | None = None
        self._staging = HostStaging()

    def save(
        self,
        parallel: Owner,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        step: int,
        scheduler: Any = None,
        data: Any = None,
        extra: Any = None,
        averages: Averages | Sequence[Averages] = (),
    ) -> Path:
        """Store the state of training.

        Args:
            step: number of optimizer steps done; names the checkpoint.
            scheduler, data: anything with ``state_dict()`` (a learning-rate schedule, a data loader); ``data`` may
                also be plain data. The first rank's is stored.
            extra: plain data: numbers, texts, None, lists, tuples, dicts, sets, bytes, arrays, tensors. The first
                rank's is stored.
            averages: of the weights, by name and placed as the parameters are, as of ``parallel.replan``.

        Returns:
            where the checkpoint is (or, if it is written in the background, will be).

        Raises:
            ValueError: on all ranks, if a tensor is on meta, the optimizer keeps state of other shapes than its
                parameters', an average is not placed as its parameter, ranks have different parameter groups,
                something to be stored is not plain data, another job saves into the directory, or the files cannot be
                written.
        """
        self.wait()
        _let_others_join(parallel)
        content, groups, device = together(
            lambda: self._content(parallel, optimizer, listed_averages(averages)), self._group
        )
        # The same on all ranks, so that none needs to tell the others of an error.
        merged = merged_groups(gathered(groups, self._group))
        training = {
            "step": step,
            "optimizer": None if optimizer is None else update_rule(optimizer),
            "groups": [{"options": group.options, "names": group.names} for group in merged],
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "program_random": program_state(),
            "data": data.state_dict() if hasattr(data, "state_dict") else data,
            "extra": extra,
        }
        names = gathered(together(lambda: self._start(step, training, content), self._group), self._group)
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
                device=device,
            )
        except CheckpointException as error:
            raise ValueError(f"the checkpoint of step {step} could not be written: {reason_of(error)}") from error
        return self.directory / names[0]

    def _start(self, step: int, training: dict[str, Any], content: Content) -> str:
        """Put the objects of this rank into ``content``, then make room; the checkpoint's name, on the first rank."""
        rank = rank_in(self._group)
        put_object(content, f"{RANDOM}{rank}", random_states(), where="the random state")
        if rank != 0:
            return ""
        for name, value in training.items():
            put_object(content, f"{TRAINING}/{name}", value, where=name)
        return folders.start(self.directory, step)

    def _content(
        self, parallel: Owner, optimizer: torch.optim.Optimizer | None, averages: Sequence[Averages]
    ) -> tuple[Content, tuple[Group, ...], torch.device | None]:
        """What this rank writes, the optimizer's groups, and the accelerator that the model is on."""
        owned = named_alike(parallel.owned(), parallel.state_names)
        content = {**model_to_save(owned), **averages_to_save(owned, averages)}
        groups: tuple[Group, ...] = ()
        if optimizer is not None:
            content.update(optimizer_to_save(owned, optimizer))
            groups = groups_of(owned, optimizer)
        device = device_of(content)
        return (self._staging.staged(content) if self.asynchronous else content), groups, device

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

    def extra(self, *, step: int | None = None, trust: bool = False) -> Any:
        """``extra`` as it was given to ``save``, of a checkpoint that is not loaded yet; all ranks must ask.

        Raises:
            ValueError: as ``load``.
        """
        self.wait()
        _, training, _ = together(lambda: self._open(step, trust=trust), self._group)
        return training["extra"]

    def load(
        self,
        parallel: Owner,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        scheduler: Any = None,
        data: Any = None,
        step: int | None = None,
        trust: bool = False,
        averages: Averages | Sequence[Averages] = (),
    ) -> Checkpoint:
        """Go back to a checkpoint, of any plan of the same model.

        Everything is checked before a tensor is overwritten.

        Args:
            optimizer, scheduler, data: get their stored state (``data`` by ``load_state_dict``); None leaves it out.
            step: which checkpoint; None for the latest.
            trust: also load what an earlier version wrote, which may run code of whoever wrote it.
            averages: get the stored ones in the place of what they hold, as many as were saved; none leaves them out.

        Raises:
            ValueError: on all ranks, if there is none, or it is cut short, damaged, of another kind, of another model
                or optimizer, saying what is wrong; with an optimizer also if the model has no plan yet.
        """
        self.wait()
        _let_others_join(parallel)
        owned = named_alike(parallel.owned(), parallel.state_names)
        stored, training, random = together(lambda: self._open(step, trust=trust), self._group)
        model = model_to_load(owned)
        requested, options = together(
            lambda: self._fit(parallel, model, optimizer, scheduler, stored.metadata, training), self._group
        )
        device, listed = self._device_for(parallel), listed_averages(averages)
        averaged = together(lambda: averages_to_load(owned, listed, stored.metadata, device), self._group)
        with_memory(model, owned, device)
        with_state_memory(requested, "cpu" if isinstance(optimizer, OffloadedOptimizer) else device)
        together(lambda: stored.read({**model, **requested.content, **averaged}, group=self._group), self._group)
        if optimizer is not None:
            put_state(requested, optimizer)
            put_groups(optimizer, options)
        named = getattr(parallel, "named_parameters", None)
        put_averages(averaged, listed, {} if named is None else dict(named(remove_duplicate=False)))
        if scheduler is not None:
            scheduler.load_state_dict(training["scheduler"])
        if data is not None:
            data.load_state_dict(training["data"])
        set_program_state(training["program_random"])
        set_random_states(random)
        parallel.weights_changed()
        return Checkpoint(stored.folder, training["step"], training["data"], training["extra"])

    def load_optimizer(
        self, parallel: Owner, optimizer: torch.optim.Optimizer, *, step: int | None = None, trust: bool = False
    ) -> None:
        """Take the optimizer's state alone, as ``load`` does; for what had no plan when ``load`` took the rest.

        Raises:
            ValueError: as ``load``.
        """
        self.wait()
        stored, training, _ = together(lambda: self._open(step, trust=trust), self._group)
        requested, options = together(
            lambda: self._fit(parallel, {}, optimizer, None, stored.metadata, training), self._group
        )
        device = "cpu" if isinstance(optimizer, OffloadedOptimizer) else self._device_for(parallel)
        with_state_memory(requested, device)
        together(lambda: stored.read(requested.content, group=self._group), self._group)
        put_state(requested, optimizer)
        put_groups(optimizer, options)

    def _open(self, step: int | None, *, trust: bool) -> tuple[StoredCheckpoint | PickledCheckpoint, Any, Any]:
        """A checkpoint, what it says of training, and the random states that this rank takes."""
        folder = self.directory / folders.named(self.directory, step)
        pickled = folders.is_pickled(folders.check_complete(folder))
        if pickled and not trust:
            raise ValueError(
                f"{folder} was written by an earlier version, with pickles in it, which may run code of whoever wrote "
                "it when they are read: if you made it, load it with trust=True, and save it again"
            )
        stored = PickledCheckpoint(folder) if pickled else StoredCheckpoint(folder)
        random_name = _of_rank(stored.metadata, rank_in(self._group))
        fields = (TRAINING,) if pickled else tuple(f"{TRAINING}/{name}" for name in FIELDS)
        for name in (*fields, random_name):
            if not isinstance(stored.metadata.state_dict_metadata.get(name), BytesStorageMetadata):
                raise ValueError(f"{folder} is damaged: it has no {name!r}")
        if pickled:
            training = stored.object(TRAINING)
        else:
            training = {name: stored.object(f"{TRAINING}/{name}") for name in FIELDS}
            training["groups"] = [Group(group["options"], group["names"]) for group in training["groups"]]
        return stored, training, stored.object(random_name)

    def _fit(
        self,
        parallel: Owner,
        model: Content,
        optimizer: torch.optim.Optimizer | None,
        scheduler: Any,
        metadata: Metadata,
        training: dict[str, Any],
    ) -> tuple[RequestedState, Sequence[dict[str, Any]]]:
        """The optimizer state to read and its groups' options, after checking that everything fits."""
        check_model_names(metadata, parallel.state_names)
        check_pieces(model, metadata)
        if scheduler is not None and training["scheduler"] is None:
            raise ValueError("the checkpoint has no learning-rate schedule: load it without scheduler=")
        if optimizer is None:
            return RequestedState({}, {}), ()
        if training["optimizer"] != update_rule(optimizer):
            raise ValueError(
                f"the checkpoint's optimizer is {training['optimizer'] or 'not in it'}, not "
                f"{update_rule(optimizer)}: give the same, or none"
            )
        # Without a plan tensors are whole, and the state read for them would not be cut with them.
        getattr(parallel, "plan", None)
        owned = named_alike(parallel.owned(), parallel.state_names)
        options = matched_groups(owned, optimizer, training["groups"])
        requested = optimizer_to_load(owned, optimizer, metadata)
        check_pieces(requested.content, metadata)
        return requested, options

    def _device_for(self, parallel: Owner) -> torch.device | str:
        layout = getattr(parallel, "layout", None)
        return self._device or (layout.device if layout is not None else "cpu")


def _let_others_join(parallel: Owner) -> None:
    """Join first in what a rank calls alone of a parallel module, which would wait for this rank."""
    wait_for_ranks = getattr(parallel, "wait_for_ranks", None)
    if wait_for_ranks is not None:
        wait_for_ranks()


def _of_rank(metadata: Metadata, rank: int) -> str:
    """Name of a rank's random states; a larger world takes those of the stored ranks in turn."""
    stored = len(names_under(metadata, RANDOM))
    return f"{RANDOM}{rank % max(stored, 1)}"
