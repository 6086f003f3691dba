"""Optimizer, schedule and random state in a folder of transformers' checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from runtime.checkpoint import CheckpointManager, load_optimizer
from runtime.module.parallel_module import ParallelModule

#: Beside the files of a checkpoint, with the weights once more, as what ranks hold.
FOLDER = "meshwright"


class SavedTraining:
    """Writes and reads what training goes on with, under any mesh; all ranks must call its methods together."""

    def __init__(self) -> None:
        self._manager: CheckpointManager | None = None

    def save(self, folder: str | Path, parallel: ParallelModule, optimizer: Any, scheduler: Any, *, step: int) -> None:
        """Save beside what is in ``folder``.

        Raises:
            ValueError: as ``CheckpointManager.save``.
        """
        self._manager_of(folder).save(parallel, _inner(optimizer), step=step, scheduler=scheduler)

    def load(self, folder: str | Path, parallel: ParallelModule, optimizer: Any, scheduler: Any) -> None:
        """Go on with what ``save`` saved, or transformers' own Trainer on one process (``optimizer.pt``).

        A folder with weights alone leaves optimizer and schedule as they are.

        Raises:
            ValueError: as ``CheckpointManager.load`` and ``load_optimizer``.
        """
        if (Path(folder) / FOLDER).exists():
            self._manager_of(folder).load(parallel, _inner(optimizer), scheduler=scheduler)
        elif (Path(folder) / "optimizer.pt").exists():
            load_optimizer(parallel, _inner(optimizer), Path(folder) / "optimizer.pt")
            schedule = Path(folder) / "scheduler.pt"
            if scheduler is not None and schedule.exists():
                scheduler.load_state_dict(torch.load(schedule, map_location="cpu", weights_only=True))

    def _manager_of(self, folder: str | Path) -> CheckpointManager:
        if self._manager is None:  # it makes a process group, so one serves all folders
            self._manager = CheckpointManager(Path(folder) / FOLDER)
        self._manager.directory = Path(folder) / FOLDER
        return self._manager


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """What accelerate has wrapped."""
    return getattr(optimizer, "optimizer", optimizer)
