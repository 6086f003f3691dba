"""On unequal devices: bounds of candidates under any sharding, and the shardings that are tried beside the first.

All stages of a plan run one sharding. The search takes the one that is best in weighted seconds
(``planner.whole_step.costs.stage_devices``); where the stage program then gives one kind of devices most of the layers,
another one may be better. ``FurtherShardings`` takes up every candidate that the search bounded under its sharding
alone, least bound first, through these phases, until none is below what a plan must beat:

1. bound of all shardings if every unit takes, on each kind of stage, its share of the undivided unit
   (``planner.whole_step.costs.least_units``); no program is solved for it;
2. the same if every unit takes the least that any sharding makes of it, a program for each unit and kind;
3. other shardings are solved: the best of each kind of stage, and the best in mixes of their seconds in which each
   counts as often as it has layers, until that settles. Of these phases only this one finds plans.

The least bound of those that reach the end of phase 2 is what can be proved of all shardings. Which candidates are
taken up is decided by bounds and numbers; limits of the search stop it.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from cost_models.schedules import SCHEDULES
from planner.pipeline_ilp.posed_problem import quick_bound
from planner.pipeline_ilp.stage_ilp import solve_stages
from planner.pipeline_ilp.stage_problem import UNEQUAL_SCHEDULES, StageProblem
from planner.whole_step.best_first import STAGE_EFFORT
from planner.whole_step.candidates.candidates import Candidate
from planner.whole_step.costs.byte_weights import BYTE_WEIGHTS
from planner.whole_step.costs.least_units import least_runs, split_runs, undivided_share
from planner.whole_step.costs.level_one import Sharded
from planner.whole_step.costs.sharding import Cut
from planner.whole_step.costs.unit_figures import UnitFigures
from planner.whole_step.result.outcome import StepSolution

if TYPE_CHECKING:
    from planner.whole_step.unequal_search import UnequalSearch

#: Candidates that are solved under further shardings, and rounds of mixes of each.
MOST_TRIED, MOST_MIXES = 8, 3
#: Seconds of each unit on each kind of stage.
UnitSeconds = dict[frozenset[int], Sequence[float]]


class FurtherShardings:
    """Takes up the candidates of a search, see the module docstring.

    Attributes:
        bounds: of candidates, over all shardings, as far as they are known.
    """

    def __init__(self, search: UnequalSearch, bounds: Mapping[Candidate, float]) -> None:
        self.search, self.bounds = search, dict(bounds)
        self.level_one, self.devices = search.level_one, search.devices
        self.counts = [unit.count for unit in self.level_one.step_units.units]

    def run(self, proved: float) -> float:
        """Take up candidates until none is below what a plan must beat; the least bound over all shardings.

        Args:
            proved: bound of the search under its own shardings; nothing is gained by proving more.
        """
        heap = [(bound, index, candidate, 0) for index, (candidate, bound) in enumerate(self.bounds.items())]
        heapq.heapify(heap)
        phases = (self.bound_by_shares, self.bound_by_units)
        least, num_tried = math.inf, 0
        while heap and heap[0][0] < self.search.to_beat(proved) and not self.search.is_stopped():
            if num_tried == MOST_TRIED and heap[0][0] >= least:
                break
            bound, index, candidate, phase = heapq.heappop(heap)
            if phase < len(phases):
                self.bounds[candidate] = max(bound, phases[phase](candidate, self.search.to_beat(proved)))
                heapq.heappush(heap, (self.bounds[candidate], index, candidate, phase + 1))
                continue
            if num_tried < MOST_TRIED:
                num_tried += 1
                self.try_shardings(candidate)
            least = min(least, bound)
        return min(least, heap[0][0] if heap else math.inf)

    def bound_by_shares(self, candidate: Candidate, cutoff: float) -> float:
        """Lower bound if each unit takes its share of the undivided one."""
        return self._quick(candidate, self._shares(candidate), cutoff)

    def bound_by_units(self, candidate: Candidate, cutoff: float) -> float:
        """Lower bound if every unit takes the least that any sharding makes of it; infinite if none fits."""
        seconds: UnitSeconds = {}
        for stage in self.devices.of_stages(candidate.layout):
            level_one = self.level_one.mixed({stage: 1.0})
            least = level_one.least_of_units(candidate.cut, candidate.layout, level_one.links_on(candidate.layout))
            if least is None:
                return math.inf
            seconds[stage] = least
        bound = self._quick(candidate, seconds, cutoff)
        if bound >= cutoff or not _has_runs(candidate):
            return bound
        return max(bound, self._solved(candidate, seconds, cutoff))

    def _shares(self, candidate: Candidate) -> UnitSeconds:
        """By kind of stage, the share of every unit that one of equal parts takes."""
        return {
            stage: [undivided_share(figures, candidate.layout) for figures in self._undivided(candidate, stage)]
            for stage in self.devices.of_stages(candidate.layout)
        }

    def _quick(self, candidate: Candidate, seconds: UnitSeconds, cutoff: float) -> float:
        """Lower bound without a program; on stages that are alike from the units' seconds alone."""
        if len(seconds) == 1:
            (of_units,) = seconds.values()
            return candidate.bound(sum(map(operator.mul, self.counts, of_units)))
        return float(quick_bound(self._problem(candidate, seconds), cutoff=cutoff))

    def _solved(self, candidate: Candidate, seconds: UnitSeconds, cutoff: float) -> float:
        """Lower bound of the stage program of units that take so long; infinite if they do not fit."""
        problem = self._problem(candidate, seconds)
        bound = float(quick_bound(problem, cutoff=cutoff))  # of alike stages this is the first with memory
        if bound >= cutoff:
            return bound
        self.search.stage_programs += 1.0
        solved = solve_stages(
            problem,
            effort=STAGE_EFFORT,
            deadline=self.search.deadline,
            cutoff=cutoff if math.isfinite(cutoff) else None,
            gap=self.search.demands.gap / 4,
            gap_to_cutoff=0.0,
            solver=self.search.demands.solver,
        )
        return math.inf if solved is None else max(bound, float(solved.bound))

    def _problem(self, candidate: Candidate, seconds: UnitSeconds) -> StageProblem:
        """The stage problem of units that take so long, all else at the least that any sharding makes of it."""
        by_kinds = {
            stage: least_runs(self._undivided(candidate, stage), each, self.search.setting_on(candidate, stage))
            for stage, each in seconds.items()
        }
        by_kinds = split_runs(by_kinds) if SCHEDULES[candidate.schedule].splits_all else by_kinds
        return self.search.problem_of(candidate, by_kinds)

    def _undivided(self, candidate: Candidate, stage: frozenset[int]) -> tuple[UnitFigures, ...]:
        """Figures of the units on one kind of stage if only the batch is divided."""
        undivided = self.level_one.mixed({stage: 1.0}).alone(Cut(candidate.cut.pieces))
        assert undivided is not None  # the candidate has been bounded by it
        return undivided.figures

    def try_shardings(self, candidate: Candidate) -> None:
        """Solve a candidate under the best sharding of each kind of stage, and in mixes of their seconds."""
        stages = self.devices.of_stages(candidate.layout)
        tried: set[tuple[object, ...]] = set()
        for stage in dict.fromkeys(stages):
            self._try_mix(candidate, {stage: 1.0}, tried)
        for _ in range(MOST_MIXES if len(set(stages)) > 1 else 0):
            before = len(tried)
            for mix in self._mixes(candidate):
                self._try_mix(candidate, mix, tried)
            if len(tried) == before:
                break

    def _mixes(self, candidate: Candidate) -> Iterator[dict[frozenset[int], float]]:
        """What the best solution of a candidate gives each kind of stage: shares of the units, for the sum of all
        loads; and of units by the seconds that one takes there, for the largest."""
        solution = next((each for each in self.search.solutions if each.candidate == candidate), None)
        if solution is None:
            return
        stages = self.devices.of_stages(candidate.layout)
        units, seconds = dict.fromkeys(stages, 0.0), dict.fromkeys(stages, 0.0)
        for rank, groups in zip(solution.problem.ranks, solution.assignment, strict=True):
            runs = solution.problem.runs_on(rank)
            for run, choice, count in groups:
                costs = runs[run].choices[choice].costs
                units[stages[rank]] += count
                seconds[stages[rank]] += count * (costs.forward_seconds + costs.backward_seconds)
        yield _scaled_to_one(units)
        if all(seconds.values()):
            yield _scaled_to_one({stage: units[stage] ** 2 / seconds[stage] for stage in units})

    def _try_mix(
        self, candidate: Candidate, mix: Mapping[frozenset[int], float], tried: set[tuple[object, ...]]
    ) -> None:
        """Solve a candidate under the best sharding in a mix of seconds; if that does not fit, in fewer bytes."""
        level_one = self.level_one.mixed(mix)
        links = level_one.links_on(candidate.layout)
        for weight in BYTE_WEIGHTS:
            sharded = level_one.sharded_with_host(candidate.cut, candidate.layout, links, weight=weight)
            if sharded is None:
                return
            key = _key(sharded)
            if key not in tried:
                tried.add(key)
                if self._solve_under(candidate, sharded):
                    return

    def _solve_under(self, candidate: Candidate, sharded: Sharded) -> bool:
        """Solve a candidate under one sharding, and record what is found; whether it fits in memory."""
        problem = self.search.problem(candidate, sharded)
        self.search.stage_programs += 1.0
        solved = solve_stages(
            problem,
            effort=STAGE_EFFORT,
            deadline=self.search.deadline,
            gap=self.search.demands.gap / 2,
            solver=self.search.demands.solver,
        )
        if solved is not None and solved.assignment is not None:
            self.search.record(StepSolution(candidate, sharded, problem, solved))
        return solved is not None


def _has_runs(candidate: Candidate) -> bool:
    """Whether a candidate's schedule is one that stage problems of unequal ranks have; others are for equal stages."""
    return candidate.schedule in UNEQUAL_SCHEDULES and candidate.num_chunks == candidate.layout.pipeline


def _scaled_to_one(weights: Mapping[frozenset[int], float]) -> dict[frozenset[int], float]:
    total = sum(weights.values())
    return {stage: weight / total for stage, weight in weights.items()}


def _key(sharded: Sharded) -> tuple[object, ...]:
    """What tells one sharding from another."""
    assignment = sharded.variant.assignment
    options = tuple((option.inputs, option.outputs) for option in assignment.options.values())
    return options, tuple(tuple(item.arc.step for item in tree) for tree in assignment.trees.values())
