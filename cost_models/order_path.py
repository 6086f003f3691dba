"""The longest path through a schedule's order, of chunks that take given seconds and hide nothing.

Every action starts when its rank is done with the one before it and its input is there. So the pipeline takes as long
as its longest path: a sum over chunks of so many forwards, input gradients and weight gradients, and for any seconds of
the chunks no path is longer than that one. It is what ``cost_models.simulator`` plays, without communication.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from cost_models.order_waves import KINDS, Waves, order_waves
from cost_models.schedules import SCHEDULES

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
    waves = order_waves(schedule, num_ranks, num_microbatches, len(seconds))
    ends = _ends(waves, seconds)
    place = _first_of_longest(waves, ends)
    length = float(ends[place])
    times, none = [0] * (len(KINDS) * len(seconds)), len(ends) - 1
    while place != none:
        times[waves.steps[place]] += 1
        before, source = int(waves.before[place]), int(waves.source[place])
        place = source if source != none and (before == none or ends[source] > ends[before]) else before
    counts = [[0, 0, 0] for _ in seconds]
    for action, count in enumerate(times):
        chunk, kind = divmod(action, len(KINDS))
        for part, each in enumerate(_COUNTS[KINDS[kind]]):
            counts[chunk][part] += each * count
    return OrderPath(length, tuple((f, i, w) for f, i, w in counts))


def _ends(waves: Waves, seconds: Sequence[tuple[float, float, float]]) -> np.ndarray:
    """When every action ends, by place among the waves; and zero behind all."""
    import numpy as np

    durations = np.array([[f, i, w, i + w] for f, i, w in seconds]).ravel()[waves.steps]
    ends = np.zeros(len(durations) + 1)
    first = 0
    for last in waves.wave_ends:
        start = np.maximum(ends[waves.before[first:last]], ends[waves.source[first:last]])
        np.add(start, durations[first:last], out=ends[first:last])
        first = last
    return ends


def _first_of_longest(waves: Waves, ends: np.ndarray) -> int:
    """The place of the action that ends last; of several, that which comes first if the ranks take turns."""
    last = (ends[:-1] == ends.max()).nonzero()[0]
    if len(last) == 1:
        return int(last[0])
    turns = waves.turns()
    return int(min(last, key=lambda place: (turns[place], waves.ranks[place], waves.order[place])))
