"""``torch.distributed.pipelining``: the base of its stages, its runtime of actions, and how it sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import _PipelineStageBase as PipelineStageBase

__all__ = ["PipelineStageBase", "issue_transfers", "neighbour_transfers", "runtime_of_actions"]


def issue_transfers(operations: list[dist.P2POp]) -> list[dist.Work]:
    """Start sends or receives as torch's own pipeline schedules do: 2.11 in a batch, 2.13 one by one.

    NCCL has another communicator for what is in a batch, so both sides of a transfer must start it in the same way.
    """
    works: list[dist.Work] = schedules._batch_p2p(operations)
    return works


def neighbour_transfers(stage: PipelineStageBase) -> list[dist.P2POp]:
    """What torch sends between neighbours once, so that their communicators are there before the first step."""
    operations: list[dist.P2POp] = PipelineStageBase._get_init_p2p_neighbors_ops(stage)
    return operations


def runtime_of_actions(
    stages: Sequence[Any], order: Sequence[Sequence[tuple[int, str, int]]], **options: Any
) -> schedules.PipelineScheduleMulti:
    """A schedule that runs, on every rank, its (chunk, letter of the computation, micro-batch) in order."""
    action, computation = schedules._Action, schedules._ComputationType
    runtime = schedules._PipelineScheduleRuntime(list(stages), **options)
    runtime.pipeline_order = {
        rank: [action(chunk, computation(kind), microbatch) for chunk, kind, microbatch in actions]
        for rank, actions in enumerate(order)
    }
    runtime._prepare_schedule_with_comms(runtime.pipeline_order)
    return runtime
