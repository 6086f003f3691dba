"""What fills a pipeline with split backward passes is bounded by no more than any plan takes, against trying all."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from cost_models import Cluster
from cost_models.schedules import SCHEDULES
from cost_models.simulator import simulate
from cost_models.step import LayerCosts
from cost_models.step_time import step_seconds
from planner.pipeline_ilp.stage_problem import StageProblem, UnitChoice, UnitRun, as_step
from planner.whole_step.best_first import Search
from planner.whole_step.candidates.candidates import Candidate
from planner.whole_step.candidates.demands import read_demands
from planner.whole_step.candidates.mesh_layout import MeshLayout
from planner.whole_step.costs.byte_weights import BYTE_WEIGHTS
from planner.whole_step.costs.level_one import LevelOne
from planner.whole_step.costs.sharding import Cut
from planner.whole_step.costs.split_fills import (
    PhaseSeconds,
    bound_of_sharding,
    operator_seconds,
    terms_of_all,
)
from planner.whole_step.search_entry import SearchEntry
from tests.exhaustive import fastest
from tests.exhaustive_models import level_one

pytestmark = pytest.mark.usefixtures("models_traced_once")

SPLIT = tuple(name for name, row in SCHEDULES.items() if row.splits_backward)
#: Whatever a plan may choose, and the ZeRO levels whose gradients are copied each micro-batch and gathered anew.
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "long pipelines": ("llama", {"recompute": ("none", "full"), "zero": 0, "pp": 4, "cp": 1}),
    "whole sequences": ("llama", {"recompute": "none", "zero": 0, "pp": 2, "tp": (2, 4)}),
    "pieces": ("2-block mlp", {"recompute": "none", "zero": (0, 2, 3), "pp": 2}),
}


@pytest.mark.parametrize("weights", [0.8, 0.3])  # of ZB-H2 the one and the other row fills more
@pytest.mark.parametrize("schedule", SPLIT)
def test_bounds_meet_the_closed_form_of_equal_chunks_that_scale_perfectly(schedule: str, weights: float) -> None:
    ranks, m, num_units, forward, inputs, copied = 4, 16, 16, 1.0, 1.3, 0.1
    chunks, tensor = SCHEDULES[schedule].chunks_per_rank or 1, 2
    costs = LayerCosts(forward=forward, backward=inputs + weights + copied, backward_weight=weights + copied)
    run = UnitRun(name="layer", count=num_units, choices=(UnitChoice(label=(), costs=costs),))
    problem = StageProblem(
        runs=(run,), schedule=schedule, num_ranks=ranks, num_chunks=ranks * chunks, num_microbatches=m,
        memory=(math.inf,) * ranks,
    )  # fmt: skip
    assignment = (((0, 0, num_units // ranks // chunks),),) * (ranks * chunks)
    seconds = step_seconds(as_step(problem, assignment)).total

    candidate = Candidate(MeshLayout(ranks, 2, 1, tensor), 1, m, schedule, chunks)
    part = PhaseSeconds(num_units * forward, num_units * inputs, num_units * weights)
    undivided = PhaseSeconds(part.forward * tensor, part.inputs * tensor, part.weights * tensor)
    beside = {"beside": num_units * copied, "copied": num_units * copied}
    of_sharding = bound_of_sharding(candidate, part, **beside)
    of_all = max(times * part.total + rest for times, rest in terms_of_all(candidate, undivided, **beside))
    assert of_sharding <= seconds * (1 + 1e-9) and of_all == pytest.approx(of_sharding, rel=1e-9)
    if not SCHEDULES[schedule].played:
        assert of_sharding == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize(
    "forward, inputs, weights", [(1.0, 1.3, 0.8), (1.0, 0.6, 1.9), (0.4, 1.1, 1.5), (1.2, 0.5, 0.9)]
)
@pytest.mark.parametrize("schedule", sorted({*SPLIT} - {"zb_h2"}))  # of which the closed form says where it is exact
def test_equal_chunks_fill_and_drain_as_the_simulator_plays_them(
    schedule: str, forward: float, inputs: float, weights: float
) -> None:
    ranks, m, chunks = 8, 16, SCHEDULES[schedule].chunks_per_rank or 1
    costs = LayerCosts(forward=forward, backward=inputs + weights, backward_weight=weights)
    run = UnitRun(name="layer", count=ranks * chunks, choices=(UnitChoice(label=(), costs=costs),))
    problem = StageProblem(
        runs=(run,), schedule=schedule, num_ranks=ranks, num_chunks=ranks * chunks, num_microbatches=m,
        memory=(math.inf,) * ranks,
    )  # fmt: skip
    step = as_step(problem, (((0, 0, 1),),) * (ranks * chunks))
    assert step_seconds(step).total == pytest.approx(simulate(step).seconds, rel=1e-9)


@pytest.mark.parametrize("schedule", SPLIT)
def test_forwards_that_stand_beside_do_not_raise_the_bound(schedule: str) -> None:
    """On two ranks DualPipeV spares half of every chunk's forward, also of what is not an operator's."""
    ranks, m, num_units, forward, inputs, weights, beside = 2, 8, 8, 1.0, 3.0, 0.8, 0.7
    chunks = SCHEDULES[schedule].chunks_per_rank or 1
    costs = LayerCosts(forward=forward + beside, backward=inputs + weights, backward_weight=weights)
    run = UnitRun(name="layer", count=num_units, choices=(UnitChoice(label=(), costs=costs),))
    problem = StageProblem(
        runs=(run,), schedule=schedule, num_ranks=ranks, num_chunks=ranks * chunks, num_microbatches=m,
        memory=(math.inf,) * ranks,
    )  # fmt: skip
    assignment = (((0, 0, num_units // ranks // chunks),),) * (ranks * chunks)
    seconds = step_seconds(as_step(problem, assignment)).total
    candidate = Candidate(MeshLayout(ranks, 2, 1, 1), 1, m, schedule, chunks)
    part = PhaseSeconds(num_units * forward, num_units * inputs, num_units * weights)
    more = {"beside": num_units * beside, "copied": 0.0}
    assert bound_of_sharding(candidate, part, **more) <= seconds * (1 + 1e-9)
    assert max(times * part.total + rest for times, rest in terms_of_all(candidate, part, **more)) <= seconds * (
        1 + 1e-9
    )


def entries(search: Search) -> Iterator[SearchEntry]:
    """Entries as far as they are before a program chooses among shardings."""
    for entry in search._first_entries():
        for scaled in search._scale(entry):
            yield from search._gather(scaled)


@pytest.mark.parametrize("case", CASES)
def test_no_plan_takes_less_than_the_bounds_with_fill(case: str) -> None:
    model, fixed = CASES[case]
    if model == "llama":
        pytest.importorskip("transformers")
    level, chooser = level_one(model, "boxes"), random.Random(0)
    search = Search(level, level.cluster, read_demands({**fixed, "schedule": SPLIT}, time_limit=600.0))
    gained = {"any sharding": 0, "one sharding": 0}
    for entry in entries(search):
        for weight in BYTE_WEIGHTS:
            sharded = search.sharded(entry.candidate, weight)
            if sharded is None:
                continue
            optimum = fastest(search.problem(entry.candidate, sharded), chooser).seconds
            least = search.level_one.sharded(
                entry.candidate.cut, entry.candidate.layout, search.links_on(entry.candidate.layout)
            )
            assert least is not None
            bounds = {
                "any sharding": search._bound(entry, least.least_seconds),
                "one sharding": search._bound_of_sharding(entry, sharded),
            }
            plain = search.step_bound(entry.candidate, least.least_seconds + entry.beside)
            for name, bound in bounds.items():
                assert bound <= optimum * (1 + 1e-9), (name, str(entry.candidate))
                gained[name] += bound > 1.02 * plain
    assert all(gained.values())


def test_no_part_takes_less_than_its_share_of_either_direction() -> None:
    pytest.importorskip("transformers")
    level = level_one("llama", "boxes")
    search = Search(level, level.cluster, read_demands({"pp": 1}, time_limit=600.0))
    for entry in search._first_entries():
        sharded = search.sharded(entry.candidate)
        undivided = search.bounds.undivided(entry.candidate.cut.pieces)
        if sharded is not None:
            part, parts = operator_seconds(sharded.figures), entry.candidate.cut.parts // entry.candidate.cut.pieces
            for name in ("forward", "inputs", "weights"):
                assert getattr(part, name) * parts >= getattr(undivided, name) * (1 - 1e-9), (name, entry.candidate)


def test_one_program_of_an_axis_within_a_node_bounds_it_and_few_beyond() -> None:
    """No bound is lost: larger parts bound more, and what lies within a node talks over the fastest links."""
    pytest.importorskip("transformers")
    level = LevelOne(
        Cluster.parse("dgx-h100:4"), *(level_one("llama", "boxes").space, level_one("llama", "boxes").step_units)
    )
    search = Search(level, level.cluster, read_demands({}))
    assert search.bounds._telling_parts(4) == [4]
    assert search.bounds._telling_parts(32) == [16, 32]
    seconds = [search.bounds.by_axis(Cut(1, 1, size), math.inf) * size for size in (1, 2, 4, 8, 16, 32)]
    assert seconds == sorted(seconds)
