"""Pipelines on real gloo processes against one process: losses, all gradients, the order of actions, bytes sent."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from cost_models.schedules import SCHEDULES, reason_not
from runtime.pipeline.specs import check_chunks
from runtime.pipeline.torch_schedules import expected_order
from tests.patience import PATIENCE
from tests.pipeline_stages import VARIANTS, Chunk
from tests.ranks import run_on_ranks

RELATIVE_TOLERANCE = 1e-9
CHUNKS_PER_RANK = {name: row.chunks_per_rank or 2 for name, row in SCHEDULES.items()}


def can_run(num_ranks: int, schedule: str, num_microbatches: int) -> bool:
    num_chunks = num_ranks * CHUNKS_PER_RANK[schedule]
    reason = reason_not(schedule, num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)
    return reason is None or (schedule == "1f1b" and num_microbatches < num_ranks)


VARIANTS_RUN = {1: ("plain",), 2: VARIANTS, 4: ("plain", "token", "selective")}
#: Of plain chunks: fewer micro-batches than ranks, as many, and more; other variants have the most.
NUM_MICROBATCHES = {1: (4,), 2: (1, 2, 8), 4: (1, 4, 8)}
CASES = [
    (num_ranks, schedule, CHUNKS_PER_RANK[schedule], num_microbatches, variant)
    for num_ranks, variants in VARIANTS_RUN.items()
    for schedule in SCHEDULES
    for variant in variants
    for num_microbatches in (NUM_MICROBATCHES[num_ranks] if variant == "plain" else (8,))
    if can_run(num_ranks, schedule, num_microbatches)
]


@functools.cache
def results() -> dict[str, Any]:
    """All cases, run by one set of processes (as many pipelines at once as fit)."""
    outcomes: dict[str, Any] = run_on_ranks("pipeline_worker", 4, CASES, timeout=PATIENCE)
    return outcomes


@functools.cache
def failures(schedules: tuple[str, ...]) -> dict[str, list[dict[str, Any]]]:
    """What each of two ranks says if the first fails and the time-out is 10 seconds, by schedule (all at once)."""
    payload = (schedules, 0, 10.0)
    outcomes: dict[str, list[dict[str, Any]]] = run_on_ranks(
        "pipeline_failure_worker", 2 * len(schedules), payload, timeout=PATIENCE
    )
    return outcomes


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("num_ranks", "variant"), [(ranks, variant) for ranks, variants in VARIANTS_RUN.items() for variant in variants]
)
def test_pipelines_compute_what_one_process_does(num_ranks: int, schedule: str, variant: str) -> None:
    cases = [case for case in CASES if (case[0], case[1], case[4]) == (num_ranks, schedule, variant)]
    assert cases
    for case in cases:
        outcomes = results()[" ".join(map(str, case))]
        assert outcomes["error"] <= RELATIVE_TOLERANCE, (case, outcomes)
        assert outcomes["as_planned"], (case, outcomes)
        assert outcomes["bytes_as_planned"], (case, outcomes)
        assert outcomes["without_gradients"], (case, outcomes)
        assert (outcomes["bytes"] > 0) == (num_ranks > 1), (case, outcomes)


def test_a_rank_that_fails_does_not_leave_the_others_waiting() -> None:
    schedules = ("1f1b", "zb_h1")
    for schedule in schedules:
        failing, waiting = failures(schedules)[schedule]
        assert "pipeline rank 0 (chunks 0) stopped after" in failing["messages"][0]
        assert "ArithmeticError: this chunk fails" in failing["messages"][0]
        assert "pipeline rank 1 (chunks 1) stopped after" in waiting["messages"][0]
        assert "another rank failed first: see its output" in waiting["messages"][0]
        for outcomes in (failing, waiting):
            assert "start the processes again" in outcomes["messages"][1]


@pytest.mark.parametrize(
    ("schedule", "num_microbatches", "reason"),
    [("gpipe", 4, "needs 1 chunk"), ("dualpipev", 3, "at least as many micro-batches as chunks")],
)
def test_what_has_no_order_is_refused(schedule: str, num_microbatches: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        expected_order(schedule, num_ranks=2, num_microbatches=num_microbatches, num_chunks=4)


def test_1f1b_runs_fewer_micro_batches_than_ranks_in_the_planners_order() -> None:
    order = expected_order("1f1b", num_ranks=4, num_microbatches=2, num_chunks=4)
    assert ["".join(action.kind for action in rank) for rank in order] == ["FFBB", "FFBB", "FFBB", "FBFB"]


def test_chunks_of_another_rank_are_refused() -> None:
    with pytest.raises(ValueError, match=r"given chunks \[0, 2\].*it holds \[0, 3\]"):
        check_chunks([Chunk(0, 4), Chunk(2, 4)], schedule="zbv", num_chunks=4, rank=0, num_ranks=2)
