"""Checkpoints of an elastic training: what is gone on from where no process has the whole state any more."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from runtime.agreement.ranks_together import Ranks
from runtime.checkpoint import CheckpointManager
from runtime.module.meeting import Stateful
from runtime.module.parallel_module import ParallelModule


class ElasticCheckpoints:
    """Checkpoints in a directory, of whoever is at work.

    Args:
        directory: on a file system that all processes share.
        every: steps from one to the next.
        optimizer, averages, carried: of the training, as ``Elastic.steps`` takes them.

    Raises:
        ValueError: for what a checkpoint does not have: the state of several optimizers.
    """

    def __init__(
        self,
        directory: str | Path,
        every: int,
        *,
        optimizer: Any,
        averages: Any,
        carried: Stateful | Sequence[Stateful],
    ) -> None:
        if every < 1:
            raise ValueError(f"checkpoint_every={every}: at least 1 step from one checkpoint to the next")
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        if len(optimizers) != 1:
            raise ValueError(
                f"checkpoints={str(directory)!r} has the state of one optimizer, but there are {len(optimizers)}: "
                "store what you need yourself, and give restore=, which loads it"
            )
        self.directory, self.every = Path(directory), every
        self._optimizer: torch.optim.Optimizer = optimizers[0]
        self._averages = averages
        self._carried = list(carried) if isinstance(carried, Sequence) else [carried]
        self._manager: CheckpointManager | None = None

    def go_on_with(self, ranks: Ranks) -> None:
        """From now on these ranks, all at work, save and load together: each calls this."""
        self._manager = CheckpointManager(self.directory, ranks=tuple(range(len(ranks.gathered(None)))))

    def latest(self) -> Path | None:
        """The newest complete one."""
        assert self._manager is not None
        return self._manager.latest()

    def save(self, parallel: ParallelModule, step: int) -> None:
        """Store the state after ``step`` steps.

        Raises:
            RuntimeError: if it could not be written, as when a process is lost meanwhile.
        """
        assert self._manager is not None
        try:
            states = [one.state_dict() for one in self._carried]
            own = self._averages
            self._manager.save(parallel, self._optimizer, step=step, extra={"carried": states}, averages=own)
        except ValueError as error:
            raise RuntimeError(str(error)) from error

    def load(self, parallel: ParallelModule) -> int:
        """Go back to the newest; how many steps it has.

        Raises:
            ValueError: as ``CheckpointManager.load``; if other things were carried then.
        """
        assert self._manager is not None
        checkpoint = self._manager.load(parallel, self._optimizer, averages=self._averages)
        states = checkpoint.extra["carried"] if isinstance(checkpoint.extra, dict) else []
        if len(states) != len(self._carried):
            raise ValueError(
                f"{checkpoint.path} has the states of {len(states)} carried objects, this training carries "
                f"{len(self._carried)}: hand over the same, or give another directory"
            )
        for one, state in zip(self._carried, states):
            one.load_state_dict(state)
        return checkpoint.step
