"""The search finds what trying everything finds: every candidate, sharding, cut, and choice of every unit."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from cost_models import Cluster
from cost_models.step_time import step_memory, step_seconds
from passes.capture import capture
from passes.ir.graph import Graph
from planner.step.candidates import candidates
from planner.step.demands import Demands, read_demands
from planner.step.figures import KeptSpace
from planner.step.layout import Links
from planner.step.level_one import LevelOne
from planner.step.search import BYTE_WEIGHTS, Search
from planner.step.sharding import ShardingSpace
from planner.step.stage_problem import Assignment, StageProblem, as_step
from planner.verification import slow_devices
from tests.small_models import Mlp, mlp_batch, squared_error

#: Share of a device's memory that a limit may be passed by: what sums of bytes may be off by.
ROUNDING = 1e-9
#: What is left to choose, small enough to try it all.
FEW: Mapping[str, Any] = {"recompute": ("none", "full"), "zero": (0, 3)}
CASES: Mapping[str, Mapping[str, Any]] = {
    "everything": FEW,
    "sharded optimizer": {"recompute": ("none", "selective"), "zero": (1, 2)},
    "regather": {"recompute": ("regather", "selective", "none"), "zero": 3},
}


def stretches(problem: StageProblem) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Ways to cut the units into chunks: for each chunk the run of each of its units."""
    units = [run for run, each in enumerate(problem.runs) for _ in range(each.count)]
    for cuts in itertools.combinations(range(1, len(units)), problem.num_chunks - 1):
        ends = (0, *cuts, len(units))
        yield tuple(tuple(units[begin:end]) for begin, end in itertools.pairwise(ends))


def groups_of(
    problem: StageProblem, stretch: tuple[int, ...], *, first: bool
) -> Iterator[tuple[tuple[int, int, int], ...]]:
    """Ways to run the units of one chunk; equal units in any order are one way, but for the model's very first unit."""
    counts = Counter(stretch)
    by_run = []
    for run, count in counts.items():
        every = range(len(problem.runs[run].choices))
        ways = []
        for chosen in itertools.combinations_with_replacement(every, count):
            way = tuple((run, choice, times) for choice, times in Counter(chosen).items())
            if first and run == 0:
                ways += [(way[at], *way[:at], *way[at + 1 :]) for at in range(len(way))]
            else:
                ways.append(way)
        by_run.append(ways)
    for parts in itertools.product(*by_run):
        yield tuple(itertools.chain.from_iterable(parts))


def assignments(problem: StageProblem) -> Iterator[Assignment]:
    for cut in stretches(problem):
        chunks = (list(groups_of(problem, stretch, first=index == 0)) for index, stretch in enumerate(cut))
        yield from itertools.product(*chunks)


def fastest(problem: StageProblem) -> float:
    """Seconds of the best assignment that fits, infinite if none does."""
    best = math.inf
    for assignment in assignments(problem):
        step = as_step(problem, assignment)
        seconds = step_seconds(step).total
        if seconds < best and all(
            used <= limit * (1 + ROUNDING) for used, limit in zip(step_memory(step), problem.memory)
        ):
            best = seconds
    return best


@functools.cache
def space(model: str) -> tuple[ShardingSpace, KeptSpace]:
    found = ShardingSpace.of(graph(model))
    return found, KeptSpace.of(found)


def graph(model: str) -> Graph:
    if model.startswith("mlp"):
        return capture(Mlp(layers=int(model[3:]), size=32), args=mlp_batch(batch=8, size=32), loss_fn=squared_error)
    pytest.importorskip("transformers")
    from planner.library import load_config
    from planner.planning import capture_for_planning

    config = load_config(model)
    config.num_hidden_layers = 3
    return capture_for_planning(config, batch_size=4, seq_len=32)


def enumerated(search: Search, demands: Demands) -> float:
    """The fastest of everything."""
    best = math.inf
    level_one = search.level_one
    found = candidates(
        search.cluster,
        global_batch=level_one.global_batch,
        num_units=sum(unit.count for unit in level_one.kept.units),
        demands=demands,
        micro_batches=level_one.micro_batches,
    )
    for candidate in found:
        links = Links.of(search.cluster, candidate.layout)
        for weight in BYTE_WEIGHTS:
            sharded = level_one.sharded(candidate.cut, candidate.layout, links, weight=weight)
            if sharded is not None:
                best = min(best, fastest(search.problem(candidate, sharded)))
    return best


def searches(model: str, cluster: Cluster, fixed: Mapping[str, Any], **options: Any) -> tuple[float, float]:
    """Seconds by the search with no gap, and by enumeration."""
    demands = read_demands(fixed, gap=0.0, time_limit=600.0, **options)
    search = Search(LevelOne(cluster, *space(model)), cluster, demands)
    outcome = search.run()
    seconds = outcome.solutions[0].seconds if outcome.solutions else math.inf
    assert outcome.bound <= seconds
    return seconds, enumerated(search, demands)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", ["mlp2", "tiny-llama"])
def test_search_finds_the_fastest(model: str, case: str) -> None:
    found, best = searches(model, slow_devices(4), CASES[case])
    assert found == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_search_finds_the_fastest_that_fits(share: float) -> None:
    cluster = slow_devices(4)
    demands = read_demands(FEW, gap=0.0)
    free = Search(LevelOne(cluster, *space("tiny-llama")), cluster, demands).run().solutions[0]
    limit = share * max(step_memory(as_step(free.problem, free.assignment)))
    found, best = searches("tiny-llama", cluster, FEW, memory_limit=limit)
    assert found == pytest.approx(best, rel=1e-9)
    assert found > free.seconds
