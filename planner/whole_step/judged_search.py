"""A second search, in which the simulator judges every solution.

The closed form of a step's seconds promises too much where chunks wait for one another, above all under schedules whose
chunks are uneven. A search by the closed form prunes what is slower than such a promise, and leaves out the schedules
of which it promises most (``planner.whole_step.candidates.candidates.is_offered``), since it would solve them first and
prove little. Once a plan is there, both are searched for what beats its simulated seconds.

A solution is judged in the version that its plan would have (``planner.whole_step.result.uniform_plans``), so that the
search prunes by what the plan takes, and not by what the solution itself does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from cost_models.schedules import SCHEDULES
from cost_models.step_time import layer_sum, least_simulated
from planner.pipeline_ilp.stage_problem import as_step
from planner.solvers.linear import OPTIMAL
from planner.whole_step.best_first import KEPT, Search
from planner.whole_step.candidates.candidates import Candidate
from planner.whole_step.candidates.demands import Demands
from planner.whole_step.candidates.expert_layouts import CappedSearch
from planner.whole_step.costs.step_prices import EXPERT, PIPELINE
from planner.whole_step.offloading import fits_on_host, within_hosts
from planner.whole_step.result.outcome import Outcome, StepSolution, with_solution
from planner.whole_step.result.plan_of_solution import Judged, judge
from planner.whole_step.result.uniform_plans import versions
from planner.whole_step.search_entry import SearchEntry

#: Integer programs that the search may solve.
MOST_PROGRAMS = 60.0
#: Integer programs for the same layout under other schedules, and the share by which the closed form may hold their
#: pipelines for slower than they play where chunks are uneven.
PROGRAMS_OF_LAYOUT, UNEVEN = 4.0, 0.05
#: Candidates whose bounds are within this share of each other are all solved before one's solution is to be beaten:
#: which of them the simulator has as faster the bounds do not say.
TIED = 0.005


class JudgedSearch(CappedSearch):
    """A search that prunes what is no faster than ``limit``, or than a solution's simulated seconds.

    ``proved``: the bound that the plan at hand has, which nothing here can raise. ``uneven``: the share by which a
    closed form may be slower than what it must beat.
    """

    def __init__(
        self, *arguments: Any, limit: float, proved: float = math.inf, uneven: float = 0.0, **options: Any
    ) -> None:
        super().__init__(*arguments, limit=limit * (1.0 + uneven), **options)
        self.proved, self.uneven = proved, uneven
        #: What is to be beaten from the next candidate on whose bound is above ``tied``; at once by one that is solved
        #: again.
        self.next_limit, self.tied = self.limit, -math.inf
        self.simulated: dict[Candidate, float] = {}
        #: Candidates whose stages were solved, each with the price of bytes of its sharding.
        self.tried: set[tuple[Candidate, float]] = set()

    def go_on_from(self, other: Search) -> None:
        """The same without the solutions, which ``limit`` leaves out until they are judged."""
        super().go_on_from(other)
        self.solutions = []
        if self.earlier is not None:  # what no search beats or proves by the closed form may be quicker than that says
            self.earlier = [dataclasses.replace(entry, stuck_at=math.inf) for entry in self.earlier]

    def leave_out(self, searched: JudgedSearch) -> None:
        """Try no candidate again that ``searched``, for what takes less than more, has solved or bounded; what it has
        proved counts here. Of what a limit kept it from nothing is left out."""
        is_whole = searched.status == OPTIMAL
        waiting = {
            entry.candidate.undivided
            for entry in searched.left
            if not is_whole and (entry.candidate, entry.weight) not in searched.tried
        }
        for entry in searched.left:
            candidate = entry.candidate.undivided
            if entry.family is None and candidate not in waiting:
                self.left.append(entry)
                self.finished.add(candidate)

    def _cutoff(self) -> float:
        return self.limit

    def _dive(self, heap: list[SearchEntry]) -> None:
        """The same where there is nothing to beat yet."""
        if self.limit == math.inf:
            super()._dive(heap)

    def _advance(self, entry: SearchEntry) -> Iterable[SearchEntry]:
        if entry.bound > self.tied:
            self.limit = self.next_limit
        return super()._advance(entry)

    def _solve(self, entry: SearchEntry) -> Iterable[SearchEntry]:
        self.tied = -math.inf if entry.effort else entry.bound * (1.0 + TIED)
        self.tried.add((entry.candidate, entry.weight))
        return super()._solve(entry)

    def _is_worth_more(self, bound: float) -> bool:
        """Whether more effort may prove more: beyond the plan's own bound only of a plan that takes its place."""
        return bool(self.solutions) or bound < self.proved

    def _add(self, solution: StepSolution) -> None:
        """Keep a solution, the fastest in the simulator first; what its best version takes is to be beaten."""
        solutions = with_solution(self.solutions, solution)
        if all(each is not solution for each in solutions):
            return
        best = self._best_version(solution)
        self.simulated[solution.candidate] = best.report.seconds
        # a plan's gap is of its closed form: all others are bounded within the gap of that, or as its own candidate is
        seconds = max(best.report.seconds, best.solution.seconds)
        limit = max(seconds * (1.0 - self.demands.gap), solution.stages.bound)
        if self.uneven:
            limit = best.report.seconds * (1.0 + self.uneven)
        self.next_limit = min(self.next_limit, limit)
        if math.isinf(self.tied):
            self.limit = self.next_limit
        self.solutions = sorted(solutions, key=lambda each: self.simulated[each.candidate])[:KEPT]

    def _best_version(self, solution: StepSolution) -> Judged:
        """A solution in the version that the simulator has as the fastest, as ``judged_best`` will choose it."""
        best = judge(solution)
        for version in versions(solution, self.demands):
            least = least_simulated(as_step(version.problem, version.assignment))
            if least < best.report.seconds and fits_on_host(self, version):
                best = min(best, judge(version), key=lambda each: each.report.seconds)
        return best


