"""Expert baselines for a training step, as data: restrictions of the same search space.

Each baseline is a row of ``BASELINES``: the values that every choice may take, the rules that split the layers on the
tensor axis, and the rule that cuts the pipeline. Recompute and ZeRO are the same for all layers; every value of them,
every mesh shape and every micro-batch is tried. The same cost models, stage program and simulator price a baseline; its
open choices are decided in its favour.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from cost_models import Cluster
from cost_models.step_time import step_memory, step_seconds
from passes.ir.graph import Graph
from passes.plan import Plan
from planner.pipeline_ilp.cuts import greedy_partition, partition
from planner.pipeline_ilp.stage_problem import Assignment, StageProblem, as_step, fits
from planner.pipeline_ilp.stage_search import StageSolution
from planner.sharding_ilp.role_restrictions import alike
from planner.whole_step.best_first import Search
from planner.whole_step.candidates.candidates import Candidate, candidates
from planner.whole_step.candidates.demands import ZERO_RANKS, Demands
from planner.whole_step.candidates.mesh_layout import ORDERS
from planner.whole_step.candidates.tensor_roles import (
    TensorRoles,
    megatron_roles,
    redco_roles,
    transformers_roles,
    whole_head_roles,
)
from planner.whole_step.candidates.training_options import POLICIES, ZERO_STAGES
from planner.whole_step.costs.fusion import fuse
from planner.whole_step.costs.level_one import LevelOne, Sharded
from planner.whole_step.costs.sharding import ShardingSpace
from planner.whole_step.costs.stage_devices import WeightedLevelOne, level_one_of
from planner.whole_step.costs.unit_costs import StepUnits
from planner.whole_step.costs.unit_figures import UnitFigures
from planner.whole_step.result.outcome import Outcome, StepSolution
from planner.whole_step.result.plan_of_solution import Judged, extract, judge
from planner.whole_step.unequal_search import UnequalSearch, check_unequal

Splitter = Literal["megatron", "megatron without sequence parallelism", "redco", "transformers", "deepspeed"]
Cutter = Literal["parameters", "greedy", "layers"]

#: Solutions slower than the fastest by no more than this share (closed form) are simulated too.
NEAR = 0.03
#: Orders of the axes in which tensor parallelism joins neighbours.
INNER_TENSOR = tuple(order for order in ORDERS if order[-1] == "tp")


@dataclass(frozen=True)
class StepBaseline:
    """``fixed``: values that choices may take; ``tensor``: whose rules split the layers (within a node; None: no tensor
    axis); ``cuts``: the rule that cuts the pipeline (None: the optimal cut); ``model_type``: the only one that it was
    published for, by the name in configs (None: any); ``is_hybrid``: ZeRO divides over the neighbours within a level of
    links, not over all data ranks."""

    fixed: Mapping[str, tuple[Any, ...]]
    tensor: Splitter | None = None
    cuts: Cutter | None = None
    model_type: str | None = None
    is_hybrid: bool = False


_RECOMPUTE = ("none", "selective", "full")
_DATA_ONLY: Mapping[str, tuple[Any, ...]] = {"pp": (1,), "ep": (1,), "cp": (1,), "tp": (1,)}
_PIPELINE: Mapping[str, tuple[Any, ...]] = {
    "cp": (1,),
    "tp": (1,),
    "schedule": ("1f1b", "interleaved_1f1b"),
    "recompute": _RECOMPUTE,
    "zero": (0, 1),
}
#: Mixtures of experts as Megatron-Core trains them: its distributed optimizer is ZeRO 1.
_MICRO_BATCHES_OF_ONE: Mapping[str, tuple[Any, ...]] = {
    "cp": (1,),
    "tp": (1,),
    "micro_batch": (1,),
    "recompute": _RECOMPUTE,
    "zero": (1,),
}

BASELINES: Mapping[str, StepBaseline] = {
    "megatron": StepBaseline(
        {"cp": (1,), "schedule": ("1f1b", "interleaved_1f1b"), "recompute": _RECOMPUTE, "zero": (0, 1)},
        tensor="megatron",
    ),
    "fsdp": StepBaseline({**_DATA_ONLY, "recompute": _RECOMPUTE, "zero": (3,)}),
    "hsdp": StepBaseline({**_DATA_ONLY, "recompute": _RECOMPUTE, "zero": (3,)}, is_hybrid=True),
    "ddp": StepBaseline({**_DATA_ONLY, "recompute": ("none", "full"), "zero": (0,)}),
    "deepspeed": StepBaseline({**_DATA_ONLY, "recompute": _RECOMPUTE, "zero": (1, 2)}),
    "redco": StepBaseline({"pp": (1,), "cp": (1,), "recompute": ("none", "full"), "zero": (0,)}, tensor="redco"),
    # Zheng et al. 2022: stages and shardings both searched, 1F1B, weight updates divided; one recompute policy.
    "alpa": StepBaseline({"cp": (1,), "schedule": ("1f1b",), "recompute": ("none", "full"), "zero": (0, 1)}),
    "transformers tp": StepBaseline(
        {"pp": (1,), "cp": (1,), "recompute": ("none", "full"), "zero": (0, 3)}, tensor="transformers"
    ),
    "transformers pp": StepBaseline(
        {"cp": (1,), "tp": (1,), "schedule": ("gpipe", "1f1b"), "recompute": ("none", "full"), "zero": (0,)},
        cuts="layers",
    ),
    "uniform parameters": StepBaseline(_PIPELINE, cuts="parameters"),
    "greedy parameters": StepBaseline(_PIPELINE, cuts="greedy"),
    # "DeepSeek-V3 Technical Report", arXiv 2412.19437, 2024, section 3.2: 16 stages, experts over 64 devices (8 nodes),
    # ZeRO 1, no tensor parallelism, DualPipe (here its form with one copy of the parameters); what it recomputes (norms
    # and up-projections) is between these policies. Its products in float8 are in bfloat16 here.
    "deepseek-v3": StepBaseline(
        {**_MICRO_BATCHES_OF_ONE, "pp": (16,), "ep": (64,), "schedule": ("dualpipev",)}, model_type="deepseek_v3"
    ),
    # NVIDIA-NeMo/Megatron-Bridge, recipes/gpt_oss/gpt_oss.py, 2025: gpt_oss_120b_pretrain_config.
    "gpt-oss-120b": StepBaseline(
        {**_MICRO_BATCHES_OF_ONE, "pp": (4,), "ep": (8,), "schedule": ("1f1b",)}, model_type="gpt_oss"
    ),
    # NVIDIA/NeMo, collections/llm/recipes/mixtral_8x7b.py, 2024: pretrain_recipe.
    "mixtral-8x7b": StepBaseline(
        {**_MICRO_BATCHES_OF_ONE, "pp": (4,), "ep": (8,), "schedule": ("interleaved_1f1b",), "chunks_per_rank": (8,)},
        model_type="mixtral",
    ),
}


def baseline_named(name: str) -> StepBaseline:
    """The baseline ``name``.

    Raises:
        ValueError: if there is none of that name.
    """
    if name not in BASELINES:
        raise ValueError(f"unknown baseline {name!r}: expected one of {', '.join(BASELINES)}")
    return BASELINES[name]


@dataclass(frozen=True)
class Priced:
    """The best of a baseline: the solution that is fastest in the simulator, and the search that found it."""

    name: str
    judged: Judged
    search: Search
    outcome: Outcome

    @property
    def seconds(self) -> float:
        """Of the step, by the closed form."""
        return self.judged.solution.seconds

    @property
    def simulated(self) -> float:
        """Seconds of the step, by the simulator."""
        return self.judged.report.seconds

    def plan(self) -> Plan:
        """The baseline as a plan like any other."""
        cluster = self.search.cluster
        return extract(self.search, self.outcome, self.judged, [], cluster=cluster, constraints={})


@dataclass(frozen=True)
class Missing:
    """A baseline without a solution, and the reason."""

    name: str
    reason: str


def best_of_baseline(name: str, space: BaselineSpace, cluster: Cluster, demands: Demands) -> Priced | Missing:
    """The best solution of the baseline ``name`` for the model of ``space``, or the reason why there is none.

    Raises:
        ValueError: for a baseline that does not exist.
    """
    row = baseline_named(name)
    reason = space.reason_not(row)
    if reason is not None:
        return Missing(name, reason)
    return best_of_rules(name, row, space.level_one(row.tensor, cluster), cluster, demands)


def data_experts(level_one: LevelOne, cluster: Cluster, demands: Demands) -> Iterator[Judged]:
    """Yield the best of each baseline that divides only data: cheap to compute, so that no plan needs to be slower."""
    for name, row in BASELINES.items():
        if row.tensor is None and row.cuts is None and _DATA_ONLY.items() <= row.fixed.items():
            result = best_of_rules(name, row, level_one, cluster, demands)
            if isinstance(result, Priced):
                yield result.judged


def best_of_rules(
    name: str, row: StepBaseline, level_one: LevelOne, cluster: Cluster, demands: Demands, *, within_node: bool = True
) -> Priced | Missing:
    """The best solution that the rules of ``row`` allow; ``within_node``: no tensor axis is longer than a node."""
    refused = refusal_on_unequal(row, cluster, demands)
    if refused is not None:
        return Missing(name, refused)
    best: Priced | None = None
    lacks: list[float] = []
    for uniform_demands in _uniform(row, demands):
        limit = float("inf") if best is None else best.seconds * (1.0 + NEAR)
        allowed = neighbours_only(uniform_demands, cluster) if within_node else uniform_demands
        search = capped_search(level_one, cluster, allowed, limit=limit)
        outcome = search.run() if row.cuts is None else _with_cuts(search, row.cuts)
        lacks.extend(outcome.shortfalls.values())
        for judged in _near(outcome):
            if best is None or judged.report.seconds < best.simulated:
                best = Priced(name, judged, search, outcome)
    if best is not None:
        return best
    nothing = "no data axis crosses a level of links" if row.is_hybrid else "no mesh shape divides"
    return Missing(name, f"lacks {min(lacks) / 2**30:.1f} GiB" if lacks else nothing)


def refusal_on_unequal(row: StepBaseline, cluster: Cluster, demands: Demands) -> str | None:
    """Why the rules of ``row`` have no price on unequal devices; None if they have, or devices are equal."""
    try:
        check_unequal(cluster, replace(demands, fixed={**demands.fixed, **_allowed(row, demands)}), "time")
    except ValueError as error:
        return str(error)
    return None


class BaselineSpace:
    """A captured model with what its baselines have in common, made once.

    ``config``: the transformers config whose plans two of the baselines take, if there is one; ``overlap_tensor``:
    split layers may exchange their rows themselves.
    """

    def __init__(
        self, graph: Graph, *, config: Any = None, compiled: bool = False, overlap_tensor: bool = False
    ) -> None:
        self.graph, self.config = graph, config
        fusion = fuse(graph) if compiled else None
        self.space = ShardingSpace.of(graph, fusion=fusion, overlap_tensor=overlap_tensor)
        self.overlap_tensor = overlap_tensor
        self.step_units = StepUnits.of(self.space, compiled=compiled)
        self._roles: dict[Splitter, TensorRoles | None] = {}
        self._spaces: dict[Splitter | None, tuple[ShardingSpace, StepUnits]] = {None: (self.space, self.step_units)}
        self._level_ones: dict[Splitter | None, LevelOne] = {}

    def reason_not(self, row: StepBaseline) -> str | None:
        """Why the model does not have such a baseline, None if it does."""
        if row.model_type is not None and getattr(self.config, "model_type", None) != row.model_type:
            return f"published for models of type {row.model_type}"
        if row.tensor is not None and self.roles(row.tensor) is None:
            return "the model's config has no base_model_tp_plan"
        if row.cuts == "layers" and not getattr(self.config, "base_model_pp_plan", None):
            return "the model's config has no base_model_pp_plan"
        return None

    def roles(self, tensor: Splitter) -> TensorRoles | None:
        """What layers do on the tensor axis."""
        if tensor not in self._roles:
            self._roles[tensor] = _ROLES[tensor](self.graph, self.config)
        return self._roles[tensor]

    def level_one(self, tensor: Splitter | None, cluster: Cluster) -> LevelOne:
        """Shardings on ``cluster`` under the rules of ``tensor``, cached for the last cluster."""
        level = self._level_ones.get(tensor)
        if level is None or level.cluster is not cluster:
            level = self._level_ones[tensor] = level_one_of(cluster, *self._space(tensor))
        return level

    def _space(self, tensor: Splitter | None) -> tuple[ShardingSpace, StepUnits]:
        if tensor not in self._spaces:
            assert tensor is not None
            tensor_roles = self.roles(tensor)
            assert tensor_roles is not None
            space, step_units = self.space, self.step_units
            blocks = alike(space.runs, tensor_roles.named_roles)
            if blocks != space.runs:
                space = ShardingSpace.of(
                    self.graph, fusion=space.fusion, blocks=blocks, overlap_tensor=self.overlap_tensor
                )
                step_units = StepUnits.of(space, compiled=step_units.compiled)
            self._spaces[tensor] = (replace(space, rules=tensor_roles.rules(self.graph)), step_units)
        return self._spaces[tensor]


_ROLES: Mapping[Splitter, Callable[[Graph, Any], TensorRoles | None]] = {
    "megatron": lambda graph, _: megatron_roles(graph),
    "megatron without sequence parallelism": lambda graph, _: replace(megatron_roles(graph), sequence=False),
    "redco": lambda graph, _: redco_roles(graph),
    "transformers": transformers_roles,
    "deepspeed": whole_head_roles,
}


class CappedSearch(Search):
    """A search that prunes candidates slower than ``limit`` seconds."""

    def __init__(self, *arguments: Any, limit: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.limit = limit

    def _cutoff(self) -> float:
        return min(self.limit, super()._cutoff())


class CappedUnequalSearch(CappedSearch, UnequalSearch):
    """The same on unequal devices."""


def capped_search(level_one: LevelOne, cluster: Cluster, demands: Demands, *, limit: float) -> CappedSearch:
    """The search on a cluster, whatever its devices, that prunes candidates slower than ``limit`` seconds."""
    kind = CappedUnequalSearch if isinstance(level_one, WeightedLevelOne) else CappedSearch
    return kind(level_one, cluster, demands, limit=limit)


def _allowed(row: StepBaseline, demands: Demands) -> dict[str, frozenset[Any]]:
    """The values of the baseline's choices that ``demands`` allow."""
    return {name: frozenset(demands.among(name, values)) for name, values in row.fixed.items()}


