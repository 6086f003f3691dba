"""Dropout is that of one device under every plan: loss and all gradients of GPT-2 that drops embeddings, attention and
residuals, against torch's own layers with masks from numpy (``tests/random_oracle.py``)."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.ranks import run_on_ranks

PIPELINE = {"pp": 2, "num_microbatches": 4}
#: Plans of four processes.
CASES: dict[str, dict[str, Any]] = {
    "a mesh": {"mesh": {"dp": 2, "tp": 2}, "forbid_replicated_matmul": True},
    "split sequences, recomputed in parts": {
        "fix": {"cp": 2, "tp": 2, "num_microbatches": 2, "recompute": "selective"}
    },
    "pipeline of several chunks, recomputed": {
        "fix": {**PIPELINE, "tp": 2, "schedule": "interleaved_1f1b", "chunks_per_rank": 2, "recompute": "full"}
    },
    "sharded parameters, loss in chunks": {
        "fix": {"dp": 2, "tp": 2, "num_microbatches": 2, "zero": 3, "recompute": "chunked_loss"}
    },
    "micro-batches, regathered": {"fix": {"dp": 2, "tp": 2, "num_microbatches": 4, "recompute": "regather"}},
}


@functools.cache
def results() -> dict[str, float]:
    errors: dict[str, float] = run_on_ranks("dropout_worker", 4, CASES)
    return errors


@pytest.mark.parametrize("name", CASES)
def test_a_plan_drops_what_one_device_drops(name: str) -> None:
    assert results()[name] <= 1e-9
