"""Parameters are cut along the tensor axis where their gradients reduce slowly, or where they do not fit whole."""

from __future__ import annotations

import itertools
import re

import pytest

import planner
from passes.plan import Plan
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


#: A pipeline whose parameters, whole along the tensor axis, take 1.7 MiB of each device; cut they take 0.5 MiB.
PIPELINE = {"pp": 2, "tp": 4, "micro_batch": 1, "schedule": "1f1b"}


def pipeline_within(num_bytes: int) -> Plan:
    return planner.plan(
        "tiny-llama", "dgx-h100:1", global_batch=8, seq_len=64, fix=PIPELINE, memory_limit=num_bytes, headroom=0.0
    )


def test_parameters_are_cut_where_they_do_not_fit_whole() -> None:
    plan = pipeline_within(700 * 1024)
    assert max(memory.total for memory in plan.step.memory) <= 700 * 1024


def test_the_memory_that_would_help_is_that_of_cut_parameters() -> None:
    with pytest.raises(ValueError, match="no plan fits in memory") as error:
        pipeline_within(300 * 1024)
    needed = int(re.findall(r"memory_limit=(\d+)", str(error.value))[0])
    assert needed < 700 * 1024
    assert max(memory.total for memory in pipeline_within(needed).step.memory) <= needed
