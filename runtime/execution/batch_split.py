"""How a batch is divided: over the ranks of the batch axis, and on each over micro-batches."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cost_models.schedules import reason_not
from passes.emit import emit
from passes.ir.graph import Graph
from passes.ir.types import MeshShape, shard_dim
from passes.pipeline_cut import BATCH_AXIS, DependentSamplesError, StepPrograms
from passes.plan import Plan
from passes.plan.step_plan import StepPlan
from passes.shard.context import UndividedError, input_key
from runtime.pipeline.torch_schedules import runs_own_order


@dataclass(frozen=True)
class BatchSplit:
    """``num_ranks`` ranks of the batch axis have different samples, each in ``num_microbatches``.

    A batch that the ranks cannot share equally is computed by each of them whole (``num_ranks`` 1); their gradients, of
    which there are ``copies`` to be summed, count 1/``copies``.
    """

    num_ranks: int
    num_microbatches: int
    copies: int = 1

    @property
    def is_shared(self) -> bool:
        return self.copies == 1


def split_of(graph: Graph, plan: Plan, *, training: bool) -> BatchSplit:
    """How ``plan`` divides the samples of ``graph``, which may be fewer or more than those that it was made for.

    Micro-batches have at most as many samples as planned, if the schedule can run that many of them.
    """
    axis_size = plan.mesh.size(BATCH_AXIS) if BATCH_AXIS in plan.mesh.names else 1
    actual, planned = _sizes(graph, plan)
    if not plan.step.decides_units or not actual:
        return BatchSplit(axis_size, plan.step.num_microbatches if training else 1)
    other_groups = plan.step.sample_groups // axis_size
    groups = plan.step.sample_groups
    if any(size % groups for size in actual) and not any(size % other_groups for size in actual):
        _warn(f"a batch of {actual[0]} samples", axis_size)
        groups, axis_size, copies = other_groups, 1, axis_size
    else:
        copies = 1
    if not training or (plan.step.num_microbatches == 1 and copies == 1):
        return BatchSplit(axis_size, 1, copies)
    most = max(1, min(planned) // (plan.step.sample_groups * plan.step.num_microbatches))
    counts = _counts([size // groups for size in actual], plan.step)
    # The fewest that are no longer than planned; else the shortest.
    count = next((count for count in counts if all(size // groups <= most * count for size in actual)), counts[-1])
    return BatchSplit(axis_size, count, copies)


def cut_batch(
    plan: Plan, split: BatchSplit, cut: Callable[[BatchSplit], StepPrograms]
) -> tuple[StepPrograms, BatchSplit]:
    """The programs that ``cut`` makes; of a batch that every rank computes whole in micro-batches if they allow it.

    In several, programs must not ask which part of the batch is their rank's: all ranks have every micro-batch. Where
    the plan's ranks exchange their samples for other dims (a loss over all pairs of samples), these need not divide.
    """
    if split.is_shared:
        return _cut_shared(split, cut) if plan.step.decides_units and split.num_ranks > 1 else (cut(split), split)
    if split.num_microbatches > 1:
        with contextlib.suppress(DependentSamplesError, UndividedError):
            programs = cut(split)
            if not any(_asks_for_rank(emit(stage.sharded).source) for stage in programs.stages):
                return programs, split
    split = dataclasses.replace(split, num_microbatches=1)
    return cut(split), split


def in_pieces(plan: Plan, split: BatchSplit) -> Plan:
    """``plan`` with a batch axis as long as there are pieces of the batch, over ranks and micro-batches."""
    if split.num_microbatches == 1 or BATCH_AXIS not in plan.mesh.names:
        return plan
    sizes = {**plan.mesh.as_dict(), BATCH_AXIS: split.num_ranks * split.num_microbatches}
    return dataclasses.replace(plan, mesh=MeshShape.from_dict(sizes))


def _cut_shared(split: BatchSplit, cut: Callable[[BatchSplit], StepPrograms]) -> tuple[StepPrograms, BatchSplit]:
    """The programs of a batch that ranks share.

    Where all of them are given it whole and only operators inside cut it, that these cannot shows here: then, too, each
    computes all of it.
    """
    try:
        return cut(split), split
    except UndividedError as undivided:
        whole = BatchSplit(1, 1, copies=split.num_ranks)
        try:
            programs = cut(whole)
        except UndividedError:  # over another axis
            raise undivided from None
    _warn("a batch of this shape", whole.copies)
    return programs, whole


def _asks_for_rank(source: str) -> bool:
    """Whether a program names the batch axis other than where it says that sums over samples are partial."""
    lines = source.splitlines()
    return any(line.count(f'"{BATCH_AXIS}"') > line.count("spmd.reinterpret(") for line in lines)


def _counts(sizes: Sequence[int], step: StepPlan) -> list[int]:
    """Numbers of micro-batches that divide every size and that the schedule can run, ascending; 1 if there is none."""
    dividing = [count for count in range(1, min(sizes) + 1) if not any(size % count for size in sizes)]
    return [count for count in dividing if _can_run(step, count)] or [1]


def _can_run(step: StepPlan, count: int) -> bool:
    num_ranks = step.axes.get("pp", 1)
    shape = {"num_ranks": num_ranks, "num_microbatches": count, "num_chunks": len(step.chunks)}
    if num_ranks == 1 or step.schedule == "none":
        return True
    return reason_not(step.schedule, **shape) is None or runs_own_order(step.schedule, **shape)


def _sizes(graph: Graph, plan: Plan) -> tuple[list[int], list[int]]:
    """Samples along the dims that the plan cuts over the batch axis: in ``graph``, and in the plan."""
    if BATCH_AXIS not in plan.mesh.names:
        return [], []
    axis = plan.mesh.names.index(BATCH_AXIS)
    actual, planned = [], []
    for path, value in zip(graph.input_paths, graph.inputs):
        tensor = plan.inputs.get(input_key(path))
        dim = None if tensor is None else shard_dim(tensor.placement[axis])
        if tensor is not None and dim is not None:
            actual.append(value.shape[dim])
            planned.append(tensor.shape[dim])
    return actual, planned


def _warn(batch: str, num_ranks: int) -> None:
    warnings.warn(
        f"{batch} cannot be shared equally by the {num_ranks} ranks of {BATCH_AXIS}: each "
        "computes all of it, which is right but takes longer (a multiple of the ranks, or drop_last=True, avoids it)",
        stacklevel=2,
    )
