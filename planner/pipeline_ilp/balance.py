"""Heuristic cuts for several chunks a rank; nothing is proved.

``balance`` moves units off the busiest rank, for several long runs. ``by_rounds`` is for one long run under interleaved
schedules, where a round waits for its longest chunk: the chunks of a round hold equally many layers, in equal choices.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from cost_models.step import LayerCosts
from planner.pipeline_ilp.cuts import greedy_partition
from planner.pipeline_ilp.fronts import DualWeights
from planner.pipeline_ilp.peak_levels import PeakLevel, Slot, fastest_front, peak_levels
from planner.pipeline_ilp.ranks import main_run
from planner.pipeline_ilp.stage_bounds import Rounds, fewest_rounds
from planner.pipeline_ilp.stage_problem import ROUNDING, Assignment, StageProblem
from planner.pipeline_ilp.stage_program import chunks_of, in_rounds

#: How many of the least busy ranks are tried as receivers of a unit of the busiest one.
_TARGETS = 4
#: How many divisions of the layers over rounds are tried, and how many ranks are tried as models for all others.
_WAYS, _MODELS = 3, 3
#: Units of one rank: (chunk, run, choice).
_Placed = list[tuple[int, int, int]]


def balance(problem: StageProblem, weights: DualWeights) -> Assignment | None:
    """Balance the ranks' seconds by cuts, then take each rank's fastest choices within memory (None: out of memory).

    The cuts ignore memory: schedules with several chunks a rank use nearly equal memory on all ranks.
    """
    fastest = [min(weights.unit(choice.costs) for choice in run.choices) for run in problem.runs]
    units = [run for run, entry in enumerate(problem.runs) for _ in range(entry.count)]
    ends = _balanced_ends(problem, [fastest[run] for run in units])
    counts: list[dict[tuple[int, int], int]] = [{} for _ in ends]
    begins = [0, *ends[:-1]]
    fastest_placements = _FastestPlacements(problem, weights)
    for rank, chunks in enumerate(chunks_of(problem)):
        slots = [(chunk, run) for chunk in chunks for run in units[begins[chunk] : ends[chunk]]]
        placed = fastest_placements.of(rank, slots)
        if placed is None:
            return None
        for chunk, run, choice in placed:
            counts[chunk][run, choice] = counts[chunk].get((run, choice), 0) + 1
    return tuple(tuple((run, choice, count) for (run, choice), count in sorted(groups.items())) for groups in counts)


def _balanced_ends(problem: StageProblem, seconds: Sequence[float]) -> list[int]:
    """Where each chunk ends (in units), improved one unit at a time from the greedy partition."""
    sums = np.array([0.0, *itertools.accumulate(seconds)])
    ranks = np.array(problem.ranks)
    ends = np.array([*greedy_partition(seconds, problem.num_chunks)[0], len(seconds)])

    def loads(ends: np.ndarray) -> np.ndarray:
        chunks = np.diff(sums[np.concatenate(([0], ends))])
        return np.bincount(ranks, weights=chunks, minlength=problem.num_ranks)

    def cost(ends: np.ndarray) -> tuple[float, float]:
        load_by_rank = loads(ends)
        if in_rounds(problem):
            chunks = np.diff(sums[np.concatenate(([0], ends))])
            longest = chunks.reshape(-1, problem.num_ranks).max(axis=1)
            return float(longest.sum()), float((chunks**2).sum())
        return float(load_by_rank.max()), float((load_by_rank**2).sum())

    best = cost(ends)
    for _ in range(2 * len(seconds)):
        now = loads(ends)
        order = np.argsort(now)
        moves = [
            moved
            for giver in np.flatnonzero(ranks == order[-1])
            for taker in np.flatnonzero(np.isin(ranks, order[:_TARGETS]))
            if (moved := _moved(ends, int(giver), int(taker))) is not None
        ]
        nearest = min(moves, key=cost, default=ends)
        if cost(nearest) >= best:
            break
        ends, best = nearest, cost(nearest)
    return [int(end) for end in ends]


def _moved(ends: np.ndarray, giver: int, taker: int) -> np.ndarray | None:
    """The ends after ``giver`` passes a unit to ``taker``, shifting all chunks between; None if it has just one."""
    if giver == taker or ends[giver] - (ends[giver - 1] if giver else 0) < 2:
        return None
    moved = ends.copy()
    if giver < taker:
        moved[giver:taker] -= 1
    else:
        moved[taker:giver] += 1
    return moved


class _FastestPlacements:
    """The (chunk, run, choice) of every unit of a rank in its fastest choices within memory, over all levels of peaks.

    Cuts that give a rank's first chunks as many units share what is worked out of these.
    """

    def __init__(self, problem: StageProblem, weights: DualWeights) -> None:
        self.problem, self.weights = problem, weights
        self.levels: dict[tuple[int, frozenset[Slot]], list[PeakLevel]] = {}

    def of(self, rank: int, slots: Sequence[Slot]) -> _Placed | None:
        """Those of one rank with units in ``slots``, None if they do not fit."""
        key = rank, frozenset(slots)
        if key not in self.levels:
            problem = self.problem
            self.levels[key] = peak_levels(
                problem.runs, slots, self.weights, held=problem.in_flight, limit=problem.memory[rank]
            )
        front = fastest_front(self.levels[key], slots)
        return None if front is None else front.units()


def by_rounds(problem: StageProblem, weights: DualWeights) -> Iterator[Assignment]:
    """Yield assignments in which the chunks of a round are alike, for interleaved schedules and one long run.

    The ranks' fastest choices within memory differ, and every round would wait for another rank. So one rank is the
    model: all others copy its choices where they fit, and each then speeds up single units while memory allows.
    """
    run = main_run(problem)
    if run is None or not in_rounds(problem):
        return
    chunks, fastest, quickening = chunks_of(problem), _FastestPlacements(problem, weights), _Quickening(problem)
    for counts in _round_counts(problem, run):
        slots = [
            [(chunk, kind) for chunk in chunks_of_rank for kind in _runs_of(problem, run, chunk, counts)]
            for chunks_of_rank in chunks
        ]
        fastest_by_rank = [fastest.of(rank, slots[rank]) for rank in range(problem.num_ranks)]
        placed_by_rank = [placed for placed in fastest_by_rank if placed is not None]
        if len(placed_by_rank) < len(fastest_by_rank):
            continue
        yield _grouped(problem, placed_by_rank)
        if all(math.isinf(limit) for limit in problem.memory):
            continue
        busy = [sum(_seconds(problem, unit) for unit in placed) for placed in placed_by_rank]
        for model in sorted(range(problem.num_ranks), key=lambda rank: -busy[rank])[:_MODELS]:
            alike = [
                _alike(problem, rank, run, placed, placed_by_rank[model]) for rank, placed in enumerate(placed_by_rank)
            ]
            yield _grouped(problem, [quickening.of(rank, placed) for rank, placed in enumerate(alike)])


def all_alike(problem: StageProblem) -> Iterator[Assignment]:
    """Yield assignments with even chunks and one choice for the whole long run, each also with faster choices where
    memory allows. For one long run."""
    run = main_run(problem)
    if run is None:
        return
    counts, quickening = _even_counts(problem, run), _Quickening(problem)
    for choice in range(len(problem.runs[run].choices)):
        placed = [
            [
                (chunk, kind, choice if kind == run else -1)
                for chunk in chunks_of_rank
                for kind in _runs_of(problem, run, chunk, counts)
            ]
            for chunks_of_rank in chunks_of(problem)
        ]
        placed_by_rank = [_with_ends(problem, rank, units) for rank, units in enumerate(placed)]
        ranks = [units for units in placed_by_rank if units is not None]
        if len(ranks) == problem.num_ranks:
            yield _grouped(problem, ranks)
            yield _grouped(problem, [quickening.of(rank, units) for rank, units in enumerate(ranks)])


def _even_counts(problem: StageProblem, run: int) -> list[int]:
    """Units of the long run in each chunk: one less beside an end of the model; remainders go to the chunks with the
    fewest micro-batches in flight."""
    per_chunk, more = divmod(problem.num_units, problem.num_chunks)
    counts = [per_chunk] * problem.num_chunks
    for chunk in sorted(range(problem.num_chunks), key=lambda chunk: problem.in_flight[chunk])[:more]:
        counts[chunk] += 1
    counts[0] -= run > 0
    counts[-1] -= run < len(problem.runs) - 1
    return counts


def _with_ends(problem: StageProblem, rank: int, placed: _Placed) -> _Placed | None:
    """The units with the fastest choices for the model's ends (marked −1) that fit in memory; None if none does."""
    ends = sorted({kind for _, kind, choice in placed if choice < 0})
    orders = [
        sorted(range(len(problem.runs[kind].choices)), key=lambda choice: _seconds(problem, (0, kind, choice)))
        for kind in ends
    ]
    for chosen in itertools.product(*orders):
        of_end = dict(zip(ends, chosen))
        units = [(chunk, kind, of_end.get(kind, choice)) for chunk, kind, choice in placed]
        if _used(problem, units) <= problem.memory[rank] * (1 + ROUNDING):
            return units
    return None


