"""Problems whose best plan is known on paper: the search finds it, at exactly the price of the closed form."""

from __future__ import annotations

import pytest

from planner.auditing.graph_walk import price
from tests.search_cases import (
    Attention,
    Layer,
    Linears,
    Stack,
    UnitCosts,
    capture_on,
    counted,
    plan_with_unit_costs,
)

DEVICES = {"x": 4}


def all_reduce(num_bytes: int, devices: int = 4) -> float:
    return 1.0 + 2 * (devices - 1) / devices * num_bytes


def test_large_batch_is_data_parallel() -> None:
    """Batch 1024, hidden 128: two all-reduces of the weight gradients, nothing else."""
    graph = capture_on(Linears(128, 128, 128), 1024, 128, loss=False)
    plan = plan_with_unit_costs(graph, DEVICES, forbid_replicated_matmul=True, constraints={"output": {"x": "S(0)"}})
    assert plan.certificate.objective == 2 * all_reduce(128 * 128 * 4)
    assert counted(plan) == {("all_reduce", "backward"): (2, 2 * 128 * 128 * 4)}
    assert [item.placement for item in plan.inputs.values()] == [("S(0)",)]
    assert {state.placement for state in plan.states.values()} == {("I",)}


def test_large_batch_with_a_loss_adds_only_its_scalar() -> None:
    graph = capture_on(Linears(128, 128, 128), 1024, 128)
    plan = plan_with_unit_costs(graph, DEVICES, forbid_replicated_matmul=True)
    assert plan.certificate.objective == 2 * all_reduce(128 * 128 * 4) + all_reduce(4)


@pytest.mark.parametrize("loss", [True, False])
def test_large_hidden_is_column_then_row(loss: bool) -> None:
    """Batch 128, hidden 1024: one all-reduce of the output."""
    graph = capture_on(Linears(1024, 1024, 1024), 128, 1024, loss=loss)
    plan = plan_with_unit_costs(graph, DEVICES, forbid_replicated_matmul=True)
    assert plan.certificate.objective == all_reduce(128 * 1024 * 4)
    assert counted(plan) == {("all_reduce", "forward"): (1, 128 * 1024 * 4)}
    assert [state.placement for state in plan.states.values()] == [("S(0)",), ("S(1)",)]


def test_attention_forward_is_one_all_reduce() -> None:
    """Batch 4, sequence 128, hidden 512, 16 heads: weights stay in shards, gathers forbidden, output whole."""
    model = Attention(512, 16).requires_grad_(False)
    graph = capture_on(model, 4, 128, 512, loss=False)
    plan = plan_with_unit_costs(graph, DEVICES, constraints={"*.weight": {"x": "S"}}, forbid_collectives=["all_gather"])
    assert plan.certificate.objective == all_reduce(4 * 128 * 512 * 4)
    assert counted(plan) == {("all_reduce", "forward"): (1, 4 * 128 * 512 * 4)}
    assert [plan.states[f"{name}.weight"].placement for name in "qkvo"] == [("S(0)",)] * 3 + [("S(1)",)]


def test_replicating_everything_is_free_if_matmuls_may_be_computed_twice() -> None:
    plan = plan_with_unit_costs(capture_on(Linears(128, 128, 128), 1024, 128), DEVICES)
    assert plan.certificate.objective == 0.0
    assert plan.collectives == ()


def test_wide_batch_small_weights_is_pure_data_parallel() -> None:
    graph = capture_on(Linears(16, 32, 32, 16, activation=True, bias=True), 4096, 16)
    plan = plan_with_unit_costs(graph, DEVICES, forbid_replicated_matmul=True)
    assert {state.placement for state in plan.states.values()} == {("I",)}
    weights = 4 * (16 * 32 + 32 + 32 * 32 + 32 + 32 * 16 + 16)
    assert counted(plan) == {("all_reduce", "backward"): (6, weights), ("all_reduce", "forward"): (1, 4)}


def test_data_parallel_on_two_axes_reduces_gradients_in_two_levels() -> None:
    """Where bytes count: scatter on one axis, reduce half on the other, gather; where latency does: two all-reduces."""
    graph = capture_on(Linears(16, 32, 32, 16, activation=True), 4096, 16)
    axes = {"dp": 2, "tp": 2}
    for latency, collectives in ((1.0, {"reduce_scatter", "all_reduce"}), (2e4, {"all_reduce"})):
        plan = plan_with_unit_costs(graph, axes, latency=latency, forbid_replicated_matmul=True)
        assert {node.strategy for key, node in plan.nodes.items() if "linear" in key} == {("cut b0", "cut b0")}
        assert {c.collective for c in plan.collectives if c.phase == "backward"} == collectives


@pytest.mark.parametrize("depth", [1, 3])
def test_transformer_layer_under_a_memory_bound(depth: int) -> None:
    """One all-reduce (or gather and reduce-scatter) per attention and per MLP, forward and backward each."""
    graph = capture_on(Stack(depth, 256, 8), 4, 64, 256, requires_grad=True)
    whole = sum(plan_with_unit_costs(graph, DEVICES).costs.memory.values())
    plan = plan_with_unit_costs(graph, DEVICES, forbid_replicated_matmul=True, memory_limit=0.5 * whole)
    assert sum(plan.costs.memory.values()) <= 0.5 * whole
    counts = counted(plan)
    for phase in ("forward", "backward"):
        reduced = counts.get(("all_reduce", phase), (0, 0))
        halves = [counts.get((name, phase), (0, 0)) for name in ("all_gather", "reduce_scatter")]
        assert halves[0] == halves[1]
        assert reduced[0] + halves[0][0] == 2 * depth
        assert reduced[1] + halves[0][1] == 2 * depth * 4 * 64 * 256 * 4


def test_price_agrees_with_the_objective() -> None:
    graph = capture_on(Layer(64, 4), 8, 16, 64, requires_grad=True)
    plan = plan_with_unit_costs(graph, {"dp": 2, "tp": 2}, forbid_replicated_matmul=True)
    costs, collectives = price(graph, plan, UnitCosts({"dp": 2, "tp": 2}))
    assert costs.total == pytest.approx(plan.certificate.objective, rel=1e-9)
    assert collectives == plan.collectives
    assert costs.memory == plan.costs.memory
