"""A trainer's checkpoints: the last ones, and the best."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from planner.trainer.protocol import Training
from runtime.checkpoint import CheckpointManager


class Saver:
    """Checkpoints of a trainer: ``last/`` to go on from, ``best/`` with the lowest evaluation loss."""

    def __init__(self, directory: str | Path, *, keep_last: int, asynchronous: bool = False) -> None:
        self._last = CheckpointManager(Path(directory) / "last", keep_last=keep_last, asynchronous=asynchronous)
        self._best = CheckpointManager(Path(directory) / "best", keep_last=1, asynchronous=asynchronous)
        self.best = math.inf

    def save(self, trainer: Training, loader: Any) -> None:
        """Write the state of training."""
        self._write(self._last, trainer, loader)

    def save_best(self, trainer: Training, loader: Any, loss: float) -> None:
        """Save the weights as the best, if their loss is the lowest so far."""
        if loss < self.best:
            self.best = loss
            self._write(self._best, trainer, loader)

    def resume(self, trainer: Training, loader: Any) -> bool:
        """Go back to the last checkpoint; False if there is none, or training has gone on since."""
        if trainer.step or self._last.latest() is None:
            return False
        extra = self._last.extra()
        if extra.get("frozen"):
            trainer.take_up_frozen(extra["frozen"], self._last.steps()[-1], loader)
        checkpoint = self._last.load(trainer.parallel, trainer.optimizer, scheduler=trainer.schedule, data=loader)
        trainer.step, self.best = checkpoint.step, checkpoint.extra["best"]
        return True

    def load_best(self, trainer: Training) -> float:
        """Go back to the best weights; returns their loss."""
        return float(self._best.load(trainer.parallel).extra["best"])

    def wait(self) -> None:
        """Wait until everything is written."""
        self._last.wait()
        self._best.wait()

    def _write(self, manager: CheckpointManager, trainer: Training, loader: Any) -> None:
        manager.save(
            trainer.parallel,
            trainer.optimizer,
            step=trainer.step,
            scheduler=trainer.schedule,
            data=loader,
            extra={"best": self.best, "frozen": trainer.frozen_state},
        )
