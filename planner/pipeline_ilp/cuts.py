"""Contiguous partitions of a row of costs: the best one, and the greedy one that planners often settle for."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence


def partition(costs: Sequence[float], num_stages: int) -> tuple[tuple[int, ...], float]:
    """Cut ``costs`` into contiguous non-empty stages so that the largest stage sum is as small as it can be.

    best(s, i) = min over j of max(best(s-1, j), sum of costs j … i-1). The first term does not fall with j and the
    second does not rise, so the two cross once and the crossing is found by bisection: O(num_stages · n · log n).

    Args:
        costs: one for each unit, none of them negative.

    Returns:
        Where each stage but the first begins, and the largest stage sum.

    Raises:
        ValueError: if there are fewer costs than stages, or a negative cost.
    """
    _check(costs, num_stages)
    sums = [0.0, *itertools.accumulate(costs)]
    best = sums
    begins: list[list[int]] = []
    for stage in range(1, num_stages):
        row, begin = [0.0] * len(sums), [0] * len(sums)
        for end in range(stage + 1, len(sums)):
            begin[end] = _last_begin(best, sums, stage, end)
            row[end] = max(best[begin[end]], sums[end] - sums[begin[end]])
        best = row
        begins.append(begin)
    cuts: list[int] = []
    end = len(costs)
    for begin in reversed(begins):
        end = begin[end]
        cuts.append(end)
    return tuple(reversed(cuts)), best[-1]


def greedy_partition(costs: Sequence[float], num_stages: int) -> tuple[tuple[int, ...], float]:
    """Cut where the running total would pass the next multiple of total / num_stages: the baseline.

    Each stage has at least one unit and leaves one for every stage after it. Arguments, result and errors are those
    of ``partition``.
    """
    _check(costs, num_stages)
    sums = [0.0, *itertools.accumulate(costs)]
    cuts: list[int] = []
    for stage in range(1, num_stages):
        within = bisect_right(sums, sums[-1] * stage / num_stages) - 1
        first = (cuts[-1] if cuts else 0) + 1
        cuts.append(min(max(within, first), len(costs) - (num_stages - stage)))
    ends = [0, *cuts, len(costs)]
    return tuple(cuts), max(sums[end] - sums[begin] for begin, end in itertools.pairwise(ends))


def _last_begin(best: Sequence[float], sums: Sequence[float], stage: int, end: int) -> int:
    """Where the last of ``stage`` + 1 stages over the first ``end`` costs begins."""
    crossing = bisect_left(range(stage, end - 1), True, key=lambda j: best[j] >= sums[end] - sums[j]) + stage
    return min(range(max(stage, crossing - 1), crossing + 1), key=lambda j: max(best[j], sums[end] - sums[j]))


def _check(costs: Sequence[float], num_stages: int) -> None:
    if not 1 <= num_stages <= len(costs):
        raise ValueError(f"cannot cut {len(costs)} units into {num_stages} stages: expected 1 to {len(costs)} stages")
    if min(costs) < 0:
        raise ValueError(f"costs must not be negative, but one is {min(costs)}")
