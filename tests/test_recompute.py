"""Recompute policies on two processes: the numbers of a run without, and exactly the collectives that are counted."""

from __future__ import annotations

from typing import Any

import pytest

from planner.whole_step.result.unit_collectives import SavedLocals, gathers_in_backward
from runtime.program_tools.recompute import POLICIES, recomputed
from tests.ranks import run_on_ranks

#: Block → policy → collectives that one backward sends beyond those of the plain function.
SENT_AGAIN: dict[str, dict[str, dict[str, int]]] = {
    "sequence_parallel": {
        "none": {},
        "regather": {"all_gather": 1},
        "selective": {"all_gather": 1},
        "full": {"all_gather": 1, "reduce_scatter": 1},
        "offload": {},
    },
    "all_reduced": {
        "none": {},
        "regather": {"all_reduce": 1},
        "selective": {"all_reduce": 1},
        "full": {"all_reduce": 2},
        "offload": {},
    },
    "sharded_weight": {
        "none": {},
        "regather": {"all_gather": 1, "all_to_all": 1},
        "selective": {"all_gather": 1, "all_to_all": 1},
        "full": {"all_gather": 1, "all_to_all": 2},
        "offload": {},
    },
    "loss_of_classes": {"none": {}, "regather": {}, "selective": {}, "full": {"all_reduce": 2}, "offload": {}},
    "dropped": {
        "none": {},
        "regather": {},
        "selective": {},
        "full": {"all_gather": 1, "reduce_scatter": 1},
        "offload": {},
    },
    "in_place": {"none": {}, "regather": {}, "selective": {}, "full": {"all_gather": 1}, "offload": {}},
    "own_weights": {policy: {"all_gather": 2} for policy in POLICIES},
}


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """All blocks, run by one pair of processes."""
    return run_on_ranks("recompute_worker", 2, list(SENT_AGAIN))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("block", SENT_AGAIN)
def test_gradients_are_those_without_recomputation(results: dict[str, Any], block: str, policy: str):
    assert results[block][policy]["error"] <= 1e-9


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("block", SENT_AGAIN)
def test_what_is_sent_again_is_what_the_plan_counts(results: dict[str, Any], block: str, policy: str):
    assert results[block][policy]["again"] == SENT_AGAIN[block][policy]


@pytest.mark.parametrize(("dtype", "size"), [("float64", 8), ("bfloat16", 2), ("int64", 8)])
def test_lists_are_exchanged_as_one_tensor_where_the_backend_takes_no_lists(
    results: dict[str, Any], dtype: str, size: int
):
    """What rank 0 gets, what rank 1 gets, and one all-to-all of rank 0's five elements on each of two ranks."""
    assert results["exchanged"][f"torch.{dtype}"] == [[[0, 0], [10, 10]], [[1, 1, 1], [11, 11, 11]], 1, 2 * 5 * size]


@pytest.mark.parametrize(
    ("policy", "names", "again"), [("none", "ab", True), ("none", "bc", False), ("full", "c", True)]
)
def test_weights_are_gathered_again_with_one_that_is_read(policy: str, names: str, again: bool):
    """What runs again reads all; else autograd keeps ``a`` alone, so that a group without it stays as it is."""
    saved = SavedLocals(brought=(), weights=frozenset("a"), last=3)
    assert gathers_in_backward(saved, policy, names) == again


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="unknown recompute policy 'half': expected one of none, selective, regather"):
        recomputed(lambda x: x, "half")
