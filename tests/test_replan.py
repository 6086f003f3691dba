"""A parallel module goes on under another plan: its state moves between the ranks, each byte that must move once."""

from __future__ import annotations

import pytest

from cost_models import Cluster
from runtime.migration.move_price import ReplanDecision, ReplanPrice, check_question, seconds_of_moving
from tests.patience import PATIENCE
from tests.ranks import run_on_ranks

PLANS = (
    {"pp": 4, "dp": 1, "tp": 1, "num_microbatches": 4},
    {"pp": 2, "dp": 2, "tp": 1, "zero": 1},
    {"pp": 1, "dp": 3, "tp": 1, "zero": 3, "ranks": [1, 2, 3]},
    {"pp": 1, "dp": 4, "tp": 1, "zero": 3, "zero_ranks": 2},
)
#: What is frozen from each change of plan on: one layer, one and a half, half of the second.
FROZEN = (
    ("transformer.wpe", "transformer.h.0."),
    ("transformer.wpe", "transformer.h.0.", "transformer.h.1.ln_1", "transformer.h.1.attn"),
    ("transformer.h.1.attn",),
)
#: At last more is frozen, and it is asked whether this plan pays.
PAYS = {"plan": {"pp": 1, "dp": 4, "tp": 1, "zero": 0}, "frozen": ("transformer.wpe", "transformer.h.")}


def test_a_chain_of_plans_with_freezing_trains_as_one_device_and_moves_the_least_bytes() -> None:
    """AdamW, a schedule and an average of the weights go on; gradients move in the middle of a step.

    One of four ranks leaves, and then joins as a process that was started anew.
    """
    payload = {"model": "tiny-gpt2", "layers": 2, "plans": PLANS, "frozen": FROZEN, "pays": PAYS}
    result = run_on_ranks("replan_worker", 4, payload, timeout=PATIENCE)
    assert set(result["errors"]) == {"loss", "gradients", "weights", "averages"}
    assert max(result["errors"].values()) < 1e-9
    assert "a AdamW that has stepped on these parameters was not handed over" in result["forgotten"]
    assert ["parallel.has_work is False" in text for text in result["refused"]] == [True]  # the first rank
    assert result["optimizer state"] == []  # of as many steps as on one device, and none where frozen
    assert len(result["moves"]) == len(PLANS) - 1
    for move in result["moves"]:
        assert move["moved"] == pytest.approx(move["minimum"], abs=0)
        assert move["as planned"] and move["as much as planned"] and move["over the larger shard, in tensors"] <= 1
    for (moved, (stay, go), text), steps in zip(result["decisions"], (1, 10**9), strict=True):
        assert moved is (steps > 1)
        assert stay["moving_seconds"] == stay["replan_seconds"] == 0 and go["replan_seconds"] == 30
        assert stay["step_seconds"] > go["step_seconds"] > 0 and stay["remaining_steps"] == steps
        assert 0 < go["moving_seconds"] < go["moved_bytes"] / 1e10
        assert (go["what"], "* dp=4:" in text) == ("dp=4", moved)


def test_what_moves_takes_as_long_as_the_busiest_rank_and_what_does_not_pay_stays() -> None:
    cluster = Cluster.parse("dgx-h100:2")
    inside, between = (level.slowest_link(16)[1] for level in cluster.levels)
    seconds = seconds_of_moving({(0, 1): 10**9, (0, 8): 10**9, (9, 1): 10**9, (2, 3): 10**9}, cluster)
    assert seconds == pytest.approx(1e9 / inside + 1e9 / between)
    stay, slow, even = (
        ReplanPrice("stay", 2.0, 10),
        ReplanPrice("tp=2", 1.0, 10, 4, 7),
        ReplanPrice("dp=2", 1.0, 10, 3, 7),
    )
    none = ReplanPrice.impossible("tp=7", 10, "7 divides nothing")
    assert not ReplanDecision((stay, slow, even, none)).moved
    assert ReplanDecision((stay, slow, even, ReplanPrice("dp=4", 1.0, 10, 2, 7))).chosen == 3
    assert "tp=7: no plan: 7 divides nothing" in ReplanDecision((stay, none)).summary()
    for targets, steps, seconds in (("dp=2", 1, 0), ([], 1, 0), (["dp=2"], 0, 0), (["dp=2"], 1, float("nan"))):
        with pytest.raises(ValueError, match=r"targets|remaining_steps|replan_seconds"):
            check_question(targets, steps, seconds)
