"""The programs of one kind of call, ready to run on this rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from passes.emit import Program
from runtime.calls.model_call import Path
from runtime.execution.batch_split import BatchSplit
from runtime.execution.chunk import ChunkRunner, ProgramRunner
from runtime.execution.chunk_order import Execution


@dataclass
class Prepared:
    """The programs of one kind of call.

    Attributes:
        stages: this rank's chunks.
        totals: what computes the totals of a micro-batch; None if there are none.
        last: the program of the last chunk, wherever it runs: it says what comes out.
        split: how the batch is divided.
    """

    stages: tuple[ChunkRunner, ...]
    totals: ProgramRunner | None
    last: Program
    split: BatchSplit
    execution: Execution
    unflatten: Callable[[dict[str, Any]], Any] | None

    @property
    def programs(self) -> tuple[Program, ...]:
        """All programs that this rank runs."""
        return (*(stage.program for stage in self.stages), *([self.totals.program] if self.totals is not None else []))

    @property
    def reads(self) -> frozenset[Path]:
        """Paths of the inputs that this rank's programs read."""
        paths = {spec.path for program in self.programs for spec in program.inputs}
        return frozenset(path for path in paths if path[0] not in ("received", "total"))

    def forget_constants(self) -> None:
        for stage in self.stages:
            stage.runner.forget_constants()
        if self.totals is not None:
            self.totals.forget_constants()