def _uniform(row: StepBaseline, demands: Demands) -> Iterator[Demands]:
    """The demands with the baseline's, once for every recompute policy and ZeRO stage that all layers may have."""
    fixed = _allowed(row, demands)
    if row.is_hybrid:
        everyone = demands.forbidden.get(ZERO_RANKS, frozenset()) | {0}
        demands = replace(demands, forbidden={**demands.forbidden, ZERO_RANKS: everyone})
    else:
        fixed.setdefault(ZERO_RANKS, frozenset(demands.among(ZERO_RANKS, (0,))))
    policies = [policy for policy in POLICIES if policy in fixed["recompute"]]
    stages = [stage for stage in ZERO_STAGES if stage in fixed["zero"]]
    for policy, stage in itertools.product(policies, stages):
        one = {"recompute": frozenset((policy,)), "zero": frozenset((stage,))}
        yield replace(demands, fixed={**demands.fixed, **fixed, **one}, num_alternatives=1)


def neighbours_only(demands: Demands, cluster: Cluster) -> Demands:
    """No more tensor parallelism than a node has devices, on neighbours."""
    node = cluster.levels[0].group_size
    sizes = frozenset(size for size in range(1, node + 1) if demands.allows("tp", size))
    return replace(demands, fixed={**demands.fixed, "tp": sizes, "order": frozenset(INNER_TENSOR)})


