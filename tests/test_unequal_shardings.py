"""Shardings on unequal devices: bounds hold for all of them, and those that are tried make plans better."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest

import planner
from cost_models import Cluster
from cost_models.step_time import step_memory
from planner.pipeline_ilp.stage_ilp import solve_stages
from planner.pipeline_ilp.stage_problem import as_step
from planner.whole_step.candidates.demands import read_demands
from planner.whole_step.costs.sharding import ShardingSpace
from planner.whole_step.costs.stage_devices import WeightedLevelOne
from planner.whole_step.costs.unit_costs import StepUnits
from planner.whole_step.result.outcome import StepSolution
from planner.whole_step.unequal_search import UnequalSearch
from tests.cells import cells
from tests.exhaustive_models import of_module
from tests.small_models import Mlp, seeded
from tests.test_unequal_inspection import CALL, model, two_kinds

FIX: dict[str, Any] = {"pp": 2, "tp": 2, "num_microbatches": 1}
NOT_CUT, COLUMNS, ROWS = ("replicate", "invariant"), ("cut n",), ("cut k",)
PATTERNS = ("layers.*.up:*", "layers.*.down:*", "last:*")


def test_the_best_plan_on_unequal_devices_is_not_the_best_in_weighted_seconds() -> None:
    plan = planner.plan(model(), two_kinds(3.0, 1.0), fix=FIX, fuse=False, **CALL)
    assert plan.certificate.objective < 1.027e-3  # the sharding that is best in weighted seconds takes 1.311 ms
    assert plan.certificate.bound > 0.85 * plan.certificate.objective
    assert plan.certificate.gap > 0.01 and plan.certificate.status.startswith("not proved to be the best")
    assert "optimal" not in plan.summary() and any("another may be faster" in note for note in plan.notes)
    again = planner.plan(model(), two_kinds(3.0, 1.0), fix=FIX, fuse=False, **CALL)
    assert again == plan
    report = planner.audit(plan, model(), **CALL)
    assert report.ok, report.table()


def with_memory(cluster: Cluster, num_bytes: float) -> Cluster:
    devices = [{**kind, "memory_bytes": num_bytes} for kind in cluster.to_dict()["devices"]]
    return Cluster.from_dict({**cluster.to_dict(), "devices": devices})


@functools.cache
def graph() -> Any:
    return of_module(seeded(functools.partial(Mlp, layers=3, size=32)), batch=8)


#: Speeds of the two kinds, memory, micro-batches.
ALWAYS = (((3.0, 1.0), 1e5, 4), ((2.0, 1.0), 1e5, 1), ((1.0, 1.0), 1e9, 4))
EVERY = tuple(itertools.product(((3.0, 1.0), (2.0, 1.0), (1.0, 1.0)), (1e9, 1e5), (1, 4)))


@pytest.mark.parametrize(
    ("speeds", "memory", "num_microbatches"), cells(ALWAYS, [cell for cell in EVERY if cell not in ALWAYS])
)
def test_no_pinned_sharding_is_below_the_bound(
    speeds: tuple[float, float], memory: float, num_microbatches: int
) -> None:
    """All ways to cut ``up``, ``down`` and ``last`` are solved, each in every kind's best of the rest.

    The smaller memory binds: what is best in the larger does not fit.
    """
    cluster = with_memory(two_kinds(*speeds), memory)
    fix = {**FIX, "num_microbatches": (num_microbatches,), "pp": (2,), "tp": (2,), "recompute": ("none", "full")}
    demands = read_demands(fix, gap=1e-4, time_limit=600.0)
    outcome = search_with((), cluster, demands).run()
    proved, best, num_solved = outcome.proved, math.inf, 0
    for choices in itertools.product((NOT_CUT, COLUMNS, ROWS), repeat=3):
        search = search_with(choices, cluster, demands)
        for entry in list(search._first_entries()):
            for stage in ({0}, {1}):
                level_one = search.level_one.mixed({frozenset(stage): 1.0})
                links = level_one.links_on(entry.candidate.layout)
                sharded = level_one.sharded(entry.candidate.cut, entry.candidate.layout, links)
                if sharded is None:
                    continue
                solved = solve_stages(search.problem(entry.candidate, sharded), gap=0.0)
                if solved is not None and solved.assignment is not None:
                    num_solved += 1
                    best = min(best, solved.objective)
    assert num_solved > 10
    if speeds == (3.0, 1.0) and memory < 1e9:
        unlimited = search_with((), with_memory(two_kinds(*speeds), 1e9), demands).run()
        assert max(rank_bytes(unlimited.solutions[0])) > memory >= max(rank_bytes(outcome.solutions[0]))
    assert proved <= best * (1.0 + 1e-9)
    assert outcome.solutions and outcome.solutions[0].seconds <= best * 1.1
    assert proved >= 0.5 * best


def rank_bytes(solution: StepSolution) -> tuple[float, ...]:
    return tuple(step_memory(as_step(solution.problem, solution.assignment)))


@functools.cache
def space_under(*choices: Sequence[str]) -> tuple[ShardingSpace, StepUnits]:
    """The shardings in which ``up``, ``down`` and ``last`` are cut as chosen; all of them without choices."""
    pins = {pattern: {"tp": choice} for pattern, choice in zip(PATTERNS, choices)}
    space = ShardingSpace.of(graph(), pins=pins)
    return space, StepUnits.of(space)


def search_with(choices: Sequence[Sequence[str]], cluster: Cluster, demands: Any) -> UnequalSearch:
    return UnequalSearch(WeightedLevelOne(cluster, *space_under(*choices)), cluster, demands)


def test_where_samples_alone_are_divided_there_is_one_sharding() -> None:
    """So that bounds of its stages are of all shardings."""
    demands = read_demands({"tp": 1, "cp": 1}, gap=0.0, time_limit=600.0)
    search = search_with((), two_kinds(3.0, 1.0), demands)
    outcome = search.run()
    assert outcome.solutions and not search.of_all_shardings and outcome.proved == outcome.bound
    for solution in outcome.solutions:
        elements = solution.sharded.variant.problem.elements.values()
        assert all(len(element.options) == 1 for element in elements if element.kind == "op")


def test_a_bound_that_could_not_be_worked_out_is_the_one_in_weighted_seconds() -> None:
    demands = read_demands({"pp": 2, "tp": 2, "num_microbatches": 1}, gap=0.0, time_limit=600.0)
    free = search_with((), two_kinds(3.0, 1.0), demands)
    stopped = search_with((), two_kinds(3.0, 1.0), dataclasses.replace(demands, max_programs=1))
    assert stopped.run().proved <= free.run().proved * (1.0 + 1e-9)
