"""The search of whole steps on unequal devices: each pipeline rank has what its own devices take.

Layouts, micro-batches and schedules are searched as on equal devices, under bounds in weighted seconds
(``planner.whole_step.costs.stage_devices``), each with the sharding that is best in these; then other shardings are
tried where bounds of all of them leave room (``planner.whole_step.further_shardings``), and the least of these bounds
is what a certificate states (``Outcome.proved``).

A stage whose ranks are of one kind is priced on it; one that has several
kinds counts all as the slowest, so that what is found is never slower than if the whole cluster did. Layouts whose
stages differ are planned under the schedules whose closed form holds for them (``UNEQUAL_SCHEDULES``), ZB-H1 unasked
only where samples alone are divided.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from cost_models import Cluster
from cost_models.schedules import SCHEDULES
from planner.pipeline_ilp.stage_problem import ROUNDING, UNEQUAL_SCHEDULES, StageProblem, UnitRun, least_of
from planner.solvers.linear import OPTIMAL, UNPROVED
from planner.whole_step.best_first import Search
from planner.whole_step.candidate_problems import CandidateProblems
from planner.whole_step.candidates.candidates import Candidate, Family
from planner.whole_step.candidates.demands import Demands
from planner.whole_step.candidates.mesh_layout import Links, MeshLayout
from planner.whole_step.costs.level_one import LevelOne, Sharded, batch_prices
from planner.whole_step.costs.stage_devices import WeightedLevelOne, repriced
from planner.whole_step.costs.unit_choices import RankPrices, StageSetting, unit_runs
from planner.whole_step.further_shardings import FurtherShardings
from planner.whole_step.result.outcome import Outcome, StepSolution
from planner.whole_step.result.search_progress import Progress
from planner.whole_step.search_entry import SearchEntry


def search_of(level_one: LevelOne, cluster: Cluster, demands: Demands, *, progress: Progress | None = None) -> Search:
    """The search of one model on a cluster, whatever its devices."""
    if isinstance(level_one, WeightedLevelOne):
        return UnequalSearch(level_one, cluster, demands, progress=progress)
    return Search(level_one, cluster, demands, progress=progress)


def check_unequal(cluster: Cluster, demands: Demands, objective: str) -> None:
    """Refuse what cannot be right on unequal devices.

    Raises:
        ValueError: for an objective or a schedule that is for equal devices; it says what is for unequal ones.
    """
    if not cluster.has_unequal_devices:
        return
    instead = 'or count all as the slowest (unequal = "slowest" in the cluster file, --unequal slowest)'
    if objective == "devices":
        raise ValueError(
            f"objective='devices' takes the first devices of a cluster, and those of {cluster.name!r} are unequal: "
            f"plan for the devices that you would take, {instead}"
        )
    schedules = demands.among("schedule", SCHEDULES)
    if not set(schedules) & set(UNEQUAL_SCHEDULES):
        raise ValueError(
            f"schedule={', '.join(schedules)} is for stages on equal devices, and those of {cluster.name!r} are "
            f"unequal: allow {' or '.join(UNEQUAL_SCHEDULES)}, {instead}"
        )
    if 1 not in demands.fixed.get("chunks_per_rank", (1,)) or not demands.allows("chunks_per_rank", 1):
        raise ValueError(
            f"chunks_per_rank: stages on unequal devices hold one chunk each, and those of {cluster.name!r} are "
            f"unequal: allow 1, {instead}"
        )


class UnequalSearch(Search):
    """``Search`` where devices differ."""

    def __init__(
        self, level_one: WeightedLevelOne, cluster: Cluster, demands: Demands, *, progress: Progress | None = None
    ) -> None:
        super().__init__(level_one, cluster, demands, progress=progress)
        self.level_one: WeightedLevelOne = level_one
        self.devices = level_one.devices
        self.heaviest = max(level_one.weights)
        #: No device holds more, for bounds of all layouts; ``problem`` has the limit of each rank.
        self.memory = max(
            demands.memory_on(self.devices.usable_bytes((index,))) for index in range(len(self.devices.kinds))
        )
        self._repriced: dict[tuple[object, ...], tuple[Sharded, Sharded]] = {}
        #: Bounds over all shardings of candidates whose stages were then bounded under one.
        self.of_all_shardings: dict[Candidate, float] = {}

    def share_prices(self, other: CandidateProblems) -> None:
        """Take over what ``other`` has priced and proved, for the same demands but for gap and limits."""
        super().share_prices(other)
        if isinstance(other, UnequalSearch):
            self._repriced = other._repriced

    def go_on_from(self, other: Search) -> None:
        """Take over what is priced and proved alone: further shardings are of candidates that are bounded anew."""
        self.share_prices(other)

    def run(self) -> Outcome:
        """Search, then try further shardings where bounds of all shardings leave room, and state the least of these."""
        outcome = super().run()
        further = FurtherShardings(self, self.of_all_shardings)
        least = further.run(outcome.bound)
        best = self.solutions[0].seconds if self.solutions else math.inf
        outcome = replace(outcome, solutions=self.solutions, bound=min(outcome.bound, best), of_all_shardings=least)
        is_open = outcome.proved < best * (1.0 - self.demands.gap) * (1.0 - ROUNDING)
        return replace(outcome, status=UNPROVED if self.status == OPTIMAL and is_open else self.status)

    def to_beat(self, proved: float) -> float:
        """The seconds down to which all shardings are bounded and tried, of a search that ``proved`` so many of its own
        shardings."""
        best = self.solutions[0].seconds if self.solutions else math.inf
        return min(best, max(proved, best * (1.0 - self.demands.gap)))

    def record(self, solution: StepSolution) -> None:
        """Take a solution among those of the search."""
        self._add(solution)

    def is_stopped(self) -> bool:
        """Whether a limit is reached."""
        return self._is_stopped()

    def _bound_stages(self, entry: SearchEntry) -> Iterator[SearchEntry]:
        """The same; bounds hold for one sharding from here on. Where samples alone are divided there is no other."""
        candidate = entry.candidate
        if entry.is_divided and not _divides_samples_alone(candidate):
            self.of_all_shardings[candidate] = max(entry.bound, self.of_all_shardings.get(candidate, 0.0))
        yield from super()._bound_stages(entry)

    def step_bound(self, candidate: Candidate, seconds: float) -> float:
        """The same from weighted seconds: those of the fill are divided by the largest weight."""
        ranks, m = candidate.layout.pipeline, candidate.num_microbatches
        row = SCHEDULES[candidate.schedule]
        if row.splits_backward:
            return seconds * m / ranks
        divisor = candidate.chunks_per_rank if row.divided else 1
        return seconds * ((m - 1 / divisor) / ranks + 1 / (divisor * self.heaviest))

    def problem(self, candidate: Candidate, sharded: Sharded) -> StageProblem:
        """The stage problem of one candidate under one sharding, with each rank's own seconds and memory."""
        prices = dict(zip(self.devices.of_stages(candidate.layout), self.on_ranks(candidate, sharded)))
        by_kinds = {stage: self._runs_on(stage, each, candidate, sharded) for stage, each in prices.items()}
        return self.problem_of(candidate, by_kinds)

    def has_problem(self, candidate: Candidate) -> bool:
        """Whether stages are alike, or the schedule is one of those whose closed form holds for others."""
        alike = len(set(self.devices.of_stages(candidate.layout))) == 1
        return alike or (candidate.schedule in UNEQUAL_SCHEDULES and candidate.chunks_per_rank == 1)

    def _runs_on(
        self, stage: frozenset[int], prices: RankPrices, candidate: Candidate, sharded: Sharded
    ) -> tuple[UnitRun, ...]:
        """The chain of units on one kind of stage, cached for all schedules with the same setting."""
        setting = prices.setting
        key = (id(sharded), setting.layout, setting.num_microbatches, setting.ends_together, stage)
        if key not in self.runs:
            self.runs[key] = (sharded, unit_runs(prices.figures, setting))
        return self.runs[key][1]

    def problem_of(self, candidate: Candidate, by_kinds: Mapping[frozenset[int], tuple[UnitRun, ...]]) -> StageProblem:
        """The stage problem of one candidate, from the runs on each kind of stage."""
        stages = self.devices.of_stages(candidate.layout)
        rank_runs = _with_slower_ends([by_kinds[stage] for stage in stages]) if len(by_kinds) > 1 else ()
        split = SCHEDULES[candidate.schedule].splits_all
        return StageProblem(
            runs=least_of(rank_runs, split=split) if rank_runs else by_kinds[stages[0]],
            schedule=candidate.schedule,
            num_ranks=candidate.layout.pipeline,
            num_chunks=candidate.num_chunks,
            num_microbatches=candidate.num_microbatches,
            memory=tuple(self.demands.memory_on(self.devices.usable_bytes(stage)) for stage in stages),
            rank_runs=rank_runs,
        )

    def on_ranks(self, candidate: Candidate, sharded: Sharded) -> tuple[RankPrices, ...]:
        """By pipeline rank, what units cost on its devices."""
        layout, prices = candidate.layout, {}
        for stage in self.devices.of_stages(layout):
            if stage not in prices:
                links = self.devices.links(layout, stage)
                figures = self._on_links(sharded, candidate, links, stage).figures
                prices[stage] = RankPrices(self.setting_on(candidate, stage), figures)
        return tuple(prices[stage] for stage in self.devices.of_stages(layout))

    def setting_on(self, candidate: Candidate, stage: frozenset[int]) -> StageSetting:
        """Where the units of a candidate run on a stage of these kinds."""
        links = self.devices.links(candidate.layout, stage)
        return replace(self.setting(candidate), links=links, host_seconds=links.axes.device.host_seconds)

    def in_plan(self, candidate: Candidate, sharded: Sharded) -> Sharded:
        """The sharding at the prices of the slowest device, as a plan tells those of one micro-batch."""
        return self._on_links(sharded, candidate, Links.of(self.cluster, candidate.layout), None)

    def device_limits(self, candidate: Candidate) -> tuple[tuple[str, float], ...]:
        """By pipeline rank, its devices and the bytes that a plan may take on each."""
        stages = self.devices.of_stages(candidate.layout)
        return tuple(
            (self.devices.name(stage), self.demands.memory_on(self.devices.usable_bytes(stage))) for stage in stages
        )

    def _on_links(self, sharded: Sharded, candidate: Candidate, links: Links, stage: frozenset[int] | None) -> Sharded:
        """``sharded`` at the prices of ``links``, of a stage of these kinds."""
        key = (id(sharded), candidate.layout, stage)
        if key not in self._repriced:
            mixes = candidate.cut.pieces == candidate.layout.data or not self.level_one.micro_batches
            self._repriced[key] = sharded, repriced(sharded, batch_prices(links, mixes=mixes))
        return self._repriced[key][1]

    def links_on(self, layout: MeshLayout) -> Links:
        """The prices of a layout in weighted seconds."""
        return self.level_one.links_on(layout)

    def _members(self, family: Family) -> Iterator[SearchEntry]:
        if len(set(self.devices.of_stages(family.layout))) == 1:
            yield from super()._members(family)
            return
        for entry in super()._members(_of_unequal_stages(family)):
            if entry.candidate.schedule in UNEQUAL_SCHEDULES and self._is_offered(entry.candidate):
                yield entry

    def _is_offered(self, candidate: Candidate) -> bool:
        """Whether a candidate of unequal stages is tried: unasked, split backward passes only where samples alone are
        divided. The bounds over other shardings leave out what fills such a pipeline, and would leave a gap open."""
        is_asked = "schedule" in self.demands.fixed
        return is_asked or not SCHEDULES[candidate.schedule].splits_all or _divides_samples_alone(candidate)