def _near(outcome: Outcome) -> Iterator[Judged]:
    """Simulate the solutions that are nearly as fast as the best by the closed form."""
    for solution in outcome.solutions:
        if solution.seconds <= outcome.solutions[0].seconds * (1.0 + NEAR):
            yield judge(solution)


@dataclass
class _BestSolutions:
    """Solutions so far, best first."""

    solutions: list[StepSolution] = field(default_factory=list)

    def limit(self, limit: float) -> float:
        return min([limit, *(solution.seconds * (1.0 + NEAR) for solution in self.solutions[:1])])

    def add(self, solution: StepSolution) -> None:
        self.solutions = sorted([*self.solutions, solution], key=lambda candidate: candidate.seconds)[:8]


def _with_cuts(search: CappedSearch, cuts: Cutter) -> Outcome:
    """Solve every candidate with the pipeline cut by rule, for fixed recompute and ZeRO."""
    best_solutions = _BestSolutions()
    lacks: dict[Candidate, float] = {}
    bounded: list[tuple[float, int, Candidate]] = []
    for index, candidate in enumerate(filter(search.has_problem, _all_candidates(search))):
        least = search.bounds.whole(candidate.cut)
        if least < float("inf"):
            bounded.append((search.step_bound(candidate, least), index, candidate))
    for least, _, candidate in sorted(bounded):
        if least >= best_solutions.limit(search.limit):
            break
        sharded = search.sharded(candidate)
        if sharded is None or search.step_bound(candidate, sharded.seconds) >= best_solutions.limit(search.limit):
            continue
        solution, missing = _cut(search.problem(candidate, sharded), candidate, sharded, cuts)
        if missing > 0:
            lacks[candidate] = missing
        else:
            best_solutions.add(solution)
    best = best_solutions.solutions[0].seconds if best_solutions.solutions else float("inf")
    return Outcome(best_solutions.solutions, best, "enumerated", search.fates.counts, lacks)


