"""What ZeRO adds to compute is bounded by no more than any plan within memory takes, and by more in less memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from cost_models.step_time import step_memory
from planner.pipeline_ilp.stage_problem import as_step
from planner.whole_step.best_first import Search
from planner.whole_step.candidates.demands import read_demands
from planner.whole_step.costs.least_passes import StageSeconds, least_beside
from planner.whole_step.costs.unit_choices import seconds_by_cause
from planner.whole_step.costs.unit_figures import UnitFigures
from planner.whole_step.result.outcome import StepSolution
from tests.exhaustive_models import level_one

pytestmark = pytest.mark.usefixtures("models_traced_once")

CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "blocks": ("6-block mlp", {"recompute": "none", "pp": 1, "tp": (1, 2)}),
    "transformer": ("llama", {"recompute": ("none", "full"), "cp": 1, "pp": 2, "schedule": "1f1b"}),
    "tied ends": ("gpt2", {"recompute": "none", "cp": (1, 2), "tp": 1, "pp": 1}),
    "experts": ("mixture", {"recompute": "none", "ep": (1, 2, 4), "pp": 1}),
}


def taken(search: Search, solution: StepSolution) -> float:
    """Seconds of one micro-batch, over all units, that lay out parameters or slow compute down."""
    seconds, problem = 0.0, solution.problem
    prices = search.on_ranks(solution.candidate, solution.sharded)
    for rank, groups in zip(problem.ranks, solution.assignment, strict=True):
        for run, choice, count in groups:
            label = problem.runs[run].choices[choice].label
            parts = seconds_by_cause(prices[rank].figures_on_rank[run], label, prices[rank].setting)
            seconds += count * (
                parts.unpack_forward + parts.unpack_backward + parts.contention_forward + parts.contention_backward
            )
    return seconds


@pytest.mark.parametrize("case", CASES)
def test_no_plan_within_memory_takes_less(case: str) -> None:
    model, fixed = CASES[case]
    if model in ("llama", "gpt2"):
        pytest.importorskip("transformers")
    level = level_one(model, "boxes")
    free = Search(level, level.cluster, read_demands(fixed, time_limit=600.0)).run().solutions[0]
    most = max(step_memory(as_step(free.problem, free.assignment)))
    bounds: dict[float, float] = {}
    for share in (1.0, 0.6):
        demands = read_demands(fixed, memory_limit=share * most, num_alternatives=20, time_limit=600.0)
        search = Search(level, level.cluster, demands)
        for solution in search.run().solutions:
            candidate = solution.candidate
            links = {layout: search.links_on(layout) for layout in search.zero_layouts(candidate.layout)}
            bound = search.bounds.passes(candidate, links, search.memory, search.setting(candidate).zero)
            assert bound <= taken(search, solution) * (1 + 1e-9), (share, str(candidate))
            bounds[share] = max(bound, bounds.get(share, 0.0))
    assert bounds[1.0] > 0.0 and bounds[1.0] <= bounds[0.6]


def test_fractions_of_units_take_first_what_frees_most_bytes_a_second() -> None:
    """Of two units the cheaper one is gathered whole, of the other as much as memory asks for."""
    level = level_one("2-block mlp", "eight")
    search = Search(level, level.cluster, read_demands({"pp": 1}))
    candidate = next(search._first_entries()).candidate
    sharded = search.sharded(candidate)
    assert sharded is not None
    unit = UnitFigures(sharded.figures[0].unit, (4.0, 6.0), (0.0, 0.0), 3.0, (), (), 0.0, 0.0, 0.0)
    cheap, dear = (
        [StageSeconds(100.0, 0.0, 0.0, 0.0, 8.0), StageSeconds(20.0, unpack, 10.0, 0.0, 0.0)] for unpack in (0.5, 3.0)
    )

    def least(room: float) -> float:
        options = {"parts": 2, "num_microbatches": 4, "slowdown": 0.1, "room": room}
        return least_beside([unit, unit], [cheap, dear], **options) / unit.unit.count

    reduced, gathered = 0.1 * 3.0 / 4, 0.1 * (2.0 + 3.0)  # beside 2 s forward and 3 s backward of one of two parts
    assert least(200.0) == pytest.approx(2 * reduced)
    assert least(120.0) == pytest.approx(reduced + gathered + 2 * 0.5)
    assert least(80.0) == pytest.approx(gathered + 1.0 + (reduced + gathered + 6.0) / 2)
    assert least(0.0) == pytest.approx(2 * gathered + 1.0 + 6.0)
