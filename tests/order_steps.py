"""A schedule's order played an action at a time: what ``cost_models.order_path`` adds up a wave at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cost_models.schedules import actions


class OrderStep(NamedTuple):
    """An action: what it runs, and the places of those it waits for (−1: none), on its own rank and on another."""

    kind: str
    chunk: int
    before: int
    source: int


@functools.lru_cache(maxsize=32)
def order_steps(schedule: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> tuple[OrderStep, ...]:
    """All actions of all ranks, each after those that it waits for."""
    orders = actions(schedule, num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)
    backwards = num_chunks * num_microbatches
    places = [-1] * (2 * backwards)  # of all forwards, then of all input gradients, by chunk and micro-batch
    steps: list[OrderStep] = []
    num_done, last, total = [0] * num_ranks, [-1] * num_ranks, sum(map(len, orders))
    while len(steps) < total:
        for rank, order in enumerate(orders):
            for position in range(num_done[rank], len(order)):
                kind, chunk, microbatch = order[position]
                waits_for = done_as = -1
                if kind == "F":
                    done_as = chunk * num_microbatches + microbatch
                    waits_for = done_as - num_microbatches if chunk else -1
                elif kind != "W":
                    done_as = backwards + chunk * num_microbatches + microbatch
                    waits_for = done_as + num_microbatches if chunk < num_chunks - 1 else -1
                source = places[waits_for] if waits_for >= 0 else -1
                if source < 0 <= waits_for:
                    break
                steps.append(OrderStep(kind, chunk, last[rank], source))
                last[rank] = len(steps) - 1
                num_done[rank] += 1
                if done_as >= 0:
                    places[done_as] = last[rank]
    return tuple(steps)


def path_ends(
    steps: Sequence[OrderStep], seconds: Sequence[tuple[Any, Any, Any]], *, largest: Callable[[Any, Any], Any] = max
) -> list[Any]:
    """When every action ends; of arrays of seconds too, with their ``largest`` of two."""
    durations = [{"F": f, "I": i, "W": w, "B": i + w} for f, i, w in seconds]
    ends: list[Any] = []
    for kind, chunk, before, source in steps:
        if source < 0:
            start = ends[before] if before >= 0 else 0.0
        elif before < 0:
            start = ends[source]
        else:
            start = largest(ends[before], ends[source])
        ends.append(start + durations[chunk][kind])
    return ends