def _all_candidates(search: Search) -> Iterator[Candidate]:
    level_one = search.level_one
    return candidates(
        search.cluster,
        global_batch=level_one.global_batch,
        num_units=sum(unit.count for unit in level_one.step_units.units),
        demands=search.demands,
        micro_batches=level_one.micro_batches,
        num_experts=level_one.num_experts,
    )


def _cut(problem: StageProblem, candidate: Candidate, sharded: Sharded, cuts: Cutter) -> tuple[StepSolution, float]:
    """The candidate with its pipeline cut by rule, and the memory shortfall of its fullest rank in bytes."""
    costs = _unit_costs(sharded.figures, cuts)
    split = greedy_partition if cuts == "greedy" else partition
    begins, _ = split(costs, problem.num_chunks)
    assignment = as_assignment([run.count for run in problem.runs], begins)
    step = as_step(problem, assignment)
    memory = step_memory(step)
    seconds = step_seconds(step).total
    solution = StepSolution(candidate, sharded, problem, StageSolution(assignment, seconds, seconds, "cut by rule"))
    missing = 0.0 if fits(problem, memory) else max(used - limit for used, limit in zip(memory, problem.memory))
    return solution, missing


def _unit_costs(figures: Sequence[UnitFigures], cuts: Cutter) -> list[float]:
    """Costs that the rule balances, for each copy of each unit: parameters, or layers (copies of repeated blocks)."""
    costs: list[float] = []
    for unit_figures in figures:
        parameters = sum(weight.elements for weight in unit_figures.weights if weight.trainable)
        cost = float(unit_figures.unit.run is not None) if cuts == "layers" else float(parameters)
        costs.extend([cost] * unit_figures.unit.count)
    return costs


def as_assignment(counts: Sequence[int], begins: Sequence[int]) -> Assignment:
    """Chunks that begin at the units ``begins``, of runs of ``counts`` units that each have a single choice."""
    run_of = [run for run, count in enumerate(counts) for _ in range(count)]
    ends = (0, *begins, len(run_of))
    return tuple(
        tuple((run, 0, sum(1 for _ in units)) for run, units in itertools.groupby(run_of[begin:end]))
        for begin, end in itertools.pairwise(ends)
    )