def left_out_schedules(search: Search) -> Demands | None:
    """The demands of a search for the schedules alone that ``search`` leaves out, in what it leaves of its limits.

    None if it leaves out none, since the user says which there are or devices are unequal, or nothing is left.
    """
    demands, rest = search.demands, within_limits(search)
    if rest is None or demands.left_out or "schedule" in demands.fixed or demands.fixed.get(PIPELINE) == {1}:
        return None
    return None if search.cluster.num_devices == 1 else dataclasses.replace(rest, left_out=True)


def other_schedules(search: Search, solution: StepSolution, *, seconds: float) -> Demands | None:
    """The demands of a search of a solution's layout and micro-batches under schedules whose order is played, for what
    takes less than ``seconds``.

    None if it has no pipeline, its ranks compute that long in the mean, the user says which schedules there are, or
    nothing is left of the limits.
    """
    rest = within_limits(search)
    candidate = solution.candidate
    layout = candidate.layout
    step = as_step(solution.problem, solution.assignment)
    computing = sum(layer_sum(chunk, "forward", "backward") for chunk in step.chunks) / layout.pipeline
    if candidate.num_microbatches * computing >= seconds:
        return None
    if rest is None or layout.pipeline == 1 or "schedule" in rest.fixed or rest.left_out:
        return None
    solved = {each.candidate.schedule for each in search.solutions if each.candidate.layout.sizes == layout.sizes}
    names = {name for name, row in SCHEDULES.items() if 0 < row.played < math.inf} - solved - {candidate.schedule}
    if not names:
        return None
    axes = {EXPERT: 1, **layout.sizes}
    one = {**axes, "order": layout.order, "num_microbatches": candidate.num_microbatches}
    fixed = {**rest.fixed, **{name: frozenset({value}) for name, value in one.items()}, "schedule": frozenset(names)}
    programs = min(PROGRAMS_OF_LAYOUT, rest.programs_of(search.level_one.num_experts))
    return dataclasses.replace(rest, fixed=fixed, max_programs=programs)


def within_limits(search: Search) -> Demands | None:
    """The demands of ``search`` in what it leaves of its limits; None if nothing is left, or devices are unequal."""
    rest = search.remaining(search.demands)
    if rest is None or search.cluster.has_unequal_devices:
        return None
    programs = min(MOST_PROGRAMS, rest.programs_of(search.level_one.num_experts))
    return dataclasses.replace(rest, max_programs=programs)


def judged_search(
    search: Search,
    demands: Demands,
    *,
    limit: float,
    proved: float = math.inf,
    uneven: float = 0.0,
    searched: JudgedSearch | None = None,
) -> tuple[JudgedSearch, Outcome]:
    """The search, after ``search``, for plans that take less than ``limit`` simulated seconds, and its outcome.

    Args:
        proved: the bound of the plan that these would replace.
        uneven: the share by which their closed forms may be slower than ``limit``.
        searched: an earlier one, for plans that take less than more: its candidates are not tried again.
    """
    after = JudgedSearch(search.level_one, search.cluster, demands, limit=limit, proved=proved, uneven=uneven)
    after.go_on_from(search)
    if searched is not None:
        after.leave_out(searched)
    return after, within_hosts(after, after.run())