def _seconds(problem: StageProblem, unit: tuple[int, int, int]) -> float:
    costs = problem.runs[unit[1]].choices[unit[2]].costs
    return costs.forward_seconds + costs.backward_seconds


def _grouped(problem: StageProblem, ranks: Sequence[_Placed]) -> Assignment:
    groups = Counter(unit for placed in ranks for unit in placed)
    held = sorted((chunk, run, choice, count) for (chunk, run, choice), count in groups.items())
    return tuple(tuple(group[1:] for group in held if group[0] == chunk) for chunk in range(problem.num_chunks))


def _runs_of(problem: StageProblem, run: int, chunk: int, counts: Sequence[int]) -> list[int]:
    """The run of each unit in a chunk that holds ``counts[chunk]`` units of the long run."""
    before = [0] * (chunk == 0 and run > 0)
    after = [len(problem.runs) - 1] * (chunk == problem.num_chunks - 1 and run < len(problem.runs) - 1)
    return [*before, *([run] * counts[chunk]), *after]


def _round_counts(problem: StageProblem, run: int) -> list[list[int]]:
    """Units of the long run in each chunk, for the shortest divisions over rounds; later rounds hold the remainders."""
    crossing = (problem.runs[run].receive_forward, problem.runs[run].receive_backward)
    candidates: list[list[int]] = []
    for pick in (min, max):
        seconds = [
            pick(choice.costs.forward_seconds + choice.costs.backward_seconds for choice in entry.choices)
            for entry in problem.runs
        ]
        if max(range(len(seconds)), key=lambda other: problem.runs[other].count * seconds[other]) != run:
            continue
        for rounds in fewest_rounds(problem, seconds, crossing, hold=1, most=_WAYS):
            counts = _counted(problem, run, rounds)
            if counts is not None and counts not in candidates:
                candidates.append(counts)
    return candidates


