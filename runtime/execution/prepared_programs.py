"""The programs of one kind of call, ready to run on this rank."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from passes.emit import Program
from runtime.calls.model_call import Path
from runtime.execution.batch_split import BatchSplit
from runtime.execution.call_effects import CallEffects
from runtime.execution.chunk import ChunkRunner, ProgramRunner
from runtime.execution.chunk_order import Execution
from runtime.execution.experts_without_tokens import LoopedExpertParameters
from runtime.execution.totals_ahead import CountingPass


@dataclass
class Prepared:
    """The programs of one kind of call.

    Attributes:
        stages: this rank's chunks.
        totals: what computes the totals of a micro-batch; None if there are none.
        counting: what counts totals that come from activations before a step; None if there are none.
        last: the program of the last chunk, wherever it runs: it says what comes out.
        split: how the batch is divided.
        effects: what the call writes to parameters and buffers.
        trains: whether they are those of a training step.
        looped_experts: what follows experts without tokens; None before the first step.
    """

    stages: tuple[ChunkRunner, ...]
    totals: ProgramRunner | None
    counting: CountingPass | None
    last: Program
    split: BatchSplit
    execution: Execution
    effects: CallEffects
    trains: bool
    looped_experts: LoopedExpertParameters | None = None

    @functools.cached_property
    def programs(self) -> tuple[Program, ...]:
        """All programs that this rank runs."""
        return tuple(runner.program for runner in self._runners)

    @property
    def _runners(self) -> tuple[ProgramRunner, ...]:
        stages = (*self.stages, *(() if self.counting is None else self.counting.stages))
        return (*(stage.runner for stage in stages), *(() if self.totals is None else (self.totals,)))

    @functools.cached_property
    def reads(self) -> frozenset[Path]:
        """Paths of the inputs that this rank's programs read."""
        paths = {spec.path for program in self.programs for spec in program.inputs}
        return frozenset(path for path in paths if path[0] not in ("received", "total"))

    def follow_literals(self) -> None:
        """Take up what has changed in tensors of a script that are constants of the programs."""
        for runner in self._runners:
            runner.follow_literals()

    def forget_constants(self) -> None:
        for runner in self._runners:
            runner.forget_constants()
