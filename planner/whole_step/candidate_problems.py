"""What candidates of a step search are priced with: links, shardings, settings and stage problems."""

from __future__ import annotations

from dataclasses import replace

from cost_models import Cluster
from cost_models.schedules import SCHEDULES
from passes.plan.step_plan import ON_HOST
from planner.pipeline_ilp.posed_problem import PosedProblem
from planner.pipeline_ilp.stage_problem import StageProblem, UnitRun
from planner.whole_step.candidates.candidates import Candidate, zero_sizes
from planner.whole_step.candidates.demands import Demands
from planner.whole_step.candidates.mesh_layout import Links, MeshLayout
from planner.whole_step.candidates.training_options import POLICIES, ZERO_STAGES
from planner.whole_step.costs.level_one import LevelOne, Sharded
from planner.whole_step.costs.unit_choices import RankPrices, StageSetting, unit_runs, with_all_choices


class CandidateProblems:
    """The problems of all candidates of one model on one cluster."""

    def __init__(self, level_one: LevelOne, cluster: Cluster, demands: Demands) -> None:
        self.level_one, self.cluster, self.demands = level_one, cluster, demands
        self.memory = demands.memory_on(cluster.device.usable_bytes)
        self.links: dict[MeshLayout, Links] = {}
        self.divided: dict[MeshLayout, tuple[MeshLayout, ...]] = {}
        self.runs: dict[tuple[object, ...], tuple[Sharded, tuple[UnitRun, ...]]] = {}
        self.posed: dict[tuple[Candidate, int], tuple[Sharded, PosedProblem]] = {}
        #: Problems with the choices of all ways in which ZeRO may divide.
        self.posed_in_all: dict[tuple[Candidate, int], tuple[Sharded, PosedProblem]] = {}

    def share_prices(self, other: CandidateProblems) -> None:
        """Take over what ``other`` has priced and proved, for the same demands but for gap and limits."""
        self.links, self.divided, self.runs, self.posed = other.links, other.divided, other.runs, other.posed
        self.posed_in_all = other.posed_in_all

    def links_on(self, layout: MeshLayout) -> Links:
        """The prices of a layout."""
        if layout not in self.links:
            is_alike = not self.cluster.has_unequal_devices and self.level_one.cluster is self.cluster
            self.links[layout] = self.level_one.links_on(layout) if is_alike else Links.of(self.cluster, layout)
        return self.links[layout]

    def zero_layouts(self, layout: MeshLayout) -> tuple[MeshLayout, ...]:
        """A layout in all ways in which ZeRO may divide over its data ranks, over all of them first."""
        if layout not in self.divided:
            sizes = zero_sizes(self.cluster, layout, self.demands)
            if not self.level_one.space.graph.training:
                sizes = sizes[:1]
            self.divided[layout] = tuple(replace(layout, zero_ranks=size) for size in sizes)
        return self.divided[layout]

    def leanest(self, candidate: Candidate) -> Candidate:
        """A candidate with ZeRO over as many data ranks as the demands allow."""
        ways = self.zero_layouts(candidate.layout)
        return replace(candidate, layout=max(ways, key=lambda layout: layout.piece_ranks(expert=False)))

    def setting(self, candidate: Candidate) -> StageSetting:
        """Where the units of ``candidate`` run."""
        layout, demands = candidate.layout, self.demands
        return StageSetting(
            layout=layout,
            links=self.links_on(layout),
            num_microbatches=candidate.num_microbatches,
            forward_passes=self.level_one.forward_passes(candidate.num_microbatches),
            tied_apart=layout.pipeline > 1,
            ends_together=SCHEDULES[candidate.schedule].placement == "vee",
            training=demands.training,
            recompute=demands.among("recompute", (*POLICIES, ON_HOST)),
            zero=demands.among("zero", ZERO_STAGES),
            host_seconds=self.links_on(layout).axes.device.host_seconds,
        )

    def sharded(self, candidate: Candidate, weight: float = 0.0) -> Sharded | None:
        """The sharding of one candidate, see ``LevelOne.sharded_with_host``."""
        return self.level_one.sharded_with_host(
            candidate.cut, candidate.layout, self.links_on(candidate.layout), weight=weight
        )

    def fastest(self, candidate: Candidate) -> Sharded | None:
        """The sharding that is fastest on its devices, whatever the host does, see ``LevelOne.sharded``."""
        return self.level_one.sharded(candidate.cut, candidate.layout, self.links_on(candidate.layout))

    def problem(self, candidate: Candidate, sharded: Sharded) -> StageProblem:
        """The stage problem of one candidate under one sharding."""
        return self._problem_of(candidate, self._runs(candidate, sharded))

    def _problem_of(self, candidate: Candidate, runs: tuple[UnitRun, ...]) -> StageProblem:
        return StageProblem(
            runs=runs,
            schedule=candidate.schedule,
            num_ranks=candidate.layout.pipeline,
            num_chunks=candidate.num_chunks,
            num_microbatches=candidate.num_microbatches,
            memory=(self.memory,) * candidate.layout.pipeline,
        )

    def has_problem(self, candidate: Candidate) -> bool:
        """Whether the candidate's stages can be cut by a stage problem."""
        return True

    def pose(self, candidate: Candidate, sharded: Sharded) -> PosedProblem:
        """``problem`` with what is known of it, kept for a search with a smaller gap."""
        key = candidate, id(sharded)
        if key not in self.posed:
            self.posed[key] = sharded, PosedProblem(self.problem(candidate, sharded))
        return self.posed[key][1]

    def bound_of_ways(self, candidate: Candidate, sharded: Sharded, cutoff: float) -> float:
        """Lower bound of a candidate however ZeRO divides: of a problem whose units choose among all ways at once; 0
        where there is one way, or devices are unequal."""
        layouts = self.zero_layouts(candidate.layout)
        if len(layouts) == 1 or self.cluster.has_unequal_devices:
            return 0.0
        key = candidate, id(sharded)
        if key not in self.posed_in_all:
            problem = self._problem_of(candidate, self._runs_in_all(candidate, sharded))
            self.posed_in_all[key] = sharded, PosedProblem(problem)
        return self.posed_in_all[key][1].quick_bound(cutoff)

    def on_ranks(self, candidate: Candidate, sharded: Sharded) -> tuple[RankPrices, ...]:
        """By pipeline rank, what units cost there; ranks are alike."""
        return (RankPrices(self.setting(candidate), sharded.figures),) * candidate.layout.pipeline

    def in_plan(self, candidate: Candidate, sharded: Sharded) -> Sharded:
        """The sharding at the prices of one micro-batch that a plan tells."""
        return sharded

    def device_limits(self, candidate: Candidate) -> tuple[tuple[str, float], ...]:
        """Of unequal devices, by pipeline rank, which they are and the bytes that a plan may take on each."""
        return ()

    def _runs_in_all(self, candidate: Candidate, sharded: Sharded) -> tuple[UnitRun, ...]:
        """``_runs`` with the choices of all ways in which ZeRO may divide."""
        key = (*self._key_of_runs(candidate, sharded), "in all")
        if key not in self.runs:
            layouts = self.zero_layouts(candidate.layout)
            ways = [self._runs(replace(candidate, layout=layout), sharded) for layout in layouts]
            self.runs[key] = (sharded, with_all_choices(ways))
        return self.runs[key][1]

    def _key_of_runs(self, candidate: Candidate, sharded: Sharded) -> tuple[object, ...]:
        """What the choices of a chain of units depend on; where its ends lie, only if units share weights."""
        ends_together = sharded.has_tied_weights and SCHEDULES[candidate.schedule].placement == "vee"
        return id(sharded), candidate.layout, candidate.num_microbatches > 1, ends_together

    def _runs(self, candidate: Candidate, sharded: Sharded) -> tuple[UnitRun, ...]:
        """The chain of units with all choices, cached for all schedules with the same setting."""
        key = self._key_of_runs(candidate, sharded)
        if key not in self.runs:
            self.runs[key] = (sharded, unit_runs(sharded.figures, self.setting(candidate)))
        return self.runs[key][1]
