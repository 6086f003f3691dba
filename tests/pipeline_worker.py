"""Runs pipelines on real processes; each case is (number of ranks, schedule, chunks a rank, micro-batches, variant)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from cost_models.schedules import rank_of_chunk
from runtime.pipeline import PipelineExecutor, broadcast_from_last
from runtime.pipeline.torch_schedules import expected_order
from tests import ranks
from tests.pipeline_stages import Chunk, cut_specs, on_one_process

#: Of plain chunks: state is left behind by none.
STEPS = 2
CPU = torch.device("cpu")


def relative_error(actual: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    if actual is None or expected is None:
        return 0.0 if actual is expected else float("inf")
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-3))


def planned_bytes(case: list[Any], num_ranks: int, rank: int) -> dict[tuple[int, int], int]:
    """What this rank is to send in a step: activations onwards, the gradients of those that have one back."""
    _, schedule, per_rank, num_microbatches, variant = case
    num_chunks = num_ranks * per_rank
    where = [rank_of_chunk(schedule, k, num_ranks=num_ranks, num_chunks=num_chunks) for k in range(num_chunks)]
    planned: Counter[tuple[int, int]] = Counter()
    for cut in range(1, num_chunks):
        specs = cut_specs(cut, variant)
        if where[cut - 1] == where[cut]:
            continue
        if where[cut - 1] == rank:
            planned[cut - 1, cut] = num_microbatches * sum(spec.num_bytes for spec in specs)
        if where[cut] == rank:
            planned[cut, cut - 1] = num_microbatches * sum(spec.num_bytes for spec in specs if spec.requires_grad)
    return dict(planned)


def run(case: list[Any], group: dist.ProcessGroup) -> dict[str, Any]:
    num_ranks, schedule, per_rank, num_microbatches, variant = case
    rank, num_chunks = dist.get_rank(group), num_ranks * per_rank
    shape = {"num_ranks": num_ranks, "num_chunks": num_chunks}
    pipeline: dict[str, Any] = {"schedule": schedule, "num_chunks": num_chunks, "group": group, "device": CPU}
    mine = [k for k in range(num_chunks) if rank_of_chunk(schedule, k, **shape) == rank]
    chunks = [Chunk(index, num_chunks, variant) for index in mine]
    executor = PipelineExecutor(chunks, num_microbatches=num_microbatches, **pipeline)
    losses, gradients = on_one_process(num_chunks, num_microbatches, variant)
    errors, orders, sent = [0.0], [], []
    planned = planned_bytes(case, num_ranks, rank)
    for step in range(1, (STEPS if variant == "plain" else 1) + 1):
        actual = executor.train()
        holds_last = num_chunks - 1 in mine
        assert len(actual) == (num_microbatches if holds_last else 0)
        errors += [relative_error(a, b) for a, b in zip(actual, losses)]
        for chunk in chunks:
            for owner, expected in zip(chunk.weights, gradients[chunk.index]):
                errors.append(relative_error(owner.grad, None if expected is None else step * expected))
        orders.append(
            tuple(executor.order) == expected_order(schedule, num_microbatches=num_microbatches, **shape)[rank]
        )
        sent.append({cut: n for cut, n in executor.bytes_sent.items() if n} == {c: n for c, n in planned.items() if n})
    for owner in [owner for chunk in chunks for owner in chunk.weights]:
        owner.grad = None
    outputs = executor.forward_only()
    errors += [relative_error(a, b) for (a,), b in zip(outputs, losses if holds_last else [], strict=True)]
    total = torch.stack([a for (a,) in outputs]).sum() if outputs else None
    errors.append(
        relative_error(broadcast_from_last(total, dtype=torch.float64, **pipeline), torch.stack(losses).sum())
    )
    quiet = not any(owner.grad is not None for chunk in chunks for owner in chunk.weights)
    no_graph = not any(any(chunk.gradients_enabled[-num_microbatches:]) for chunk in chunks)
    return {
        "error": max(errors),
        "as_planned": all(orders),
        "bytes_as_planned": all(sent),
        "bytes": sum(planned.values()),
        "without_gradients": quiet and no_graph,
    }


def gathered(result: dict[str, Any], group: dist.ProcessGroup) -> dict[str, Any]:
    everywhere: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, result, group=group)
    return {
        "error": max(result["error"] for result in everywhere),
        "as_planned": all(result["as_planned"] for result in everywhere),
        "bytes_as_planned": all(result["bytes_as_planned"] for result in everywhere),
        "without_gradients": all(result["without_gradients"] for result in everywhere),
        "bytes": sum(result["bytes"] for result in everywhere),
    }


def main() -> None:
    cases = ranks.task()
    world_size, rank = dist.get_world_size(), dist.get_rank()
    groups: dict[int, Any] = {}
    for size in (1, 2, 4):
        for first in range(0, world_size, size):
            group = dist.new_group(list(range(first, first + size)))
            if first <= rank < first + size:
                groups[size] = group
    results = {}
    for case in cases:
        group = groups[case[0]]
        results[" ".join(map(str, case))] = gathered(run(case, group), group)
    ranks.answer(results)


if __name__ == "__main__":
    main()
