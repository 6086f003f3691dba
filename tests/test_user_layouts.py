"""Layouts that somebody runs today, in words: priced beside a plan, or why they cannot be."""

from __future__ import annotations

from functools import cache

import pytest

import planner
from passes.plan import Plan
from planner.cli import main
from planner.inspection.baseline_comparison import ComparedLayout, compare
from planner.inspection.plan_graph import graph_of_plan
from planner.whole_step.candidates.user_layout import read_layout

pytestmark = pytest.mark.usefixtures("models_traced_once")


@cache
def plan_of_tiny_llama(*choices: tuple[str, object]) -> Plan:
    return planner.plan("tiny-llama", "dgx-h100:1", global_batch=64, seq_len=16, fix=dict(choices))


#: Of one layout, which is found at once.
DATA_ONLY = {"pp": 1, "tp": 1, "cp": 1, "num_microbatches": 1}


def compared(plan: Plan, *texts: str) -> tuple[ComparedLayout, ...]:
    with graph_of_plan(plan) as graph:
        return compare(plan, graph, (), layouts=[read_layout(text) for text in texts])


def test_a_layout_in_words_costs_what_the_plan_of_its_choices_costs() -> None:
    fix = {
        "pp": 2,
        "dp": 4,
        "tp": 1,
        "cp": 1,
        "num_microbatches": 4,
        "schedule": "1f1b",
        "zero": 1,
        "recompute": "full",
    }
    same = plan_of_tiny_llama(*fix.items())
    with_aliases, left_open = compared(
        plan_of_tiny_llama(*DATA_ONLY.items()), "pp=2 m=4,schedule=1f1b zero=1 recompute=full", "dp=4,pp=2 mbs=4"
    )
    assert with_aliases.seconds == pytest.approx(same.step.costs.simulated, rel=1e-9)
    assert with_aliases.memory == pytest.approx(max(rank.total for rank in same.step.memory), rel=1e-9)
    assert left_open.seconds is not None and with_aliases.seconds is not None
    assert left_open.seconds <= with_aliases.seconds


@pytest.mark.parametrize(
    "text, reason",
    [
        ("dp=8,tp=8,pp=16", "is 1,024 devices, the cluster has 8"),
        ("pp=2,dp=4 mbs=5", "must be the global batch of 64"),
        ("tp=8 v=2", "chunks_per_rank"),
    ],
)
def test_a_layout_that_cannot_be_says_why(text: str, reason: str) -> None:
    (layout,) = compared(plan_of_tiny_llama(*DATA_ONLY.items()), text)
    assert layout.seconds is None and reason in layout.what


@pytest.mark.parametrize(
    "text, message",
    [
        ("tensor", "takes NAME=VALUE"),
        ("tpp=8", "unknown name 'tpp'"),
        ("tp=8 tp=4", "twice"),
        ("zero=5", "'zero' must be one of"),
        ("sp=maybe", "on or off"),
        ("recompute=offload", "is planned, not priced"),
    ],
)
def test_words_that_say_no_layout_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_layout(text)


def test_a_layout_is_read_before_anything_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    request = ["plan", "tiny-llama", "--cluster", "dgx-h100:1", "--seq-len", "16", "--global-batch", "64"]
    assert main([*request, "--layout", "no such"]) == 2
    assert main([*request, "--mesh", "dp=8", "--layout", "tp=2"]) == 2
    assert "drop --mesh" in capsys.readouterr().err
