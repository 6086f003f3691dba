"""Assignments with less of a tail: layers that reduce their gradients each micro-batch instead of after the last one.

What the last backward passes do not hide of a rank's reductions is added to the step, and fast choices know nothing of
it. So the rank with most of it gives a unit another choice, the one that prolongs the step least, and again, until no
rank has any. Nothing is proved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cost_models.step import LayerCosts
from planner.step.stages.problem import ROUNDING, Assignment, StageProblem
from planner.step.stages.program import chunks_of, in_rounds

#: By chunk, by (run, choice): how many units.
_Counts = list[dict[tuple[int, int], int]]


def shorter_tails(problem: StageProblem, assignment: Assignment) -> Iterator[Assignment]:
    """``assignment`` (of a ``folded`` problem) with ever less of a tail, within memory."""
    counts: _Counts = [{(run, choice): count for run, choice, count in groups} for groups in assignment]
    for _ in range(2 * problem.num_ranks):
        exposed = _exposed(problem, counts)
        rank = max(range(problem.num_ranks), key=exposed.__getitem__)
        if exposed[rank] <= 0 or not _relieve(problem, counts, rank):
            return
        yield tuple(tuple((run, choice, count) for (run, choice), count in sorted(groups.items())) for groups in counts)


def _exposed(problem: StageProblem, counts: _Counts) -> list[float]:
    """By rank, seconds of reductions that nothing hides (see ``cost_models.step_time``)."""
    found, before = [], 0.0
    for chunks in chunks_of(problem):
        backward = sum(_sum(problem, counts[chunk], "backward") for chunk in chunks)
        found.append(sum(_sum(problem, counts[chunk], "reduce_step") for chunk in chunks) - backward - before)
        before += backward / len(chunks)
    return found


def _relieve(problem: StageProblem, counts: _Counts, rank: int) -> bool:
    """Give one unit of a rank a choice that reduces less at the end; whether there is one."""
    mine = chunks_of(problem)[rank]
    room = problem.memory[rank] * (1 + ROUNDING) - _kept(problem, counts, mine)
    peaks = [_costs(problem, *key).peak_bytes for chunk in mine for key in counts[chunk]]
    slack = _slack(problem, counts)
    best: tuple[float, float, int, tuple[int, int], int] | None = None
    for chunk in mine:
        held = problem.in_flight[chunk]
        for run, choice in counts[chunk]:
            own = _costs(problem, run, choice)
            for other, option in enumerate(problem.runs[run].choices):
                costs = option.costs
                more = costs.state_bytes - own.state_bytes + held * (costs.saved_bytes - own.saved_bytes)
                if costs.reduce_step >= own.reduce_step or more + max(*peaks, costs.peak_bytes) > room:
                    continue
                longer = costs.forward + costs.backward - own.forward - own.backward - slack[chunk]
                found = (max(0.0, longer), costs.reduce_step - own.reduce_step, chunk, (run, choice), other)
                best = found if best is None else min(best, found)
    if best is None:
        return False
    _, _, chunk, key, other = best
    counts[chunk][key] -= 1
    if not counts[chunk][key]:
        del counts[chunk][key]
    counts[chunk][key[0], other] = counts[chunk].get((key[0], other), 0) + 1
    return True


def _slack(problem: StageProblem, counts: _Counts) -> list[float]:
    """By chunk, by how much it may be longer before a micro-batch takes longer."""
    seconds = [_sum(problem, groups, "forward") + _sum(problem, groups, "backward") for groups in counts]
    chunks = chunks_of(problem)
    slack = [0.0] * len(seconds)
    for together in zip(*chunks) if in_rounds(problem) else [tuple(range(problem.num_ranks))]:
        loads = [seconds[each] if in_rounds(problem) else sum(seconds[k] for k in chunks[each]) for each in together]
        for each, load in zip(together, loads):
            for chunk in (each,) if in_rounds(problem) else chunks[each]:
                slack[chunk] = max(loads) - load
    return slack


def _kept(problem: StageProblem, counts: _Counts, chunks: Sequence[int]) -> float:
    held = problem.in_flight
    return sum(
        _sum(problem, counts[chunk], "state_bytes") + held[chunk] * _sum(problem, counts[chunk], "saved_bytes")
        for chunk in chunks
    )


def _sum(problem: StageProblem, groups: dict[tuple[int, int], int], name: str) -> float:
    return sum(count * float(getattr(_costs(problem, *key), name)) for key, count in groups.items())


def _costs(problem: StageProblem, run: int, choice: int) -> LayerCosts:
    return problem.runs[run].choices[choice].costs
