"""The planner's schedules as those of ``torch.distributed.pipelining``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from cost_models.schedule_orders import ORDERS
from cost_models.schedules import SCHEDULES, Action, actions, schedule_named
from runtime.pipeline.stage import PipelineStage
from runtime.torch_compat.pipelining import runtime_of_actions


def expected_order(
    schedule: str, *, num_ranks: int, num_microbatches: int, num_chunks: int
) -> tuple[tuple[Action, ...], ...]:
    """What each rank runs, in order: the planner's order, and that of 1F1B with fewer micro-batches than ranks too.

    Raises:
        ValueError: if the schedule has no order for this combination.
    """
    shape = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "num_chunks": num_chunks}
    if schedule_named(schedule).torch_class is not None and runs_own_order(schedule, **shape):
        return tuple(tuple(ORDERS[schedule](rank, num_ranks, num_microbatches, 1)) for rank in range(num_ranks))
    return actions(schedule, **shape)


def runs_own_order(schedule: str, *, num_ranks: int, num_microbatches: int, num_chunks: int) -> bool:
    """Whether the planner's order is run where torch's class refuses a well-defined combination, or there is none."""
    if schedule_named(schedule).torch_class is None:
        return True
    return schedule == "1f1b" and num_chunks == num_ranks and 1 <= num_microbatches < num_ranks


def is_run_by_actions(schedule: str, *, num_ranks: int, num_microbatches: int, num_chunks: int) -> bool:
    """Whether torch runs it from a list of actions (rather than as a loop written for one chunk a rank)."""
    shape = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "num_chunks": num_chunks}
    return runs_own_order(schedule, **shape) or not issubclass(_torch_class(schedule), PipelineScheduleSingle)


def build_schedule(schedule: str, stages: Sequence[PipelineStage], *, num_microbatches: int) -> Any:
    """The torch schedule that runs ``schedule`` over the pipeline of which ``stages`` are this rank's.

    Losses of micro-batches simply add up (``scale_grads=False``), as the last chunk returns its part of the loss.

    Raises:
        ValueError: if the schedule cannot run that many micro-batches or chunks.
    """
    num_ranks, num_chunks = stages[0].group_size, stages[0].num_stages
    shape = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "num_chunks": num_chunks}
    order = expected_order(schedule, **shape)
    options: dict[str, Any] = {"n_microbatches": num_microbatches, "loss_fn": _loss_itself, "scale_grads": False}
    if runs_own_order(schedule, **shape):
        triples = [[(action.chunk, action.kind, action.microbatch) for action in actions] for actions in order]
        return runtime_of_actions(stages, triples, **options)
    schedule_class = _torch_class(schedule)
    if issubclass(schedule_class, PipelineScheduleSingle):
        return schedule_class(stages[0], **options)
    return schedule_class(list(stages), **options)


def _torch_class(schedule: str) -> Any:
    name = SCHEDULES[schedule].torch_class
    assert name is not None
    return getattr(torch_schedules, name)


def _loss_itself(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output
