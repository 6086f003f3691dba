"""The longest path through a schedule's order, of chunks that take given seconds and hide nothing.

Every action starts when its rank is done with the one before it and its input is there. So the pipeline takes as long
as its longest path: a sum over chunks of so many forwards, input gradients and weight gradients, and for any seconds of
the chunks no path is longer than that one. It is what ``cost_models.simulator`` plays, without communication.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from cost_models.schedules import SCHEDULES, actions

if TYPE_CHECKING:
    import numpy as np

#: By chunk: forwards, input gradients and weight gradients on a path.
Counts = tuple[tuple[int, int, int], ...]
#: What an action of each kind adds to a path's counts: forwards, input gradients, weight gradients.
_COUNTS = {"F": (1, 0, 0), "I": (0, 1, 0), "W": (0, 0, 1), "B": (0, 1, 1)}


class OrderPath(NamedTuple):
    """A longest path.

    Attributes:
        seconds: its length.
        counts: by chunk, how many forwards, input gradients and weight gradients are on it.
    """

    seconds: float
    counts: Counts


class OrderStep(NamedTuple):
    """An action: what it runs, and the places of those it waits for (−1: none), on its own rank and on another."""

    kind: str
    chunk: int
    before: int
    source: int


def played_microbatches(schedule: str, num_ranks: int, num_microbatches: int) -> int:
    """How many of the micro-batches are played (``Schedule.played``)."""
    return int(min(num_microbatches, SCHEDULES[schedule].played * num_ranks))


def longest_path(
    schedule: str, *, num_ranks: int, num_microbatches: int, seconds: Sequence[tuple[float, float, float]]
) -> OrderPath:
    """The longest path where chunk k takes ``seconds[k]`` forward, for input gradients and for weight gradients.

    Raises:
        ValueError: if the schedule cannot run this combination.
    """
    return _longest_path(schedule, num_ranks, num_microbatches, tuple(seconds))


@functools.lru_cache(maxsize=512)
def _longest_path(
    schedule: str, num_ranks: int, num_microbatches: int, seconds: tuple[tuple[float, float, float], ...]
) -> OrderPath:
    """The same, remembered: a search asks twice for most steps."""
    steps = order_steps(schedule, num_ranks, num_microbatches, len(seconds))
    ends = _ends_by_wave(_waves(schedule, num_ranks, num_microbatches, len(seconds)), seconds)
    place = int(ends.argmax())
    length = float(ends[place])
    on_path: dict[tuple[int, str], int] = {}
    while place >= 0:
        kind, chunk, before, source = steps[place]
        on_path[chunk, kind] = on_path.get((chunk, kind), 0) + 1
        place = source if source >= 0 and (before < 0 or ends[source] > ends[before]) else before
    counts = [[0, 0, 0] for _ in seconds]
    for (chunk, kind), times in on_path.items():
        for part, count in enumerate(_COUNTS[kind]):
            counts[chunk][part] += times * count
    return OrderPath(length, tuple((f, i, w) for f, i, w in counts))


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


class _Waves(NamedTuple):
    """The actions of an order by wave: each waits for actions of earlier waves alone, so that those of a wave are added
    up at once.

    Attributes:
        wave_ends: behind each wave, how many actions are in it and before it.
        before, source: by place among the waves, the places of the actions it waits for; of none, the place behind all.
        durations: by place among the waves, which of the chunks' durations it takes: 4 × chunk + kind.
        places: of each action in the order's own numbering, its place among the waves.
    """

    wave_ends: list[int]
    before: np.ndarray
    source: np.ndarray
    durations: np.ndarray
    places: np.ndarray


def _ends_by_wave(waves: _Waves, seconds: Sequence[tuple[float, float, float]]) -> np.ndarray:
    """``path_ends`` of numbers, a wave at a time."""
    import numpy as np

    durations = np.array([[f, i, w, i + w] for f, i, w in seconds]).ravel()[waves.durations]
    ends = np.zeros(len(durations) + 1)
    first = 0
    for last in waves.wave_ends:
        start = np.maximum(ends[waves.before[first:last]], ends[waves.source[first:last]])
        np.add(start, durations[first:last], out=ends[first:last])
        first = last
    return ends[waves.places]


@functools.lru_cache(maxsize=32)
def _waves(schedule: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> _Waves:
    """The waves of ``order_steps``."""
    import numpy as np

    steps = order_steps(schedule, num_ranks, num_microbatches, num_chunks)
    waves: list[int] = []
    for step in steps:
        waves.append(
            1 + max(waves[step.before] if step.before >= 0 else -1, waves[step.source] if step.source >= 0 else -1)
        )
    order = np.argsort(waves, kind="stable")
    places = np.empty(len(steps) + 1, dtype=np.int64)  # the last is of no action: −1
    places[order], places[-1] = np.arange(len(steps)), len(steps)
    kinds = np.array([4 * step.chunk + "FIWB".index(step.kind) for step in steps])
    return _Waves(
        wave_ends=np.bincount(waves).cumsum().tolist(),
        before=places[np.array([step.before for step in steps])[order]],
        source=places[np.array([step.source for step in steps])[order]],
        durations=kinds[order],
        places=places[:-1],
    )


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