def _counted(problem: StageProblem, run: int, rounds: Rounds) -> list[int] | None:
    """Units of the long run in each chunk, with any surplus taken off the ranks in turn."""
    ranks, inner = problem.num_ranks, problem.num_chunks // problem.num_ranks - 2
    counts = [rounds.first[0], *([rounds.first[1]] * (ranks - 1))]
    for place in range(inner):
        counts += [rounds.middle // inner + (place >= inner - rounds.middle % inner)] * ranks
    counts += [*([rounds.last[1]] * (ranks - 1)), rounds.last[0]]
    least = [1] * problem.num_chunks
    least[0], least[-1] = int(run == 0), int(run == len(problem.runs) - 1)
    chunks = chunks_of(problem)
    rank = 0
    for _ in range(sum(counts) - problem.runs[run].count):
        for shift in range(ranks):
            spare = [chunk for chunk in chunks[(rank + shift) % ranks] if counts[chunk] > least[chunk]]
            if spare:
                counts[max(spare, key=lambda chunk: counts[chunk])] -= 1
                rank += shift + 1
                break
        else:
            return None
    return counts


def _alike(problem: StageProblem, rank: int, run: int, placed: _Placed, model: _Placed) -> _Placed:
    """The ``placed`` units in the choices of the ``model`` rank, round by round; unchanged where those do not fit."""
    choices_by_round: dict[int, list[int]] = {}
    for chunk, kind, choice in model:
        if kind == run:
            choices_by_round.setdefault(chunk // problem.num_ranks, []).append(choice)
    copied = []
    for chunk, kind, choice in placed:
        remaining = choices_by_round.get(chunk // problem.num_ranks, [])
        if kind == run and remaining:
            remaining.sort(key=lambda other: _seconds(problem, (chunk, kind, other)))
            choice = remaining.pop() if len(remaining) > 1 else remaining[0]
        copied.append((chunk, kind, choice))
    return copied if _used(problem, copied) <= problem.memory[rank] * (1 + ROUNDING) else placed


def _used(problem: StageProblem, placed: _Placed) -> float:
    """Bytes that a rank needs to hold these units."""
    held = problem.in_flight
    costs = [(problem.runs[run].choices[choice].costs, held[chunk]) for chunk, run, choice in placed]
    return sum(_kept(*figures) for figures in costs) + max(figures.peak_bytes for figures, _ in costs)


def _kept(costs: LayerCosts, held: float) -> float:
    return costs.state_bytes + held * costs.saved_bytes


class _Quickening:
    """Speeds up units of a rank while memory allows; what choices cost is listed once for all ranks."""

    def __init__(self, problem: StageProblem) -> None:
        self.problem = problem
        self.costs = [[choice.costs for choice in run.choices] for run in problem.runs]
        self.quickest = [
            sorted(range(len(row)), key=lambda choice: row[choice].forward_seconds + row[choice].backward_seconds)
            for row in self.costs
        ]

    def of(self, rank: int, placed: _Placed) -> _Placed:
        """The units in order, each with the fastest choice that still fits in memory."""
        limit, held = self.problem.memory[rank] * (1 + ROUNDING), self.problem.in_flight
        costs, quickest = self.costs, self.quickest
        held_bytes = sum(_kept(costs[run][choice], held[chunk]) for chunk, run, choice in placed)
        peaks = Counter(costs[run][choice].peak_bytes for _, run, choice in placed)
        placed = list(placed)
        for place, (chunk, run, choice) in enumerate(placed):
            if choice == quickest[run][0]:
                continue
            current = costs[run][choice]
            peaks[current.peak_bytes] -= 1
            rest, peak = (
                held_bytes - _kept(current, held[chunk]),
                max((size for size, count in (+peaks).items()), default=0.0),
            )
            for other in quickest[run][: quickest[run].index(choice)]:
                faster = costs[run][other]
                size = rest + _kept(faster, held[chunk])
                if size + max(peak, faster.peak_bytes) <= limit:
                    placed[place], held_bytes, current = (chunk, run, other), size, faster
                    break
            peaks[current.peak_bytes] += 1
        return placed
