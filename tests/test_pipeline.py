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


VARIANTS_RUN = {1: ("plain",), 2: VARIANTS, 4: ("plain", "token", "selective")}
#: Plain chunks with every number of micro-batches, the other variants with the most.
CASES = [
    (num_ranks, schedule, CHUNKS_PER_RANK[schedule], num_microbatches, variant)
    for num_ranks, variants in VARIANTS_RUN.items()
    for schedule in SCHEDULES
    for variant in variants
    for num_microbatches in ((1, 2, 4, 8) if variant == "plain" else (8,))
    if can_run(num_ranks, schedule, num_microbatches)
]


@functools.cache
def results() -> dict[str, Any]:
    """All cases, run by one set of processes (as many pipelines at once as fit)."""
    return run_on_ranks("pipeline_worker", 4, CASES)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("num_ranks", "variant"), [(ranks, variant) for ranks, variants in VARIANTS_RUN.items() for variant in variants]
)
def test_pipelines_compute_what_one_process_does(num_ranks: int, schedule: str, variant: str) -> None:
    cases = [case for case in CASES if (case[0], case[1], case[4]) == (num_ranks, schedule, variant)]
    assert cases
    for case in cases:
        found = results()[" ".join(map(str, case))]
        assert found["error"] <= RELATIVE_TOLERANCE, (case, found)
        assert found["as_planned"], (case, found)
        assert found["bytes_as_planned"], (case, found)
        assert found["without_gradients"], (case, found)
        assert (found["bytes"] > 0) == (num_ranks > 1), (case, found)
