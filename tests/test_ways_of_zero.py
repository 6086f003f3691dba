"""All ways in which ZeRO may divide are bounded at once, and chains of units that are priced alike are made once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

from planner.pipeline_ilp.stage_ilp import solve_stages
from planner.whole_step.best_first import Search
from planner.whole_step.candidates.demands import read_demands
from planner.whole_step.search_entry import SearchEntry
from tests.exhaustive_models import level_one

pytestmark = pytest.mark.usefixtures("models_traced_once")


@pytest.mark.parametrize("memory", [None, 2e5])
def test_a_bound_of_all_ways_is_above_none(memory: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is of a problem whose units choose among all ways: no assignment of one way is faster."""
    model = level_one("6-block mlp", "boxes")
    demands = read_demands(
        {"recompute": ("none", "full"), "zero": 3, "tp": (1, 2)}, time_limit=600.0, memory_limit=memory
    )
    shares: list[float] = []
    divide = Search._divide

    def checked(search: Search, entry: SearchEntry, sharded: object) -> Iterator[SearchEntry]:
        layouts = search.zero_layouts(entry.candidate.layout)
        if len(layouts) > 1 and len(shares) < 60:
            assert entry.sharded is not None
            together = search.bound_of_ways(entry.candidate, entry.sharded, math.inf)
            problems = [search.problem(replace(entry.candidate, layout=layout), entry.sharded) for layout in layouts]
            solved = [solution for each in problems if (solution := solve_stages(each)) is not None]
            best = min((solution.objective for solution in solved), default=math.inf)
            assert 0.0 < together <= best * (1 + 1e-9), str(entry.candidate)
            shares.append(together / best)
        return divide(search, entry, entry.sharded)

    monkeypatch.setattr(Search, "_divide", checked)
    outcome = Search(model, model.cluster, demands).run()
    assert outcome.solutions and len(shares) >= 5 and max(shares) > 0.9


def test_where_a_chain_of_units_ends_matters_to_shared_weights_alone() -> None:
    pytest.importorskip("transformers")
    for name, is_tied in (("llama", False), ("gpt2", True)):
        model = level_one(name, "eight")
        search = Search(model, model.cluster, read_demands({"pp": 2, "cp": 1, "tp": 1}, time_limit=60.0))
        entries = [entry.candidate for entry in search._first_entries()]
        straight = next(each for each in entries if each.schedule == "1f1b" and each.num_microbatches > 1)
        folded = replace(straight, schedule="zbv", chunks_per_rank=2)
        sharded = search.sharded(straight)
        assert sharded is not None and sharded.has_tied_weights == is_tied
        alike = search.problem(straight, sharded).runs is search.problem(folded, sharded).runs
        assert alike != is_tied
