"""Records what pipelines of small chunks send; a case is (schedule, micro-batches, how transfers are batched)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules as torch_schedules

from cost_models.schedules import SCHEDULES, rank_of_chunk
from runtime.pipeline import PipelineExecutor, stage
from runtime.torch_compat.pipelining import issue_transfers
from tests import ranks
from tests.communication.recorder import recorded
from tests.pipeline_stages import Chunk


def record(schedule: str, num_microbatches: int) -> list[dict[str, Any]]:
    """Of a training step and a pass without gradients."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    num_chunks = num_ranks * (SCHEDULES[schedule].chunks_per_rank or 2)
    shape = {"num_ranks": num_ranks, "num_chunks": num_chunks}
    mine = [k for k in range(num_chunks) if rank_of_chunk(schedule, k, **shape) == rank]
    executor = PipelineExecutor(
        [Chunk(index, num_chunks) for index in mine],
        schedule=schedule,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
        group=dist.group.WORLD,
        device=torch.device("cpu"),
    )
    with recorded() as recorder:
        executor.train()
        executor.forward_only()
    return [call.to_dict() for call in recorder.calls]


def always_batched(operations: list[Any], desc: str | None = None) -> list[Any]:
    """As torch 2.11 issues transfers."""
    return dist.batch_isend_irecv(operations) if operations else []


def never_batched(operations: list[Any]) -> list[Any]:
    """One call for each transfer."""
    return [operation.op(operation.tensor, operation.peer, operation.group) for operation in operations]


def main() -> None:
    results = {}
    as_installed = torch_schedules._batch_p2p
    for schedule, num_microbatches, batching in ranks.task():
        torch_schedules._batch_p2p = as_installed if batching == "torch" else always_batched
        stage.issue_transfers = never_batched if batching == "only receives" else issue_transfers
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, record(schedule, num_microbatches))
        results[f"{schedule}-{num_microbatches}-{batching}"] = everywhere
    ranks.answer(results)


if __name__ == "__main__":
    main()
