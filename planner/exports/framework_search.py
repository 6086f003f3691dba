"""Plans of a whole step within what another framework can say.

The framework's table gives the values that choices may take, case by case, and the rules that split layers on the
tensor axis. Recompute and ZeRO are the same for all layers; one search is run for each of their values, and each prunes
with the best plan before it. What a table's limits forbid beyond that is checked on the plans that come out.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping
from typing import Any

from cost_models import Cluster
from cost_models.unequal_devices import refuse_unequal
from passes.ir.graph import Graph
from passes.plan import Plan
from planner.exports.framework import Framework, inexpressible
from planner.exports.plan_facts import PlanFacts
from planner.pipeline_ilp.stage_problem import UnitRun
from planner.solvers.linear import STOPPED
from planner.whole_step.candidates.candidates import Candidate
from planner.whole_step.candidates.demands import FRAMEWORK, ZERO_RANKS, Demands, recorded
from planner.whole_step.candidates.expert_layouts import NEAR, BaselineSpace, CappedSearch, neighbours_only
from planner.whole_step.candidates.no_plan import NoPlan
from planner.whole_step.candidates.training_options import POLICIES, ZERO_STAGES
from planner.whole_step.costs.level_one import Sharded
from planner.whole_step.result.outcome import Outcome
from planner.whole_step.result.plan_of_solution import extract, judge
from planner.whole_step.result.search_progress import Progress

#: What units that do not repeat (embedding, loss) run as: frameworks recompute layers alone.
_ENDS = "none"


class LayerSearch(CappedSearch):
    """A search in which layers have one recompute policy and nothing else is recomputed."""

    def __init__(self, *arguments: Any, policy: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.policy = policy
        self._narrowed: dict[int, tuple[tuple[UnitRun, ...], tuple[UnitRun, ...]]] = {}

    def _runs(self, candidate: Candidate, sharded: Sharded) -> tuple[UnitRun, ...]:
        runs = super()._runs(candidate, sharded)
        if id(runs) not in self._narrowed:
            repeats = [figures.unit.run is not None for figures in sharded.figures]
            alike = not any(repeats)
            narrowed = tuple(
                _narrow(run, self.policy if is_layer or alike else _ENDS) for run, is_layer in zip(runs, repeats)
            )
            self._narrowed[id(runs)] = runs, narrowed
        return self._narrowed[id(runs)][1]


def _narrow(run: UnitRun, policy: str) -> UnitRun:
    """The run with one recompute policy, where it has that; else without recomputation."""
    for name in (policy, _ENDS):
        choices = tuple(choice for choice in run.choices if choice.label[0] == name)
        if choices:
            return dataclasses.replace(run, choices=choices)
    return run


def plan_for(
    framework: Framework,
    graph: Graph,
    cluster: Cluster,
    demands: Demands,
    *,
    config: Any = None,
    config_name: str = "",
    progress: Progress | None = None,
) -> Plan:
    """The fastest plan that ``framework`` can say all of.

    Args:
        demands: the user's, which narrow the framework's further.
        config: the model's transformers config, whose plan splits the layers for some frameworks.
        config_name: its name in the config library.
        progress: told how far each search is.

    Raises:
        ValueError: if the demands contradict the framework, or no plan of it fits.
    """
    refuse_unequal(cluster, f"a search within what {framework.title} can say")
    if demands.overlap_tensor and not framework.overlaps_tensor:
        raise ValueError(
            f"overlap_tensor=True does not go with framework={framework.name!r}: {framework.project} has no setting "
            "for layers that exchange their rows"
        )
    space = BaselineSpace(graph, config=config, compiled=demands.compiled, overlap_tensor=demands.overlap_tensor)
    tensor = framework.splitter if framework.splitter and space.roles(framework.splitter) is not None else None
    level_one = space.level_one(tensor, cluster)
    best: Plan | None = None
    bound, reasons, lacks, stopped = float("inf"), list[str](), list[float](), ""
    deadline, num_programs = time.monotonic() + demands.seconds, demands.programs_of(level_one.num_experts)
    for case, policy in cases_of(framework, demands, splits=tensor is not None):
        limit = float("inf") if best is None else best.certificate.objective * (1.0 + NEAR)
        # Without time left a search still gives its bound.
        case = dataclasses.replace(
            neighbours_only(case, cluster),
            time_limit=max(0.0, deadline - time.monotonic()),
            max_programs=num_programs,
        )
        search = LayerSearch(level_one, cluster, case, limit=limit, policy=policy, progress=progress)
        outcome = search.run()
        stopped = stopped or (outcome.status if outcome.status in STOPPED else "")
        bound = min(bound, outcome.bound)
        lacks.extend(outcome.shortfalls.values())
        for plan in _plans(search, outcome, cluster, config_name):
            sentences = inexpressible(framework, PlanFacts.of(plan))
            reasons.extend(sentences)
            if not sentences and (best is None or plan.step.costs.simulated < best.step.costs.simulated):
                best = plan
    if best is None:
        raise NoPlan(
            f"no plan within what {framework.title} can say: {_why(reasons, lacks)}", proved=not (stopped or reasons)
        )
    return _certified(best, bound, framework, demands, stopped=stopped)


def cases_of(framework: Framework, demands: Demands, *, splits: bool) -> Iterator[tuple[Demands, str]]:
    """The demands of each search, with the recompute policy of its layers.

    Raises:
        ValueError: if the user's demands leave nothing of the framework's choices.
    """
    fixed: dict[str, tuple[Any, ...]] = {
        "recompute": POLICIES,
        "zero": ZERO_STAGES,
        **({} if framework.divides_within else {ZERO_RANKS: (0,)}),
        **framework.choices,
        **({} if splits else {"tp": (1,)}),
    }
    searches = []
    for case in framework.cases:
        merged = {name: _both(fixed.get(name), case.get(name)) for name in {**fixed, **case}}
        allowed = {name: demands.among(name, values) for name, values in merged.items()}
        if not demands.allows(ZERO_RANKS, 0):
            allowed["zero"] = tuple(stage for stage in allowed["zero"] if stage in framework.divides_within)
        if all(allowed.values()):
            searches.append(allowed)
    if not searches:
        said = {name: sorted(map(str, fixed[name])) for name in fixed if not demands.among(name, fixed[name])}
        listed = "; ".join(f"{name}={', '.join(values)}" for name, values in said.items()) or "no combination"
        raise ValueError(f"fix and forbid contradict {framework.title}, which has {listed}: drop one of them")
    for allowed in searches:
        for policy, stage in itertools.product(allowed["recompute"], allowed["zero"]):
            one = {"recompute": frozenset((policy, _ENDS)), "zero": frozenset((stage,))}
            if stage not in framework.divides_within:
                one[ZERO_RANKS] = frozenset((0,))
            rest = {name: frozenset(values) for name, values in allowed.items()}
            yield dataclasses.replace(demands, fixed={**demands.fixed, **rest, **one}, num_alternatives=1), policy


def _both(first: tuple[Any, ...] | None, second: tuple[Any, ...] | None) -> tuple[Any, ...]:
    if first is None or second is None:
        return first or second or ()
    return tuple(value for value in first if value in second)


def _plans(search: LayerSearch, outcome: Outcome, cluster: Cluster, config_name: str) -> Iterator[Plan]:
    for solution in outcome.solutions:
        plan = extract(search, outcome, judge(solution), [], cluster=cluster, constraints={})
        yield dataclasses.replace(plan, config_name=config_name)


def _why(reasons: list[str], lacks: list[float]) -> str:
    if reasons:
        return "; ".join(dict.fromkeys(reasons))
    return f"it lacks {min(lacks) / 2**30:.1f} GiB" if lacks else "no mesh divides the batch and the layers"


def _certified(plan: Plan, bound: float, framework: Framework, demands: Demands, *, stopped: str) -> Plan:
    """The plan with a bound that holds for all searches, and with the demands of all of them; ``stopped``: the limit
    that one of them reached."""
    objective = plan.certificate.objective
    least = min(bound, objective)
    certificate = dataclasses.replace(
        plan.certificate,
        bound=least,
        gap=(objective - least) / objective if objective else 0.0,
        status=stopped or plan.certificate.status,
        demands={**recorded(demands), FRAMEWORK: framework.name},
    )
    note = f"searched among layouts that {framework.title} has settings for (planner export --to {framework.name})"
    return dataclasses.replace(plan, certificate=certificate, notes=(*plan.notes, note))


#: Options of ``planner.plan`` that a search for a framework does not take, with their defaults.
NOT_TAKEN: Mapping[str, Any] = {
    "mesh": None,
    "constraints": None,
    "forbid_collectives": (),
    "objective": "time",
    "target_seconds": None,
    "num_alternatives": 1,
    "write_lp": None,
    "offload": "never",
}


def options_not_taken(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Options of ``planner.plan`` that are set and that a search for a framework does not take."""
    return tuple(name for name, default in NOT_TAKEN.items() if (options.get(name) or default) != default)
