"""Lower bounds of a step from averages over ranks, whatever the memory, and what a bound of the load makes of them.

They take no longer than a few sums over all choices, and dismiss most problems that a search poses.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cost_models.schedule_orders import microbatches_per_round
from cost_models.schedules import SCHEDULES
from planner.pipeline_ilp.crossings import received_by_all
from planner.pipeline_ilp.stage_problem import REDUCTIONS, SENT, WAITS, StageProblem

Array = NDArray[np.float64]

_NOTHING = np.zeros(0)


@dataclass(frozen=True)
class TimeBounds:
    """Proved lower bounds, in seconds.

    Attributes:
        load: of the largest load of a rank for one micro-batch.
        terms: pairs (times, rest): the whole step is at least times · (any bound of the largest load) + rest.
        whole: with rounds, a second bound from units being whole: (micro-batches, rest, (loads, fills)). For some pair
            of these the step is at least micro-batches · max(load, any bound of the largest load) + fill + rest.
    """

    load: float
    terms: tuple[tuple[float, float], ...]
    whole: tuple[float, float, tuple[Array, Array]] = (0.0, 0.0, (_NOTHING, _NOTHING))

    @property
    def step(self) -> float:
        """Lower bound of the whole step."""
        return self.step_with(self.load)

    def step_with(self, load: float) -> float:
        """Lower bound of the whole step, if the largest load is at least ``load``."""
        least = max(times * load + rest for times, rest in self.terms)
        times, rest, (loads, fills) = self.whole
        if not len(loads):
            return max(least, rest)
        return max(least, float((times * np.maximum(load, loads) + fills).min()) + rest)

    def load_within(self, step: float) -> float:
        """The largest load that is possible in a step of ``step`` seconds."""
        return min(((step - rest) / times for times, rest in self.terms if times > 0), default=math.inf)


@dataclass(frozen=True)
class ChainFigures:
    """The choices of all runs, in columns (``UnitRun.figures``), where each run's begin, and the units of each.

    Where a chunk's last action makes gradients of weights, SENT are the reductions alone; the last column is the slack
    of such schedules (``cost_models.schedules.Schedule.slack_of_all``), else zero.

    Attributes:
        cheapest: least seconds of a micro-batch in a unit of each run.
        updated: least seconds of all updates, in the mean over ranks.
    """

    figures: Array
    starts: NDArray[np.int64]
    counts: Array
    cheapest: Array
    updated: float


def chain_figures(problem: StageProblem) -> ChainFigures:
    """The figures of a ``folded`` problem; nothing waits where backward passes are split."""
    figures = np.concatenate([run.figures for run in problem.runs]).T
    schedule = SCHEDULES[problem.schedule]
    if schedule.splits_backward:
        figures[WAITS] = 0.0
    reductions, figures[REDUCTIONS] = figures[REDUCTIONS].copy(), 0.0
    if schedule.ends_in_weights:
        _, backward, weight = figures[:SENT]
        figures[SENT] = reductions
        on_inputs, on_weight = schedule.slack_of_all
        figures[REDUCTIONS] = np.maximum(0.0, on_inputs * (backward - weight) + on_weight * weight)
    counts = np.array([run.count for run in problem.runs], dtype=float)
    starts = np.cumsum([0, *(len(run.choices) for run in problem.runs[:-1])])
    cheapest = np.minimum.reduceat(figures[0] + figures[1], starts)
    updated = float(np.minimum.reduceat(figures[4], starts) @ counts) / problem.num_ranks
    return ChainFigures(figures, starts, counts, cheapest, updated)


def average_bounds(problem: StageProblem, units: ChainFigures | None = None) -> TimeBounds:
    """Bounds from averages over ranks, of a ``folded`` problem.

    Let fixed weights of the figures never exceed the step; then the sum over units of the cheapest weighted choice is a
    bound. Such weights exist since a largest value (load, tail) is at least the mean over ranks. Several weightings are
    tried (``_weightings``).
    """
    units = chain_figures(problem) if units is None else units
    received = received_by_all(problem)
    load = (float(units.cheapest @ units.counts) + sum(received)) / problem.num_ranks
    _, backward, weight, sent, _, waits, _ = units.figures
    hidden = weight if SCHEDULES[problem.schedule].ends_in_weights else backward
    bases, weights, first = _weightings(
        problem.schedule, problem.num_ranks, problem.num_chunks // problem.num_ranks, problem.num_microbatches,
        waits=bool(waits.any()), sends=bool((sent - waits > hidden).any()),
    )  # fmt: skip
    totals = np.minimum.reduceat(weights @ units.figures, units.starts, axis=1) @ units.counts
    totals += weights[:, :2] @ received
    reduction = min(choice.costs.reduce_step for choice in problem.runs[0].choices)
    terms = zip(bases, (totals + np.where(first, reduction, 0.0)).tolist())
    # filling and draining take no less than nothing
    return TimeBounds(load, (*terms, (float(problem.num_microbatches), units.updated)))


@functools.lru_cache(maxsize=4096)
def _weightings(
    schedule_name: str,
    ranks: int,
    chunks_per_rank: int,
    num_microbatches: int,
    *,
    waits: bool,
    sends: bool,
) -> tuple[tuple[float, ...], Array, NDArray[np.bool_]]:
    """Weightings that bound the step: factors of the load bound, weights of the figures (a row each), and whether the
    first reduction is added.

    The step is M·L + fill + tail + update. L stands either for its bound or for the mean load (1/p of all); the fill
    for its sum, with max(0, x, …) ≥ x or ≥ 0; the tail for the first layer's reduction, for what the last backward
    ``waits``, or, where more is sent than a backward pass hides (``sends``), for that and the mean over ranks of what
    is not hidden, in which each second of the last backward hides at most 1/p + (p-1)/(p·v). Where chunks are done in
    rounds of P micro-batches, ranks wait for themselves alone, and a second of backward hides at most P/p, and in a
    rank's first chunk (p-1)/p more, as one of waiting does. Where chunks end in
    gradients of weights, a second of these hides 1/p, one of slack at most (p-1)/(p·v), and behind the model's last
    chunk, where the first rank has it, one of backward 1/(p·v) more.
    """
    p, v, schedule = ranks, chunks_per_rank, SCHEDULES[schedule_name]
    fills: list[tuple[float, float, float]] = [(0.0, 0.0, 0.0)]
    times = float(num_microbatches)
    if schedule.splits_backward:
        for row in schedule.fills_on(p):
            forward, backward, weight = ((p - 1) / p * value for value in row)
            fills.append((forward, backward, weight - backward))
    else:
        divisor = v if schedule.divided else 1
        times = num_microbatches - 1 / divisor
        fills = [(1 / divisor, 1 / divisor, 0.0)]
    #: Seconds that one of backward, W and slack hides, of communication, of waiting.
    tails: list[tuple[float, float, float, float, float]] = [(0.0, 0.0, 0.0, 0.0, 0.0)]
    behind = (p - 1) / (p * v)
    by_rounds = schedule.divided and v > 1 and p > 1
    if waits:
        tails.append((0.0, 0.0, 0.0, 0.0, 1 / p if by_rounds else 1.0))
    if sends and schedule.ends_in_weights:
        drained = 1 / (p * v) if p > 1 and v > 1 and schedule.placement == "vee" else 0.0
        tails.append((drained, 1 / p, behind, 1 / p, 0.0))
    elif sends and by_rounds:
        first_chunk = (p - 1) / p
        hidden = microbatches_per_round(p, num_microbatches) / p + first_chunk
        tails.append((hidden, 0.0, 0.0, 1 / p, -first_chunk))
    elif sends:
        tails.append((1 / p + behind, 0.0, 0.0, 1 / p, 1.0 - 1 / p - behind))
    bases, weights, first = [], [], []
    for (forward, backward, weight), mean, tail in itertools.product(fills, (True, False), tails):
        hides, hides_of_weight, hides_of_slack, sent, waiting = tail
        share = times / p if mean else 0.0
        forward, backward = forward + share, backward + share - hides
        if forward >= 0 and backward >= 0:
            bases.append(0.0 if mean else times)
            weights.append((forward, backward, weight - hides_of_weight, sent, 1 / p, waiting, -hides_of_slack))
            first.append(not (sent or waiting))
    return tuple(bases), np.array(weights), np.array(first)