def _divides_samples_alone(candidate: Candidate) -> bool:
    """Whether no operator is divided, so that there is one sharding."""
    return candidate.cut.context * candidate.cut.tensor * candidate.cut.expert == 1


def _of_unequal_stages(family: Family) -> Family:
    """The family without schedules that are for equal stages."""
    demands: Any = family.demands
    schedules = frozenset(demands.among("schedule", UNEQUAL_SCHEDULES))
    fixed = {**demands.fixed, "schedule": schedules, "chunks_per_rank": frozenset((1,))}
    return replace(family, demands=replace(demands, fixed=fixed))


def _with_slower_ends(by_rank: list[tuple[UnitRun, ...]]) -> tuple[tuple[UnitRun, ...], ...]:
    """Runs in which what passes a boundary between two ranks takes as long as on the slower one's links."""
    slower: list[tuple[UnitRun, ...]] = []
    alike: dict[tuple[int, float, float], UnitRun] = {}

    def with_receives(run: UnitRun, forward: float, backward: float) -> UnitRun:
        """One object for all ranks that are alike, which folds its choices once."""
        key = (id(run), forward, backward)
        if key not in alike:
            alike[key] = replace(run, receive_forward=forward, receive_backward=backward)
        return alike[key]

    for rank, runs in enumerate(by_rank):
        before, after = by_rank[max(0, rank - 1)], by_rank[min(rank + 1, len(by_rank) - 1)]
        slower.append(
            tuple(
                with_receives(
                    run,
                    max(run.receive_forward, behind.receive_forward),
                    max(run.receive_backward, ahead.receive_backward),
                )
                for run, behind, ahead in zip(runs, before, after, strict=True)
            )
        )
    return tuple(slower)
