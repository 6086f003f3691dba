"""Pipelines on real gloo processes against one process: losses, all gradients, the order of actions, bytes sent."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from cost_models.schedules import SCHEDULES, reason_not
from tests.pipeline_stages import VARIANTS
from tests.ranks import run_on_ranks

RELATIVE_TOLERANCE = 1e-9
CHUNKS_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "zb_h1": 1, "zbv": 2, "dualpipev": 2}


def can_run(num_ranks: int, schedule: str, num_microbatches: int) -> bool:
    num_chunks = num_ranks * CHUNKS_PER_RANK[schedule]
    reason = reason_not(schedule, num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)
    return reason is None or (schedule == "1f1b" and num_microbatches < num_ranks)


#: How many micro-batches, by number of ranks; of the other variants only the most.
NUM_MICROBATCHES = {1: (1, 4), 2: (1, 2, 4, 8), 4: (1, 2, 4, 8)}
CASES = [
    (num_ranks, schedule, CHUNKS_PER_RANK[schedule], num_microbatches, variant)
    for num_ranks, numbers in NUM_MICROBATCHES.items()
    for schedule in SCHEDULES
    for variant in VARIANTS
    for num_microbatches in (numbers if variant == "plain" else numbers[-1:])
    if can_run(num_ranks, schedule, num_microbatches)
]


@functools.cache
def results() -> dict[str, Any]:
    """All cases, run by one set of processes (as many pipelines at once as fit)."""
    return run_on_ranks("pipeline_worker", 4, CASES)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_pipelines_compute_what_one_process_does(num_ranks: int, schedule: str, variant: str) -> None:
    cases = [case for case in CASES if (case[0], case[1], case[4]) == (num_ranks, schedule, variant)]
    assert cases
    for case in cases:
        found = results()[" ".join(map(str, case))]
        assert found["error"] <= RELATIVE_TOLERANCE, (case, found)
        assert found["as_planned"], (case, found)
        assert found["bytes_as_planned"], (case, found)
        assert (found["bytes"] > 0) == (num_ranks > 1), (case, found)
