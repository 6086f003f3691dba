"""One rank of a pipeline fails in the middle of a step; what all ranks say, and after how long."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from runtime.pipeline import PipelineExecutor
from tests import ranks
from tests.pipeline_stages import Chunk


def messages(schedule: str, *, failing: int, timeout: float) -> dict[str, Any]:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    group: Any = dist.new_group(list(range(num_ranks)), timeout=timedelta(seconds=timeout))
    chunk = Chunk(rank, num_ranks)
    pipeline: dict[str, Any] = {"schedule": schedule, "num_chunks": num_ranks, "num_microbatches": 4}
    executor = PipelineExecutor([chunk], **pipeline, group=group, device=torch.device("cpu"))
    executor.train()
    chunk.fails_at = 2 if rank == failing else None
    found = []
    for _ in range(2):
        try:
            executor.train()
        except RuntimeError as error:
            found.append(str(error))
    return {"messages": found}


def main() -> None:
    schedules, failing, timeout = ranks.task()
    found = {schedule: messages(schedule, failing=failing, timeout=timeout) for schedule in schedules}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    ranks.answer(everywhere)


if __name__ == "__main__":
    main()
