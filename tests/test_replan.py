"""A parallel module goes on under another plan: its state moves between the ranks, each byte that must move once."""

from __future__ import annotations

import pytest

from tests.patience import PATIENCE
from tests.ranks import run_on_ranks

PLANS = (
    {"pp": 4, "dp": 1, "tp": 1, "num_microbatches": 4},
    {"pp": 2, "dp": 2, "tp": 1, "zero": 1},
    {"pp": 1, "dp": 4, "tp": 1, "zero": 3},
    {"pp": 1, "dp": 2, "tp": 2, "zero": 0},
)


def test_a_chain_of_plans_trains_as_one_device_and_moves_the_least_bytes() -> None:
    """AdamW, a schedule and an average of the weights go on; gradients move in the middle of a step."""
    result = run_on_ranks("replan_worker", 4, {"model": "tiny-gpt2", "layers": 2, "plans": PLANS}, timeout=PATIENCE)
    assert set(result["errors"]) == {"loss", "gradients", "weights", "averages"}
    assert max(result["errors"].values()) < 1e-9
    assert "a AdamW that has stepped on these parameters was not handed over" in result["forgotten"]
    assert len(result["moves"]) == len(PLANS) - 1
    for move in result["moves"]:
        assert move["moved"] == pytest.approx(move["minimum"], abs=0)
        assert move["as planned"] and move["as much as planned"] and move["within the larger shard and one tensor"]
