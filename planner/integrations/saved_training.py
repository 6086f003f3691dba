"""Optimizer, schedule and random state in a folder of transformers' checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from runtime.agreement.ranks_together import rank_in, together
from runtime.checkpoint import NO_STATE, CheckpointManager, load_optimizer, save, stock_order, write_stock_optimizer
from runtime.checkpoint.rng import random_states, set_random_states
from runtime.module.parallel_module import ParallelModule

#: Beside the files of a checkpoint, with the weights once more, as what ranks hold.
FOLDER = "meshwright"


#: What transformers' own Trainer reads on one process.
OPTIMIZER, SCHEDULE = "optimizer.pt", "scheduler.pt"


class SavedTraining:
    """Writes and reads what training goes on with, under any mesh; all ranks must call its methods together.

    Args:
        for_stock: whether transformers' own Trainer can go on from it too: the first rank writes ``optimizer.pt`` from
            what all have written. Else that file is one which it refuses.
    """

    def __init__(self, *, for_stock: bool = True) -> None:
        self._for_stock = for_stock
        self._manager: CheckpointManager | None = None
        self._random: dict[str, Any] | None = None

    def save(self, folder: str | Path, parallel: ParallelModule, optimizer: Any, scheduler: Any, *, step: int) -> None:
        """Save beside what is in ``folder``.

        Raises:
            ValueError: as ``CheckpointManager.save``.
        """
        parallel.wait_for_ranks()
        inner = _inner(optimizer)
        saved = self._manager_of(folder).save(parallel, inner, step=step, scheduler=scheduler)
        order = stock_order(parallel, inner) if self._for_stock else None
        together(lambda: _write_for_stock(Path(folder), saved, order, scheduler) if rank_in() == 0 else None)

    def load(self, folder: str | Path, parallel: ParallelModule, optimizer: Any, scheduler: Any) -> None:
        """Go on with what ``save`` saved, or transformers' own Trainer on one process (``optimizer.pt``).

        A folder with weights alone leaves optimizer and schedule as they are. Random states are not taken yet: before
        that the Trainer passes over the batches that were seen, in the order that it draws as at first.

        Raises:
            ValueError: as ``CheckpointManager.load`` and ``load_optimizer``.
        """
        if (Path(folder) / FOLDER).exists():
            before = random_states()
            self._manager_of(folder).load(parallel, _inner(optimizer), scheduler=scheduler)
            self._random = random_states()
            set_random_states(before)
        elif (Path(folder) / OPTIMIZER).exists():
            load_optimizer(parallel, _inner(optimizer), Path(folder) / OPTIMIZER)
            schedule = Path(folder) / SCHEDULE
            if scheduler is not None and schedule.exists():
                scheduler.load_state_dict(torch.load(schedule, map_location="cpu", weights_only=True))

    def take_random_states(self) -> None:
        """Draw on from where ``load`` found the training, if it did."""
        if self._random is not None:
            set_random_states(self._random)

    def _manager_of(self, folder: str | Path) -> CheckpointManager:
        if self._manager is None:  # it makes a process group, so one serves all folders
            self._manager = CheckpointManager(Path(folder) / FOLDER)
        self._manager.directory = Path(folder) / FOLDER
        return self._manager


def _write_for_stock(folder: Path, saved: Path, order: list[list[str]] | None, scheduler: Any) -> None:
    """Files of transformers' own Trainer, which without ``order`` refuses to go on from them."""
    if order is None:
        save(dict(NO_STATE), folder / OPTIMIZER)
    else:
        write_stock_optimizer(saved, order, folder / OPTIMIZER)
    save({} if scheduler is None else scheduler.state_dict(), folder / SCHEDULE)


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """What accelerate has wrapped."""
    return getattr(optimizer, "optimizer", optimizer)
