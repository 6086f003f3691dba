"""Parameters are cut along the tensor axis where that shortens what gradients take over slow links."""

from __future__ import annotations

import itertools

import pytest

from planner.whole_step.best_first import Search
from planner.whole_step.candidates.demands import read_demands
from planner.whole_step.costs.byte_weights import reducing_seconds
from planner.whole_step.costs.level_one import LevelOne
from tests.exhaustive_models import two_boxes
from tests.test_unequal_shardings import COLUMNS, NOT_CUT, ROWS, space_under

pytestmark = pytest.mark.usefixtures("models_traced_once")


def search_under(*choices: tuple[str, ...]) -> Search:
    cluster = two_boxes()
    demands = read_demands({"tp": 2, "pp": 1, "cp": 1, "zero": 0, "recompute": "none"}, gap=0.0, time_limit=600.0)
    return Search(LevelOne(cluster, *space_under(*choices)), cluster, demands)


def test_no_pinned_sharding_is_faster() -> None:
    """All ways to cut ``up``, ``down`` and ``last``; the fastest micro-batch cuts none, and reduces twice as much."""
    free = search_under()
    (best, *_), pinned = free.run().solutions, []
    for choices in itertools.product((NOT_CUT, COLUMNS, ROWS), repeat=3):
        solutions = search_under(*choices).run().solutions
        pinned += [solution.seconds for solution in solutions[:1]]
    assert len(pinned) > 10 and best.seconds <= min(pinned) * (1 + 1e-9)
    alone = free.fastest(best.candidate)
    assert alone is not None and alone.seconds < best.sharded.seconds  # of a micro-batch
    layout, links = best.candidate.layout, free.links_on(best.candidate.layout)
    whole, cut = (
        reducing_seconds(sharded.figures, layout, links, free.demands.training) for sharded in (alone, best.sharded)
    )
    assert free.bounds.reducing(best.candidate, links) <= cut < whole


def test_no_reduction_takes_less_than_its_bound() -> None:
    search = search_under()
    for entry in search._first_entries():
        links = search.links_on(entry.candidate.layout)
        for weight in (0.0, 4.0):
            sharded = search.sharded(entry.candidate, weight)
            assert sharded is not None
            seconds = reducing_seconds(sharded.figures, entry.candidate.layout, links, search.demands.training)
            assert search.bounds.reducing(entry.candidate, links) <= seconds * (1 + 1e-12)
