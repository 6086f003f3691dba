"""One rank of each of several pipelines fails in the middle of a step; what all ranks say."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from runtime.pipeline import PipelineExecutor
from tests import ranks
from tests.pipeline_stages import Chunk


def messages(group: Any, schedule: str, *, failing: int) -> dict[str, Any]:
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    chunk = Chunk(rank, num_ranks)
    pipeline: dict[str, Any] = {"schedule": schedule, "num_chunks": num_ranks, "num_microbatches": 4}
    executor = PipelineExecutor([chunk], **pipeline, group=group, device=torch.device("cpu"))
    executor.train()
    chunk.fails_at = 2 if rank == failing else None
    results = []
    for _ in range(2):
        try:
            executor.train()
        except RuntimeError as error:
            results.append(str(error))
    return {"messages": results}


def main() -> None:
    schedules, failing, timeout = ranks.task()
    size = dist.get_world_size() // len(schedules)
    groups: list[Any] = [
        dist.new_group(list(range(first, first + size)), timeout=timedelta(seconds=timeout))
        for first in range(0, dist.get_world_size(), size)
    ]
    own = dist.get_rank() // size
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, messages(groups[own], schedules[own], failing=failing))
    ranks.answer({schedule: everywhere[size * place :][:size] for place, schedule in enumerate(schedules)})


if __name__ == "__main__":
    main()
