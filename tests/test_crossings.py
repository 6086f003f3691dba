"""What chunks receive is counted by every bound: never more than any cut makes them receive, and not nothing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from transformers import LlamaConfig

import planner
from planner.pipeline_ilp.crossings import cheapest_units, least_crossing, received, received_by_all
from planner.pipeline_ilp.stage_bounds import lower_bound
from planner.pipeline_ilp.stage_problem import StageProblem, as_step
from planner.whole_step.best_first import Search
from planner.whole_step.search_entry import SearchEntry
from tests.cells import cells
from tests.test_step_stages import Draw, brute_force

SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_h1", "zbv")


def problem_of(seed: int, schedule: str) -> StageProblem:
    """A problem of two runs at least whose first unit, like an embedding, has nothing before it to receive."""
    problem = Draw(seed).problem(schedule)
    first = replace(problem.runs[0], count=1, receive_forward=0.0, receive_backward=0.0)
    rest = replace(problem.runs[-1], name="rest", count=problem.num_units - 1)
    return replace(problem, runs=(first, rest))


def received_in(problem: StageProblem) -> Iterator[tuple[float, float]]:
    """Seconds of all chunks, forward and backward, under every cut."""
    units = [index for index, run in enumerate(problem.runs) for _ in range(run.count)]
    for cuts in itertools.combinations(range(1, len(units)), problem.num_chunks - 1):
        ends = itertools.pairwise([0, *cuts, len(units)])
        step = as_step(problem, tuple(tuple((run, 0, 1) for run in units[begin:end]) for begin, end in ends))
        yield (
            sum(chunk.receive_forward for chunk in step.chunks),
            sum(chunk.receive_backward for chunk in step.chunks),
        )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_received_is_the_least_of_all_cuts(schedule: str) -> None:
    num_received = 0
    for seed in cells(range(12), range(12, 30)):
        for problem in (problem_of(seed, schedule), Draw(seed).problem(schedule)):
            least = [min(each) for each in zip(*received_in(problem))]
            bound = received_by_all(problem)
            assert all(low <= high * (1 + 1e-12) for low, high in zip(bound, least))
            by_rank = sum(received(problem, (1.0, 0.0))), sum(received(problem, (0.0, 1.0)))
            assert all(low <= high * (1 + 1e-12) for low, high in zip(by_rank, bound))
            assert all(one * (problem.num_ranks > 1) <= low for one, low in zip(least_crossing(problem), bound))
        alike = problem_of(seed, schedule)
        assert received_by_all(alike) == pytest.approx([min(each) for each in zip(*received_in(alike))])
        num_received += sum(received_by_all(alike)) > 0
    assert num_received >= 3


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_step_is_bounded_by_what_is_received(schedule: str) -> None:
    num_raised = 0
    for seed in cells(range(10), range(10, 24)):
        problem = problem_of(seed, schedule)
        rest = replace(problem.runs[1], receive_forward=5.0, receive_backward=3.0)
        sent = replace(problem, runs=(problem.runs[0], rest), memory=(math.inf,) * problem.num_ranks)
        bound, best = lower_bound(sent), brute_force(sent)
        assert bound <= best * (1 + 1e-9)
        silent = replace(sent, runs=(problem.runs[0], replace(rest, receive_forward=0.0, receive_backward=0.0)))
        num_raised += bound > lower_bound(silent) + problem.num_microbatches
    assert num_raised >= 3


def test_each_unit_is_cut_before_once() -> None:
    assert cheapest_units([(3.0, 2), (1.0, 1), (2.0, 0)], 2) == 4.0
    assert cheapest_units([(3.0, 2), (1.0, 1)], 3) == 7.0


@pytest.mark.usefixtures("models_traced_once")
def test_a_candidate_is_bounded_by_no_more_than_its_stages_receive(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    bound_stages = Search._bound_stages

    def checked(search: Search, entry: SearchEntry) -> Iterator[SearchEntry]:
        candidate = entry.candidate
        if candidate.layout.pipeline > 1:
            assert entry.sharded is not None
            prices = search.links_on(candidate.layout).axes
            actual = sum(received_by_all(search.problem(candidate, entry.sharded)))
            shares.append(search.bounds.received(candidate, prices) / actual)
            assert entry.beside >= search.bounds.received(candidate, prices)
        return bound_stages(search, entry)

    monkeypatch.setattr(Search, "_bound_stages", checked)
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=6, num_attention_heads=8, vocab_size=32_000
    )
    planner.plan(config, "8x-rtx4090", num_devices=4, global_batch=16, seq_len=512, forbid={"pp": 1})
    assert len(shares) >= 10 and max(shares) == pytest.approx(1.0) and min(shares) > 0.0
