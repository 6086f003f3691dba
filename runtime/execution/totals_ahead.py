"""What computes the totals of a batch before the first micro-batch of a step is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from passes.chains import chain_up
from passes.emit import Program, emit
from passes.fuse import pair_rotaries
from passes.pipeline_cut import StageGraph
from passes.shard import ShardedGraph
from runtime.execution.batch_split import BatchSplit
from runtime.execution.chunk import ChunkRunner, ProgramRunner
from runtime.execution.chunk_order import Execution
from runtime.execution.step_state import StepState
from runtime.execution.unit_table import takes_totals
from runtime.program_tools.typecheck import typecheck


@dataclass(frozen=True)
class CountingPass:
    """This rank's chunks that all micro-batches pass without gradients before a step, and how they are run."""

    stages: tuple[ChunkRunner, ...]
    execution: Execution


class _ExecutionOf(Protocol):
    def __call__(self, stages: Sequence[ChunkRunner], *, last: Program) -> Execution: ...


def totals_of(
    sharded: ShardedGraph | None, stages: Sequence[ChunkRunner], state: StepState, split: BatchSplit
) -> ProgramRunner | None:
    """What computes a micro-batch's share of the totals from its inputs; None if no chunk of ``stages`` takes any."""
    if sharded is None:
        return None
    if not any(takes_totals((spec.path for spec in stage.program.inputs), sharded.graph) for stage in stages):
        return None
    program = emit(sharded)
    typecheck(program)
    return ProgramRunner(program, state, split=split)


def counting_of(
    chunks: Sequence[StageGraph],
    runner_of: Callable[[StageGraph, Program], ChunkRunner],
    execution_of: _ExecutionOf,
    *,
    is_mine: Callable[[int], bool],
) -> CountingPass | None:
    """The pass that counts totals; None if there are no chunks.

    Args:
        chunks: of all ranks; ``is_mine`` says which of them run here.
        runner_of: makes what runs a chunk's program, with the units of the training step.
        execution_of: makes what runs chunks; ``last`` is the program of the last one.
    """
    if not chunks:
        return None
    emitted = [emit(chain_up(pair_rotaries(chunk.sharded))) for chunk in chunks]
    own = [(chunk, program) for chunk, program in zip(chunks, emitted) if is_mine(chunk.index)]
    for _, program in own:
        typecheck(program)
    stages = tuple(runner_of(chunk, program) for chunk, program in own)
    return CountingPass(stages, execution_of(stages, last=emitted[-1]))
