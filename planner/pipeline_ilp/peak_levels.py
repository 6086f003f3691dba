"""Fronts of a rank's units by level of peaks: of all levels, only those are worked out that may hold the fastest.

A rank has to hold its largest peak beside what it saves. At each level of peaks it may take the choices of no larger
one, in the memory that such a peak leaves. Low levels leave most room, but have slow choices: unless memory is tight,
what each unit takes at least, whatever its bytes, is more there than the fastest front of a higher level takes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from planner.pipeline_ilp.fronts import DualWeights, Front, Options, options_up_to, ordered_choices
from planner.pipeline_ilp.stage_problem import ROUNDING, UnitRun

#: Where a unit lies: (chunk, run).
Slot = tuple[int, int]


class PeakLevel:
    """One level of peaks of a rank: the ``options`` of each slot, and the fronts of units one after another."""

    def __init__(self, options: Mapping[Slot, Options], room: float) -> None:
        self.options = options
        self.empty = Front(np.zeros(int(room >= 0)), np.zeros(int(room >= 0)), room)
        self._least = {slot: float(of_slot[0].min(initial=math.inf)) for slot, of_slot in options.items()}
        self._following: dict[tuple[int, Slot], Front] = {}

    def after(self, front: Front, slot: Slot) -> Front:
        """The front with one more unit."""
        key = id(front), slot  # of this level, which keeps all its fronts
        if key not in self._following:
            self._following[key] = front.with_unit(slot, self.options[slot])
        return self._following[key]

    def front(self, slots: Sequence[Slot]) -> Front:
        """The front of units in ``slots``, placed in this order."""
        front = self.empty
        for slot in slots:
            front = self.after(front, slot)
        return front

    def least_seconds(self, slots: Sequence[Slot]) -> float:
        """Seconds that units in ``slots`` take at least, added up in the order in which the front adds them."""
        return sum((self._least[slot] for slot in slots), 0.0)

    def longer(self, seconds: float, slot: Slot) -> float:
        """The same for a unit more."""
        return seconds + self._least[slot]


def peak_levels(
    runs: Sequence[UnitRun], slots: Sequence[Slot], weights: DualWeights, *, held: Sequence[float], limit: float
) -> list[PeakLevel]:
    """The levels of a rank that holds units in ``slots``, lowest first; those that allow no more than the one below are
    left out, which leave less room.

    Args:
        held: micro-batches in flight by chunk.
        limit: the rank's memory in bytes.
    """
    bounded, distinct = math.isfinite(limit), sorted(set(slots))
    on_rank = [runs[run] for run in {run for _, run in distinct}]
    floor = max(min(choice.costs.peak_bytes for choice in run.choices) for run in on_rank)
    peaks = {choice.costs.peak_bytes for run in on_rank for choice in run.choices}
    ordered = {
        slot: ordered_choices(runs[slot[1]].choices, weights.unit, held=held[slot[0]], bounded=bounded)
        for slot in distinct
    }
    levels: list[PeakLevel] = []
    for peak in sorted(peak for peak in peaks if peak >= floor) if bounded else [math.inf]:
        options = {slot: options_up_to(choices, peak) for slot, choices in ordered.items()}
        if levels and all(np.array_equal(options[slot][2], levels[-1].options[slot][2]) for slot in distinct):
            continue
        levels.append(PeakLevel(options, limit * (1 + ROUNDING) - peak if bounded else math.inf))
    return levels


def fastest_front(levels: Sequence[PeakLevel], slots: Sequence[Slot]) -> Front | None:
    """Of all levels' fronts of units in ``slots`` the one with the fastest point, of the lowest such level; None if the
    units do not fit."""
    best: Front | None = None
    for level in reversed(levels):
        if best is not None and level.least_seconds(slots) > best.seconds[0]:
            continue
        front = level.front(slots)
        if len(front.seconds) and (best is None or front.seconds[0] <= best.seconds[0]):
            best = front
    return best
