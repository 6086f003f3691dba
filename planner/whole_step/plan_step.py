"""From a captured graph and a cluster to the plan of a whole training step."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cost_models import Cluster
from cost_models.cluster_format import REORDER
from cost_models.text import counted
from cost_models.told_apart import are_told_apart
from cost_models.unequal_devices import orders
from passes.ir.graph import Graph
from passes.plan import Plan
from passes.plan.step_plan import CHUNKED_LOSS
from passes.plan.text_tables import format_change
from passes.repeats.repeated_blocks import BlockRun
from planner.pipeline_ilp.stage_problem import ROUNDING
from planner.sharding_ilp.folding import BETTER
from planner.solvers.collection import no_collection
from planner.solvers.linear import EFFORT_LIMIT, STOPPED, TIME_LIMIT
from planner.whole_step.best_first import Search
from planner.whole_step.beyond_closed_form import BeyondClosedForm
from planner.whole_step.candidates.demands import AXES, Demands, is_number
from planner.whole_step.candidates.expert_layouts import data_experts
from planner.whole_step.candidates.infeasible import infeasible, infeasible_on_unequal
from planner.whole_step.candidates.mesh_layout import divisors
from planner.whole_step.costs.fusion import fuse
from planner.whole_step.costs.level_one import LevelOne
from planner.whole_step.costs.longer_blocks import UnlikeCopies, longer_blocks
from planner.whole_step.costs.sharding import ShardingSpace
from planner.whole_step.costs.stage_devices import level_one_of
from planner.whole_step.costs.unit_costs import StepUnits
from planner.whole_step.devices_alone import faster_alone
from planner.whole_step.judged_search import judged_search, left_out_schedules
from planner.whole_step.judging import PROVED, ROUNDED, judged_best
from planner.whole_step.offloading import (
    fits_on_host,
    host_too_small,
    plan_as_demanded,
    with_divided_state,
    within_hosts,
    without_activations,
)
from planner.whole_step.plainest import is_among, plainer_demands, with_first_runner_up
from planner.whole_step.result.lighter import lightest
from planner.whole_step.result.lp_files import write_step_programs
from planner.whole_step.result.outcome import Outcome, StepSolution
from planner.whole_step.result.plan_of_solution import (
    Judged,
    alternative_of,
    continued,
    extract,
    judge,
    searched_if_open,
    unproved_if_open,
    with_bound,
)
from planner.whole_step.result.search_progress import ANALYSING, Progress, Report
from planner.whole_step.shared_spaces import Spaces, shared_space
from planner.whole_step.unequal_search import check_unequal, search_of

#: Objectives of ``plan_step``.
OBJECTIVES = ("time", "devices", "memory", "plainest")
#: Relative precision of the least memory.
MEMORY_STEP = 0.01


def plan_step(
    graph: Graph,
    cluster: Cluster,
    demands: Demands,
    *,
    pins: Mapping[str, Mapping[str, Any]] | None = None,
    objective: str = "time",
    target_seconds: float | None = None,
    progress: Progress | None = None,
    write_lp: str | Path | None = None,
    spaces: Spaces | None = None,
) -> Plan:
    """Decide how a training step of ``graph`` (captured at the global batch) runs on ``cluster``.

    Args:
        pins: constraints on shardings by glob, see ``planner.sharding_ilp.constraints``.
        objective: ``"time"``: the fastest step; ``"devices"``: the fewest devices whose step takes no more than
            ``target_seconds``; ``"memory"``: the step that fits in the least memory on each device; ``"plainest"``: of
            steps that predictions do not tell apart from the fastest (``cost_models.told_apart``) the plainest one.
        progress: told how far planning is, see ``planner.whole_step.result.search_progress``.
        write_lp: where to write the plan's programs, see ``planner.whole_step.result.lp_files``.
        spaces: what earlier plans of the same graph have in common with this one, which is added to.

    Raises:
        ValueError: if nothing fits or meets the demands; the message says what is missing and what would help.
    """
    check_objective(objective, target_seconds)
    check_unequal(cluster, demands, objective)
    with no_collection():
        planner = _Planner(graph, demands, pins, progress, spaces)

        def plan_with(each: Demands) -> Plan:
            return planner.with_demands(each).best(cluster, objective, target_seconds)

        plan = plan_as_demanded(cluster, demands, objective, plan_with)
        if write_lp is not None:
            write_step_programs(planner.solutions[id(plan.step)][1], write_lp)
        return plan


def check_objective(objective: str, target_seconds: float | None) -> None:
    """Raise ValueError for an objective that is not known, or that does not go with ``target_seconds``."""
    if objective not in OBJECTIVES:
        raise ValueError(f"unknown objective {objective!r}: expected one of {', '.join(OBJECTIVES)}")
    if (objective == "devices") != (target_seconds is not None):
        raise ValueError('target_seconds goes with objective="devices": give both or neither')
    if target_seconds is not None and not (is_number(target_seconds) and 0 < target_seconds < math.inf):
        raise ValueError(f"target_seconds must be a positive number of seconds, got {target_seconds!r}")


@dataclass(frozen=True)
class Chosen:
    """The best of a search's solutions, those beside it, and experts' layouts that divide only data."""

    demands: Demands
    search: Search
    outcome: Outcome
    experts: Sequence[Judged]
    best: Judged
    others: list[Judged]


class _Planner:
    """Searches of one graph, which share what does not depend on the cluster."""

    def __init__(
        self,
        graph: Graph,
        demands: Demands,
        pins: Mapping[str, Mapping[str, Any]] | None,
        progress: Progress | None,
        spaces: Spaces | None = None,
    ) -> None:
        self.demands, self.pins, self.progress = demands, dict(pins or {}), progress
        if progress is not None:
            progress(Report(ANALYSING))
        self.graph, self.fusion = graph, fuse(graph) if demands.compiled else None
        #: By id of its step, every extracted plan and its solution.
        self.solutions: dict[int, tuple[Plan, StepSolution]] = {}
        self.pose(None, spaces)

    def pose(self, blocks: tuple[BlockRun, ...] | None, spaces: Spaces | None = None) -> None:
        """Set up what all searches share; ``blocks``: blocks whose copies are planned alike, None for all."""
        shared = None if self.pins or blocks is not None else spaces
        self.space, self.step_units = shared_space(shared, self.demands, lambda: self.posed(blocks))

    def posed(self, blocks: tuple[BlockRun, ...] | None) -> tuple[ShardingSpace, StepUnits]:
        """The space of all shardings, and what is saved of every unit."""
        space = ShardingSpace.of(
            self.graph,
            fusion=self.fusion,
            pins=self.pins,
            blocks=blocks,
            solver=self.demands.solver,
            overlap_tensor=self.demands.overlap_tensor,
        )
        step_units = StepUnits.of(space, compiled=self.demands.compiled, offload=self.demands.offloads_activations)
        if self.demands.fixed.get("recompute") == {CHUNKED_LOSS}:
            space.unconverted = step_units.logits  # what is demanded must be possible
        return space, step_units

    def with_demands(self, demands: Demands) -> _Planner:
        """The same for demands that differ in what is on the hosts; solutions are recorded here, too."""
        other = copy.copy(self)
        other.demands = demands
        other.step_units = dataclasses.replace(self.step_units, offload=demands.offloads_activations)
        return other

    def best(self, cluster: Cluster, objective: str, target_seconds: float | None) -> Plan:
        """The best plan by one of ``OBJECTIVES``."""
        if objective == "devices":
            assert target_seconds is not None
            return self.fewest_devices(cluster, target_seconds)
        if objective == "memory":
            return self.least_memory(cluster)
        plan = self.plainest(cluster) if objective == "plainest" else self.fastest(cluster, self.demands)
        return self.beside_devices_alone(plan, cluster) if cluster.has_unequal_devices else plan

    def beside_devices_alone(self, plan: Plan, cluster: Cluster) -> Plan:
        """The plan, with a note if some of the devices, of one kind, would be faster without the others."""
        if cluster.unequal != REORDER or self.demands.fixed.keys() & set(AXES):
            return plan  # which devices there are, or how many, has been said
        note = faster_alone(plan, cluster, lambda part: self.fastest_if_any(part, self.demands))
        return plan if note is None else dataclasses.replace(plan, notes=(*plan.notes, note))

    def search(
        self, cluster: Cluster, demands: Demands, level_one: LevelOne | None = None, *, before: Search | None = None
    ) -> tuple[Search, Outcome]:
        """A search and its outcome; ``before``: one of the same demands but for gap and limits."""
        level_one = level_one or level_one_of(cluster, self.space, self.step_units)
        search = search_of(level_one, cluster, demands, progress=self.progress)
        if before is not None:
            search.go_on_from(before)
        outcome = within_hosts(search, search.run())
        if outcome.solutions or (rest := left_out_schedules(search)) is None:
            return search, outcome
        other = judged_search(search, rest, limit=math.inf)
        return other if other[1].solutions else (search, outcome)

    def fastest(self, cluster: Cluster, demands: Demands) -> Plan:
        """The fastest plan; on unequal devices in any order along the pipeline."""
        possible = list(orders(cluster))
        return self.fastest_in_order(cluster, demands) if len(possible) == 1 else self.fastest_of(possible, demands)

    def fastest_of(self, clusters: list[Cluster], demands: Demands) -> Plan:
        """The fastest plan on any of the clusters, which differ in the order of their devices."""
        num_programs = demands.programs_of(self.space.num_experts)
        share = dataclasses.replace(demands, time_limit=demands.seconds / len(clusters), max_programs=num_programs)
        outcomes: list[Outcome] = []
        plans: list[Plan] = []
        for cluster in clusters:
            search, outcome = self.search(cluster, share)
            outcomes.append(outcome)
            if outcome.solutions:
                plans.append(self.chosen(cluster, share, search, outcome))
        if not plans:
            raise infeasible_on_unequal(clusters[0], outcomes)
        best = min(plans, key=lambda plan: plan.step.costs.simulated)
        unsolved = [outcome.proved for outcome in outcomes if not outcome.solutions]
        bound = min([*unsolved, *(plan.certificate.bound for plan in plans)])
        return unproved_if_open(with_bound(best, bound), gap=max(demands.gap, PROVED))

    def fastest_in_order(self, cluster: Cluster, demands: Demands) -> Plan:
        search, outcome = self.search(cluster, demands)
        if outcome.solutions:
            return self.chosen(cluster, demands, search, outcome)
        if not outcome.host_bytes:
            raise infeasible(search, outcome)
        less = self.with_less_on_hosts(demands)
        if less is None:
            raise host_too_small(search, outcome)
        plan = less.fastest(cluster, less.demands)
        return with_bound(plan, min(outcome.proved, plan.certificate.bound))

    def with_less_on_hosts(self, demands: Demands) -> _Planner | None:
        """The same for demands that leave less to the hosts than ``demands``; None if these leave nothing more out."""
        less = without_activations(demands) or with_divided_state(demands)
        return None if less is None else self.with_demands(less)

    def fastest_if_any(self, cluster: Cluster, demands: Demands) -> Plan | None:
        """``fastest``, or None if nothing fits, without working out what would help."""
        plans = []
        for ordered in orders(cluster):
            search, outcome = self.search(ordered, demands)
            less = self.with_less_on_hosts(demands) if outcome.host_bytes else None
            if less is not None:
                return less.fastest_if_any(cluster, less.demands)
            plans += [self.chosen(ordered, demands, search, outcome)] if outcome.solutions else []
        return min(plans, key=lambda plan: plan.step.costs.simulated, default=None)

    def chosen(self, cluster: Cluster, demands: Demands, search: Search, outcome: Outcome) -> Plan:
        """The plan of a search's best solution, or one with left-out schedules or longer blocks if that is faster."""
        best = self.beside_longer_blocks(cluster, demands, search, outcome)
        gap = max(demands.gap, PROVED)
        # what a search leaves below its own cutoff is what it gave up
        gave_up = outcome.bound < outcome.solutions[0].seconds * (1.0 - gap * (1.0 + ROUNDING))
        return searched_if_open(best, gap=gap, gave_up=gave_up)

    def beside_longer_blocks(self, cluster: Cluster, demands: Demands, search: Search, outcome: Outcome) -> Plan:
        """The plan of a search's best solution, or of a search with longer blocks if that is faster."""
        best = self.beside_closed_form(cluster, search, self.chosen_of(cluster, demands, search, outcome))
        unlike = UnlikeCopies(search)
        if cluster.has_unequal_devices or not unlike.may_gain(outcome):
            return best
        for blocks in longer_blocks(self.space.runs, unlike.num_variables):
            rest = search.remaining(demands)
            if rest is None:
                break
            longer = self.with_blocks(blocks)
            search, outcome = longer.search(cluster, rest)
            if not outcome.solutions:
                continue
            plan = longer.extracted(cluster, longer.lightest(longer.chosen_of(cluster, demands, search, outcome)))
            if plan.step.costs.simulated < best.step.costs.simulated * (1.0 - BETTER):
                best = plan
            if not UnlikeCopies(search).may_gain(outcome):
                break
        return best

    def with_blocks(self, blocks: tuple[BlockRun, ...]) -> _Planner:
        """The same with other blocks, whose copies are planned alike."""
        other = copy.copy(self)
        other.pose(blocks)
        return other

    def beside_closed_form(self, cluster: Cluster, search: Search, chosen: Chosen) -> Plan:
        """The plan of what was chosen, in the least memory; or one that the simulator has as clearly faster."""
        plan = self.extracted(cluster, chosen)
        best = BeyondClosedForm(cluster, search, self.pins, self.solutions).best(plan)
        if best.step is not plan.step or (lighter := self.lightest(chosen)) is chosen:
            return best
        return continued(self.extracted(cluster, lighter), best.certificate, bound=best.certificate.bound)

    def chosen_of(self, cluster: Cluster, demands: Demands, search: Search, outcome: Outcome) -> Chosen:
        """What a search's best solution is; if that is not proved, of a search with a smaller gap."""
        experts = _data_experts(search, cluster, demands)
        best, others = judged_best(demands, search, outcome, experts)
        gap = _gap_to_prove(best, outcome)
        if gap is not None:
            search, outcome = self.closer(cluster, dataclasses.replace(demands, gap=gap), search, outcome)
            best, others = judged_best(demands, search, outcome, experts)
        return Chosen(demands, search, outcome, experts, best, others)

    def extracted(self, cluster: Cluster, chosen: Chosen) -> Plan:
        """The plan of what was chosen, whose solution is recorded."""
        best, others = chosen.best, chosen.others
        plan = extract(chosen.search, chosen.outcome, best, others, cluster=cluster, constraints=self.pins)
        self.solutions[id(plan.step)] = plan, best.solution
        return plan

    def closer(self, cluster: Cluster, demands: Demands, search: Search, outcome: Outcome) -> tuple[Search, Outcome]:
        """Search with a smaller gap in what is left of the limits, and merge both outcomes."""
        rest = search.remaining(demands)
        if rest is None:
            late = time.monotonic() >= search.deadline
            return search, dataclasses.replace(outcome, status=TIME_LIMIT if late else EFFORT_LIMIT)
        search, again = self.search(cluster, rest, search.level_one, before=search)
        fastest = {solution.candidate: solution for solution in outcome.solutions}
        for solution in again.solutions:
            if solution.candidate not in fastest or solution.seconds <= fastest[solution.candidate].seconds:
                fastest[solution.candidate] = solution
        solutions = sorted(fastest.values(), key=lambda solution: solution.seconds)
        proved, bound = max(outcome.proved, again.proved), max(outcome.bound, again.bound)
        return search, dataclasses.replace(again, solutions=solutions, bound=bound, of_all_shardings=proved)

    def lightest(self, chosen: Chosen) -> Chosen:
        """The same, or with a solution in less memory as the best: within half the gap, still proved, no slower than an
        expert. The same, too, if time is out."""
        best, outcome = chosen.best, chosen.outcome
        if outcome.status == TIME_LIMIT:
            return chosen
        tie = 1.0 + chosen.demands.gap / 2
        proved = max(best.solution.seconds, outcome.bound / (1.0 - ROUNDED * PROVED))
        slowest = min(best.solution.seconds * tie, proved)
        fastest_expert = min((expert.report.seconds for expert in chosen.experts), default=math.inf)
        simulated = max(best.report.seconds, min(best.report.seconds * tie, fastest_expert))
        lighter = lightest(chosen.search, best, chosen.others, slowest=slowest, simulated=simulated)
        if lighter is best or not fits_on_host(chosen.search, lighter.solution):
            return chosen
        return dataclasses.replace(chosen, best=lighter)

    def plainest(self, cluster: Cluster) -> Plan:
        """The plainest plan that predictions do not tell apart from the fastest, which is its first runner-up."""
        fastest = self.fastest(cluster, self.demands)
        for demands in plainer_demands(self.demands):
            if is_among(fastest.step, demands.fixed):
                break
            plan = self.fastest_if_any(cluster, demands)
            if plan is not None and not are_told_apart(plan.step.costs.simulated, fastest.step.costs.simulated):
                return self.beside_fastest(plan, fastest)
        return fastest

    def beside_fastest(self, plan: Plan, fastest: Plan) -> Plan:
        """The plan with ``fastest`` as its first runner-up, and a note on what it was taken for."""
        step = with_first_runner_up(plan.step, alternative_of(judge(self.solutions[id(fastest.step)][1])))
        self.solutions[id(step)] = self.solutions[id(plan.step)]
        change = format_change(fastest.step.costs.simulated, plan.step.costs.simulated)
        note = f"the plainest plan that predictions do not tell apart from the fastest ({change}), its first runner-up"
        return dataclasses.replace(plan, step=step, notes=(*plan.notes, note))

    def fewest_devices(self, cluster: Cluster, target: float) -> Plan:
        """The plan of the smallest part of the cluster that is fast enough."""
        slowest = None
        for size in _sizes(cluster):
            last = size == cluster.num_devices
            plan = (self.fastest if last else self.fastest_if_any)(cluster.subset(size), self.demands)
            if plan is None:
                continue
            if plan.step.costs.seconds <= target:
                return plan
            slowest = plan.step.costs.seconds
        raise ValueError(
            f"no plan takes {target:g} s a step: all {counted(cluster.num_devices, 'device')} of {cluster.name!r} take "
            f"{slowest:.3g} s; give more devices or a longer target_seconds"
        )

    def least_memory(self, cluster: Cluster) -> Plan:
        """Bisect the memory limit for the least that still has a plan."""
        best = self.fastest(cluster, self.demands)
        low, high = 0.0, max(rank.total for rank in best.step.memory)
        while high - low > MEMORY_STEP * high:
            middle = (low + high) / 2
            limit = middle / (1.0 - self.demands.headroom)
            less = self.fastest_if_any(cluster, dataclasses.replace(self.demands, memory_limit=limit))
            if less is None:
                low = middle
                continue
            best, high = less, min(middle, max(rank.total for rank in less.step.memory))
        return best


def _data_experts(search: Search, cluster: Cluster, demands: Demands) -> list[Judged]:
    """Experts' layouts that divide only data; on unequal devices, for which there are none, nothing."""
    return [] if cluster.has_unequal_devices else list(data_experts(search.level_one, cluster, demands))


def _gap_to_prove(best: Judged, outcome: Outcome) -> float | None:
    """The gap at which a search would prove that ``best`` is near-optimal by the closed form; None if it is proved
    already, time ran out, or the closed form has a clearly faster solution."""
    fastest, needed = outcome.solutions[0].seconds, best.solution.seconds * (1.0 - ROUNDED * PROVED)
    if outcome.bound >= needed or outcome.status in STOPPED or fastest < needed:
        return None
    return 1.0 - needed / fastest


def _sizes(cluster: Cluster) -> list[int]:
    """Numbers of devices to try: divisors of a node, then whole nodes."""
    sizes: set[int] = set()
    inner = 1
    for level in cluster.levels:
        sizes.update(inner * count for count in divisors(level.group_size // inner))
        sizes.update(inner * count for count in range(1, min(16, level.group_size // inner) + 1))
        inner = level.group_size
    return sorted(sizes)
