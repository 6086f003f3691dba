"""What a rank may hold, one chunk a rank and one long run: every multiset of choices that fits and is not dominated.

Few units on a rank, each of gigabytes, have few contents. The step depends on five figures of each: its load, its part
of the fill, its reductions that its own last backward does not hide, what it hides of other ranks', and its update.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cost_models.schedules import SCHEDULES, Schedule
from planner.pipeline_ilp.crossings import received
from planner.pipeline_ilp.ranks import main_run
from planner.pipeline_ilp.stage_problem import ROUNDING, StageProblem, UnitChoice

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

#: Columns of ``Contents.figures``.
LOAD, FILL, EXPOSED, HIDES, UPDATE = range(5)
#: Whether less of a figure is better (1) or more (-1).
_SIGNS = np.array([1.0, 1.0, 1.0, -1.0, 1.0])
#: Multisets of choices that are looked at, at most, and of those that fit, for one rank.
_MOST, _MOST_FITTING = 40_000, 4_000
#: Columns of a choice's own figures.
_FORWARD, _BACKWARD, _WEIGHT, _SENT, _WAITS, _UPDATED, _STATE, _SAVED, _PEAK, _REDUCED, _SLACK = range(11)


@dataclass(frozen=True)
class Contents:
    """Contents of one rank with ``units`` units of the long run, a row each.

    Attributes:
        figures: seconds, by the columns above.
        held: by choice of the long run, how many units run as it.
        ends: by content, the (run, choice) of the model's ends that the rank holds.
    """

    units: int
    figures: Array
    held: Indices
    ends: tuple[tuple[tuple[int, int], ...], ...]

    def groups(self, content: int, run: int) -> tuple[tuple[int, int, int], ...]:
        """The (run, choice, number of units) of one content, ``run`` being the long run."""
        counts = self.held[content]
        groups = [(run, int(choice), int(counts[choice])) for choice in np.flatnonzero(counts)]
        return tuple(sorted([*groups, *((end, choice, 1) for end, choice in self.ends[content])]))


def contents_of_ranks(problem: StageProblem, largest_load: float) -> list[list[Contents]] | None:
    """By rank, its contents of a load of at most ``largest_load`` seconds, by their number of units.

    None for problems of another kind, and where they are too many.
    """
    run = main_run(problem)
    if run is None or problem.num_chunks != problem.num_ranks or SCHEDULES[problem.schedule].played:
        return None
    quickest = min(
        choice.costs.forward + choice.costs.backward
        for rank in range(problem.num_ranks)
        for choice in problem.runs_on(rank)[run].choices
    )
    num_choices = len(problem.runs[run].choices)
    if quickest <= 0 or math.isinf(largest_load):
        return None
    most = min(problem.runs[run].count, math.floor(largest_load / quickest * (1 + ROUNDING)))
    if math.comb(num_choices + most, most) > _MOST:  # of all numbers of units up to ``most``
        return None
    held = [_multisets(num_choices, units) for units in range(most + 1)]
    forward, backward = received(problem, (1.0, 0.0)), received(problem, (0.0, 1.0))
    ranks = []
    for rank, seconds in enumerate(zip(forward, backward)):
        contents = _of_rank(problem, rank, run, held, seconds, largest_load)
        if contents is None:
            return None
        ranks.append(contents)
    return ranks


def _multisets(num_choices: int, units: int) -> Indices:
    """All ways to run so many units, as numbers of units by choice."""
    chosen = np.array(list(itertools.combinations_with_replacement(range(num_choices), units)), dtype=np.int64)
    counts = np.zeros((len(chosen), num_choices), dtype=np.int64)
    np.add.at(counts, (np.arange(len(chosen))[:, None], chosen), 1)
    return counts


def _of_rank(
    problem: StageProblem, rank: int, run: int, held: list[Indices], seconds: tuple[float, float], largest_load: float
) -> list[Contents] | None:
    """The contents of one rank, which takes so many ``seconds`` to receive, forward and backward."""
    runs, last = problem.runs_on(rank), len(problem.runs) - 1
    on_rank = [0] * (run > 0 and rank == problem.ranks[0]) + [last] * (run < last and rank == problem.ranks[-1])
    in_flight = problem.in_flight[rank]
    schedule = SCHEDULES[problem.schedule]
    own = _figures(runs[run].choices, schedule)
    limit = problem.memory[rank] * (1 + ROUNDING)
    tables, num_fitting = [], 0
    for units in range(0 if on_rank else 1, len(held)):
        sums = held[units] @ own
        peaks = np.where(held[units] > 0, own[:, _PEAK], 0.0).max(axis=1)
        rows, places, ends = [], [], []
        for choices in itertools.product(*(range(len(runs[end].choices)) for end in on_rank)):
            chosen = _figures([runs[end].choices[choice] for end, choice in zip(on_rank, choices)], schedule)
            figures = sums + chosen.sum(axis=0)
            figures[:, _FORWARD] += seconds[0]
            figures[:, _BACKWARD] += seconds[1]
            peak = np.maximum(peaks, chosen[:, _PEAK].max(initial=0.0))
            bytes_held = figures[:, _STATE] + in_flight * figures[:, _SAVED] + peak
            seconds_held = figures[:, _FORWARD] + figures[:, _BACKWARD]
            fits = np.flatnonzero((bytes_held <= limit) & (seconds_held <= largest_load * (1 + ROUNDING)))
            rows.append(_in_step(problem, figures[fits]))
            places.append(fits)
            ends.extend([tuple(zip(on_rank, choices))] * len(fits))
        table, place = np.concatenate(rows), np.concatenate(places)
        num_fitting += len(table)
        if num_fitting > _MOST_FITTING:
            return None
        best = _undominated(table)
        if len(best):
            tables.append(Contents(units, table[best], held[units][place[best]], tuple(ends[each] for each in best)))
    return tables


def _figures(choices: Sequence[UnitChoice], schedule: Schedule) -> Array:
    rows = [
        (
            costs.forward, costs.backward, costs.backward_weight, costs.last_communication, costs.last_wait,
            costs.update_step + costs.gather_step, costs.state_bytes, costs.saved_bytes, costs.peak_bytes,
            costs.reductions, schedule.slack_seconds(costs.backward, costs.backward_weight),
        )
        for costs in (choice.costs for choice in choices)
    ]  # fmt: skip
    return np.array(rows, dtype=float).reshape(-1, 11)


def _in_step(problem: StageProblem, figures: Array) -> Array:
    """What a step makes of contents: of waits, which a whole backward pass has, the sum prolongs the tail."""
    schedule, ranks = SCHEDULES[problem.schedule], problem.num_ranks
    forward, backward, weight = figures[:, _FORWARD], figures[:, _BACKWARD], figures[:, _WEIGHT]
    fill = np.zeros(len(figures))
    if schedule.splits_backward and ranks > 1:
        for on_forward, on_inputs, on_weight in schedule.fills:
            row = on_forward * forward + on_inputs * (backward - weight) + on_weight * weight
            fill = np.maximum(fill, (ranks - 1) / ranks * row)
    elif ranks > 1:
        fill = forward + backward
    waits = figures[:, _WAITS] * (not schedule.splits_backward)
    exposed, hides = figures[:, _SENT] - (backward + waits), backward + waits
    if schedule.ends_in_weights:
        exposed, hides = figures[:, _REDUCED] - weight, figures[:, _SLACK]
    return np.stack((forward + backward, fill + waits, exposed, hides, figures[:, _UPDATED]), axis=1)


def _undominated(table: Array) -> Indices:
    """Rows that no other beats or equals in every figure, by load."""
    values = table * _SIGNS
    left = np.lexsort(values.T[::-1])
    indices: list[int] = []
    while len(left):  # the first that is left is undominated, since what beats a row comes before it
        indices.append(int(left[0]))
        rows = values[left]
        left = left[(rows < rows[0]).any(axis=1)]
    return np.array(indices, dtype=np.int64)
