"""Recompute policies on two processes: the numbers of a run without, and exactly the collectives that are counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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


@pytest.mark.parametrize("form", ["input", "cell"])
@pytest.mark.parametrize(("kind", "gates"), [("lstm", 4), ("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1)])
def test_recurrent_layers_write_over_their_products_and_run_again_whole(kind: str, gates: int, form: str):
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)

    weights = [normal(gates * 5, 4), normal(gates * 5, 5), normal(gates * 5), normal(gates * 5)]
    state, x = normal(3, 5), normal(3, 2, 4)

    def loss(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        if form == "cell":
            states = [state, state] if kind == "lstm" else state
            results = getattr(torch.ops.aten, f"{kind}_cell").default(x[:, 0], states, *weights)
            return (results[0] if kind == "lstm" else results).square().sum()
        states = [state[None]] * 2 if kind == "lstm" else state[None]
        return (
            getattr(torch.ops.aten, kind).input(x, states, weights, True, 1, 0.0, True, False, True)[0].square().sum()
        )

    operands = [x, *weights]
    expected = torch.autograd.grad(loss(*operands), operands)
    torch.testing.assert_close(torch.autograd.grad(recomputed(loss, "selective")(*operands), operands), expected)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 does not tell a policy what an operator gave")
def test_what_writes_over_a_kept_result_is_refused():
    def written_over(x: torch.Tensor) -> torch.Tensor:
        first, second = torch.mm(x, x).unsafe_chunk(2, 1)
        return first.add_(second).square().sum()

    with pytest.raises(RuntimeError, match="writes over a result that selective recomputation keeps"):
        recomputed(written_over, "selective")(torch.randn(4, 4, requires_grad=True))


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="unknown recompute policy 'half': expected one of none, selective, regather"):
        recomputed(lambda x: x, "half")
