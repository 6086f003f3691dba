"""A heuristic for shorter tails: layers that reduce gradients in each micro-batch instead of after the last one.

Gradient reductions that the last backward passes do not hide prolong the step; the choices that are fastest for one
micro-batch ignore this. Repeatedly, the rank with the longest exposed reduction gives one unit another choice, the one
that prolongs the step least, until nothing is exposed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from cost_models.schedule_orders import microbatches_per_round
from cost_models.schedules import SCHEDULES
from cost_models.step import LayerCosts
from planner.pipeline_ilp.stage_problem import ROUNDING, Assignment, StageProblem
from planner.pipeline_ilp.stage_program import chunks_of, in_rounds

#: By chunk, by (run, choice): how many units.
_Counts = list[dict[tuple[int, int], int]]


def shorter_tails(problem: StageProblem, assignment: Assignment) -> Iterator[Assignment]:
    """Yield assignments with ever shorter tails within memory, starting from ``assignment`` of a ``folded`` problem."""
    counts: _Counts = [{(run, choice): count for run, choice, count in groups} for groups in assignment]
    for _ in range(2 * problem.num_ranks):
        exposed = _exposed(problem, counts)
        rank = max(range(problem.num_ranks), key=exposed.__getitem__)
        if exposed[rank] <= 0 or not _relieve(problem, counts, rank):
            return
        yield tuple(tuple((run, choice, count) for (run, choice), count in sorted(groups.items())) for groups in counts)


def _exposed(problem: StageProblem, counts: _Counts) -> list[float]:
    """By rank, seconds of exposed gradient reductions (see ``cost_models.step_time``)."""
    schedule = SCHEDULES[problem.schedule]
    exposed, before = [], 0.0
    for chunks in chunks_of(problem):
        if schedule.ends_in_weights:  # ranks that are done later hide little more
            left = (_sum(problem, counts[chunk], "reductions", "backward_weight") for chunk in chunks)
            exposed.append(max(itertools.accumulate(left)))
            continue
        if in_rounds(problem):
            exposed.append(_left_by_rounds(problem, [counts[chunk] for chunk in chunks]) - before)
            before += _sum(problem, counts[chunks[0]], "backward")
            continue
        backward = sum(_sum(problem, counts[chunk], "backward") for chunk in chunks)
        exposed.append(sum(_sum(problem, counts[chunk], "last_communication") for chunk in chunks) - backward - before)
        before += backward / len(chunks)
    return exposed


def _left_by_rounds(problem: StageProblem, groups: _Counts) -> float:
    """What a rank's chunks leave to reduce, each of which runs for a round of micro-batches; the first one last."""
    others = microbatches_per_round(problem.num_ranks, problem.num_microbatches) - 1
    left, most = 0.0, -math.inf
    for chunk in groups:
        backward = _sum(problem, chunk, "backward")
        left += _sum(problem, chunk, "last_communication") - backward
        most = max(most, left)
        each_time = _sum(problem, chunk, "gather_backward") + _sum(problem, chunk, "reduce_backward")
        left -= others * (backward - each_time)
    return most


def _relieve(problem: StageProblem, counts: _Counts, rank: int) -> bool:
    """Give one unit of a rank a choice with a shorter reduction after the last micro-batch; whether there is one."""
    chunks_of_rank = chunks_of(problem)[rank]
    room = problem.memory[rank] * (1 + ROUNDING) - _kept(problem, counts, chunks_of_rank)
    peaks = [_costs(problem, *key).peak_bytes for chunk in chunks_of_rank for key in counts[chunk]]
    slack = _slack(problem, counts)
    best: tuple[float, float, int, tuple[int, int], int] | None = None
    for chunk in chunks_of_rank:
        held = problem.in_flight[chunk]
        for run, choice in counts[chunk]:
            current = _costs(problem, run, choice)
            for other, option in enumerate(problem.runs[run].choices):
                costs = option.costs
                more = costs.state_bytes - current.state_bytes + held * (costs.saved_bytes - current.saved_bytes)
                longer = costs.last_communication - current.last_communication
                if longer >= 0 or more + max(*peaks, costs.peak_bytes) > room:
                    continue
                slower = costs.forward + costs.backward - current.forward - current.backward - slack[chunk]
                replacement = (max(0.0, slower), longer, chunk, (run, choice), other)
                best = replacement if best is None else min(best, replacement)
    if best is None:
        return False
    _, _, chunk, key, other = best
    counts[chunk][key] -= 1
    if not counts[chunk][key]:
        del counts[chunk][key]
    counts[chunk][key[0], other] = counts[chunk].get((key[0], other), 0) + 1
    return True


def _slack(problem: StageProblem, counts: _Counts) -> list[float]:
    """By chunk, the seconds by which it may grow without prolonging a micro-batch."""
    seconds = [_sum(problem, groups, "forward") + _sum(problem, groups, "backward") for groups in counts]
    chunks = chunks_of(problem)
    slack = [0.0] * len(seconds)
    for together in zip(*chunks) if in_rounds(problem) else [tuple(range(problem.num_ranks))]:
        loads = [seconds[index] if in_rounds(problem) else sum(seconds[k] for k in chunks[index]) for index in together]
        for index, load in zip(together, loads):
            for chunk in (index,) if in_rounds(problem) else chunks[index]:
                slack[chunk] = max(loads) - load
    return slack


def _kept(problem: StageProblem, counts: _Counts, chunks: Sequence[int]) -> float:
    in_flight = problem.in_flight
    return sum(
        _sum(problem, counts[chunk], "state_bytes") + in_flight[chunk] * _sum(problem, counts[chunk], "saved_bytes")
        for chunk in chunks
    )


def _sum(problem: StageProblem, groups: dict[tuple[int, int], int], name: str, less: str | None = None) -> float:
    """Of all units, the seconds or bytes ``name``, less ``less``."""
    costs = ((_costs(problem, *key), count) for key, count in groups.items())
    return sum(count * float(getattr(each, name) - (getattr(each, less) if less else 0.0)) for each, count in costs)


def _costs(problem: StageProblem, run: int, choice: int) -> LayerCosts:
    return problem.runs[run].choices[choice].costs
