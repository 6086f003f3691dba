"""Pareto fronts of (seconds, bytes) for a set of units on one rank, over all their choices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cost_models.schedules import SCHEDULES
from cost_models.step import LayerCosts
from planner.pipeline_ilp.stage_problem import StageProblem, UnitChoice

Array = NDArray[np.float64]

#: Seconds, bytes and index of each choice that a unit may take.
Options = tuple[Array, Array, NDArray[np.int64]]
#: The place of the only point of a front.
_FIRST = np.zeros(1, dtype=np.int64)
#: Larger fronts are thinned; ``Front.lost`` accounts for the error.
_LARGEST_FRONT = 1000


@dataclass(slots=True)
class Front:
    """Undominated (seconds, bytes) of some units on a rank, with the choices that lead to each point.

    ``lost`` bounds the seconds by which a point removed by thinning is faster than the one that replaces it.
    """

    seconds: Array
    sizes: Array
    limit: float
    lost: float = 0.0
    before: Front | None = None
    slot: tuple[int, int] = (0, 0)
    #: Of each point: its place among (choice from the last, point of ``before``), and the choices that there are.
    places: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    choices: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def within(self, limit: float) -> Front:
        """The front of the same units in at most ``limit`` bytes."""
        fits = self.sizes <= limit
        places = self.places[fits] if self.before is not None else self.places
        return Front(
            self.seconds[fits], self.sizes[fits], limit, self.lost, self.before, self.slot, places, self.choices
        )

    def up_to(self, most: float) -> Front:
        """The front without what takes more than ``most`` seconds."""
        if not len(self.seconds) or self.seconds[-1] - self.lost <= most:
            return self
        last = int(np.searchsorted(self.seconds, most + self.lost, side="right"))
        return Front(
            self.seconds[:last], self.sizes[:last], self.limit, self.lost, self.before, self.slot,
            self.places[:last], self.choices,
        )  # fmt: skip

    def with_unit(self, slot: tuple[int, int], options: Options) -> Front:
        """The front with one more unit of ``slot`` = (chunk, run), in any of ``options`` (seconds, bytes, choice)."""
        option_seconds, option_sizes, choices = options
        if not len(self.seconds):
            return self  # nothing fits beside what does not
        if not len(choices):
            return Front(np.zeros(0), np.zeros(0), self.limit, self.lost, self, slot)
        if len(self.seconds) == len(choices) == 1:  # as without a memory limit: nothing can dominate
            seconds, sizes = self.seconds + option_seconds, self.sizes + option_sizes
            within = _FIRST[: int(sizes[0] <= self.limit)]
            return Front(seconds[within], sizes[within], self.limit, self.lost, self, slot, within, choices)
        # a row for each choice: a few long rows in order are sorted sooner than many short ones
        seconds = (option_seconds[::-1, None] + self.seconds).ravel()
        sizes = (option_sizes[::-1, None] + self.sizes).ravel()
        order = _undominated(seconds, sizes, self.limit)
        lost = self.lost
        if len(order) > _LARGEST_FRONT:
            sampled = np.unique(np.linspace(0, len(order) - 1, _LARGEST_FRONT // 2).round().astype(int))
            lost += float(np.diff(seconds[order[sampled]]).max())
            order = order[sampled]
        return Front(seconds[order], sizes[order], self.limit, lost, self, slot, order, choices)

    def units(self) -> list[tuple[int, int, int]]:
        """The (chunk, run, choice) of every unit of the fastest point."""
        placed, front, point = [], self, 0
        while front.before is not None:
            choice, parent = divmod(int(front.places[point]), len(front.before.seconds))
            placed.append((*front.slot, int(front.choices[~choice])))
            front, point = front.before, parent
        return placed


def _undominated(seconds: Array, sizes: Array, limit: float) -> NDArray[np.int64]:
    """Indices of the points of at most ``limit`` bytes that no other beats in both, fastest first."""
    # methods of arrays: these are mostly so small that numpy's functions around them would cost as much as they do
    order = seconds.argsort(kind="stable")
    ordered = sizes[order]
    fewer = ordered <= limit  # what is larger dominates nothing that is not
    fewer[1:] &= ordered[1:] < np.minimum.accumulate(ordered)[:-1]
    order = order[fewer]
    # of points that are equally fast, in whatever order, the last is the smallest
    times = seconds[order]
    last = np.empty(len(order), dtype=bool)
    last[-1:] = True
    np.not_equal(times[1:], times[:-1], out=last[:-1])
    return order[last]


#: Seconds, bytes, index and peak of each choice of a unit, in order.
OrderedChoices = list[tuple[float, float, int, float]]


def ordered_choices(
    choices: Sequence[UnitChoice], seconds: Callable[[LayerCosts], float], *, held: float, bounded: bool
) -> OrderedChoices:
    """The choices of a unit, fastest first.

    ``held`` is the number of micro-batches in flight; without a memory limit (``bounded`` False) bytes count as 0.
    """
    every = enumerate(choice.costs for choice in choices)
    return sorted(
        (seconds(costs), costs.state_bytes + held * costs.saved_bytes if bounded else 0.0, index, costs.peak_bytes)
        for index, costs in every
    )


def options_up_to(ordered: OrderedChoices, peak: float) -> Options:
    """The undominated choices of a unit with peaks of at most ``peak`` bytes."""
    times, sizes, indices = [], [], []
    fewest = math.inf
    for seconds, size, index, largest in ordered:
        if largest <= peak and size < fewest:
            fewest = size
            times.append(seconds)
            sizes.append(size)
            indices.append(index)
    return np.array(times, dtype=float), np.array(sizes, dtype=float), np.array(indices, dtype=np.int64)


def options_of(
    choices: Sequence[UnitChoice], seconds: Callable[[LayerCosts], float], *, peak: float, held: float, bounded: bool
) -> Options:
    """The same of ``ordered_choices``."""
    return options_up_to(ordered_choices(choices, seconds, held=held, bounded=bounded), peak)


@dataclass(frozen=True)
class DualWeights:
    """How a rank's seconds are counted: seconds of a unit, and factors of the seconds to receive forward and backward.

    ``proves`` says that the count is a lower bound of the rank's busy time for one micro-batch.
    """

    unit: Callable[[LayerCosts], float]
    receive: tuple[float, float] = (1.0, 1.0)
    proves: bool = True


#: The exact busy time of a rank for one micro-batch.
LOAD = DualWeights(lambda costs: costs.forward + costs.backward)


def whole_step_weights(problem: StageProblem) -> DualWeights:
    """Weights of a unit's contribution to the step if ranks are alike: its load, its part of the fill, its update."""
    times, ranks = problem.num_microbatches, problem.num_ranks
    schedule = SCHEDULES[problem.schedule]
    fill = (ranks - 1) / ranks / (problem.num_chunks // ranks if schedule.divided else 1)
    forward, backward, weight = (fill * value for value in schedule.fills_on(ranks)[0])

    def unit(costs: LayerCosts) -> float:
        compute = (times / ranks + forward) * costs.forward + (times / ranks + backward) * costs.backward
        compute += (weight - backward) * costs.backward_weight if schedule.splits_backward else 0.0
        return compute + (costs.update_step + costs.gather_step) / ranks

    return DualWeights(unit, proves=False)
