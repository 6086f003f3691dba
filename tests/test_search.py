"""The search as a whole: folding, constraints, limits, fallbacks, and that plans are the same every time."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from passes.ir.graph import Graph
from passes.ir.types import MeshShape
from passes.plan import Plan
from planner.auditing.graph_walk import price
from planner.sharding_ilp import search
from planner.sharding_ilp.role_restrictions import BASELINES
from tests.search_cases import Layer, Linears, Stack, UnitCosts, capture_on, plan_with_unit_costs

AXES = {"dp": 2, "tp": 2}


@pytest.fixture(scope="module")
def mlp() -> Graph:
    return capture_on(Linears(64, 256, 64, activation=True, bias=True), 32, 64)


@pytest.fixture(scope="module")
def stack() -> Graph:
    return capture_on(Stack(4, 64, 4), 8, 16, 64, requires_grad=True)


# folding


@pytest.mark.parametrize("limit", [None, 0.5])
def test_folding_changes_nothing_but_the_size(stack: Graph, limit: float | None) -> None:
    options: dict[str, Any] = {"forbid_replicated_matmul": True, "memory_limit": None}
    if limit is not None:
        options["memory_limit"] = limit * sum(plan_with_unit_costs(stack, AXES).costs.memory.values())
    folded = plan_with_unit_costs(stack, AXES, **options)
    unfolded = plan_with_unit_costs(stack, AXES, fold=False, **options)
    assert folded.blocks and not unfolded.blocks
    assert folded.certificate.num_variables < unfolded.certificate.num_variables / 2
    assert folded.certificate.objective >= unfolded.certificate.objective * (1 - 1e-9)
    if limit is None:
        assert folded.certificate.objective == pytest.approx(unfolded.certificate.objective, rel=1e-6)


def test_depth_does_not_change_the_size() -> None:
    sizes = set()
    for depth in (3, 6):
        graph = capture_on(Stack(depth, 64, 4), 8, 16, 64, requires_grad=True)
        plan = plan_with_unit_costs(graph, AXES, forbid_replicated_matmul=True)
        sizes.add((plan.certificate.num_variables, plan.certificate.num_constraints))
        again, _ = price(graph, plan, UnitCosts(AXES))
        assert again.total == pytest.approx(plan.certificate.objective, rel=1e-9)
    assert len(sizes) == 1


@pytest.mark.parametrize("sizes", [(16,) * 6, (16, 64, 16, 64, 16, 64, 16)])
def test_conversions_between_copies_are_counted(sizes: tuple[int, ...]) -> None:
    """Bare linears hand partial sums or shards from copy to copy: entry, exit and hand-over differ."""
    for requires_grad in (False, True):
        graph = capture_on(Linears(*sizes, activation=True), 64, sizes[0], requires_grad=requires_grad)
        for latency in (1.0, 1000.0):
            plan = plan_with_unit_costs(graph, AXES, latency=latency, forbid_replicated_matmul=True)
            costs, collectives = price(graph, plan, UnitCosts(AXES, latency))
            assert costs.total == pytest.approx(plan.certificate.objective, rel=1e-9)
            assert (collectives, costs.memory) == (plan.collectives, plan.costs.memory)


# baselines


@pytest.mark.parametrize("name", sorted(BASELINES))
def test_baselines_are_priced_by_the_same_search(stack: Graph, name: str) -> None:
    best = plan_with_unit_costs(stack, AXES, forbid_replicated_matmul=True)
    plan = plan_with_unit_costs(stack, AXES, baseline=name, forbid_replicated_matmul=True)
    assert best.certificate.objective <= plan.certificate.objective * (1 + 1e-9)
    costs, _ = price(stack, plan, UnitCosts(AXES))
    assert costs.total == pytest.approx(plan.certificate.objective, rel=1e-9)


def test_baselines_are_what_their_names_say(stack: Graph) -> None:
    plans = {name: plan_with_unit_costs(stack, AXES, baseline=name) for name in BASELINES}
    weights = {"attention.q.weight": "S(0)", "attention.o.weight": "S(1)", "up.weight": "S(0)", "down.weight": "S(1)"}
    for name, placed in weights.items():
        path = f"layers.2.{name}"
        assert plans["megatron"].states[path].placement == ("I", placed)
        assert plans["redco"].states[path].placement == ("I", placed)
        assert plans["data_parallel"].states[path].placement == ("I", "I")
        assert all(kind.startswith("S") for kind in plans["fully_sharded"].states[path].placement)
    linears = [node for key, node in plans["data_parallel"].nodes.items() if "linear" in key]
    assert {output for node in linears for output in node.outputs} == {("S(0)", "S(0)")}


def test_unknown_baseline(mlp: Graph) -> None:
    with pytest.raises(ValueError, match="unknown baseline 'zero'"):
        plan_with_unit_costs(mlp, AXES, baseline="zero")


# constraints


def test_parameters_are_stored_as_asked(mlp: Graph) -> None:
    plan = plan_with_unit_costs(mlp, AXES, constraints={"layers.*.weight": {"tp": "S(0)"}, "*.bias": {"dp": "S"}})
    assert [plan.states[f"layers.{i}.weight"].placement[1] for i in (0, 1)] == ["S(0)", "S(0)"]
    assert plan.states["layers.0.bias"].placement[0] == "S(0)"
    assert plan.constraints == {"layers.*.weight": {"tp": "S(0)"}, "*.bias": {"dp": "S"}}


def test_modules_operators_inputs_and_outputs_can_be_pinned(mlp: Graph) -> None:
    plan = plan_with_unit_costs(
        mlp,
        AXES,
        constraints={
            "layers.0": {"tp": "S(1)"},
            "layers.1:aten.linear.*": {"dp": ["cut b0", "cut k"]},
            "output:outputs": {"dp": "R"},
            "input:0": {"dp": "S(0)"},
        },
    )
    assert plan.nodes["layers.0:aten.linear.default:0"].outputs[0][1] == "S(1)"
    assert plan.nodes["layers.1:aten.linear.default:0"].strategy[0] in ("cut b0", "cut k")
    assert plan.outputs["outputs"].placement[0] in ("R", "I")
    assert plan.inputs["0"].placement[0] == "S(0)"


def test_a_pin_on_one_layer_unfolds_the_block(stack: Graph) -> None:
    plan = plan_with_unit_costs(stack, AXES, constraints={"layers.2.up.weight": {"tp": "S(1)"}})
    assert plan.blocks == ()
    assert plan.states["layers.2.up.weight"].placement[1] == "S(1)"
    everywhere = plan_with_unit_costs(stack, AXES, constraints={"layers.*.up.weight": {"tp": "S(1)"}})
    assert len(everywhere.blocks) == 1
    assert {everywhere.states[f"layers.{i}.up.weight"].placement[1] for i in range(4)} == {"S(1)"}


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ({"layers.0.wieght": {"tp": "S(0)"}}, "matches no parameter.*did you mean 'layers.0.weight'"),
        ({"layers.0.weight": {"ep": "S(0)"}}, "no axis 'ep' in mesh dp=2,tp=2"),
        ({"layers.0.weight": {"tp": "S(5)"}}, r"cannot be met by 'state:layers.0.weight'.*can be I, S\(0\), S\(1\)"),
        ({"layers.0.weight": "S(0)"}, r"expected \{axis: demand\}"),
    ],
)
def test_constraints_that_make_no_sense(mlp: Graph, constraints: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_with_unit_costs(mlp, AXES, constraints=constraints)


def test_forbidden_collectives_are_not_used(mlp: Graph) -> None:
    plan = plan_with_unit_costs(mlp, AXES, forbid_replicated_matmul=True, forbid_collectives=["all_reduce"])
    assert plan.collectives and "all_reduce" not in {item.collective for item in plan.collectives}
    with pytest.raises(ValueError, match="unknown collective 'allreduce'"):
        plan_with_unit_costs(mlp, AXES, forbid_collectives=["allreduce"])


def test_conflicts_are_named(mlp: Graph) -> None:
    everything = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
    with pytest.raises(ValueError, match="no plan satisfies forbid_replicated_matmul together with") as caught:
        plan_with_unit_costs(
            mlp,
            AXES,
            forbid_replicated_matmul=True,
            forbid_collectives=everything,
            constraints={"layers.0.bias": {"tp": "R"}},
        )
    assert "layers.0.bias" not in str(caught.value)
    assert "drop " in str(caught.value)


def test_a_memory_limit_says_what_is_needed(mlp: Graph) -> None:
    with pytest.raises(ValueError, match="no plan satisfies memory limit 50 KiB: it needs at least") as caught:
        plan_with_unit_costs(mlp, AXES, memory_limit=50 * 1024)
    lower_bound_text = re.search(r"at least ([\d.]+) KiB", str(caught.value))
    assert lower_bound_text is not None
    needed = float(lower_bound_text.group(1)) * 1024
    plan = plan_with_unit_costs(mlp, AXES, memory_limit=needed * 1.001)
    assert sum(plan.costs.memory.values()) <= needed * 1.001
    with pytest.raises(ValueError, match="needs at least"):
        plan_with_unit_costs(mlp, AXES, memory_limit=needed * 0.99)


def test_a_memory_limit_together_with_pins(mlp: Graph) -> None:
    pins = {"*.weight": {"tp": "R", "dp": "R"}}
    with pytest.raises(ValueError, match=r"memory limit 293 KiB.*drop .*'dp': 'R'.*it needs at least"):
        plan_with_unit_costs(mlp, AXES, memory_limit=300_000, constraints=pins)


def test_pinned_plan_is_kept_for_other_shapes(stack: Graph) -> None:
    plan = plan_with_unit_costs(stack, AXES, baseline="megatron")
    smaller = capture_on(Stack(4, 64, 4), 4, 8, 64, requires_grad=True)
    again = plan_with_unit_costs(smaller, AXES, pinned=plan)
    assert {path: state.placement for path, state in again.states.items()} == {
        path: state.placement for path, state in plan.states.items()
    }
    assert {key: node.strategy for key, node in again.nodes.items()} == {
        key: node.strategy for key, node in plan.nodes.items()
    }
    unfolded = plan_with_unit_costs(smaller, AXES, pinned=plan, fold=False)
    assert unfolded.nodes["layers.3.up:aten.linear.default:0"] == plan.nodes["layers.0.up:aten.linear.default:0"]


@pytest.mark.parametrize("single", [(1, 16, 64), (8, 1, 64)], ids=["one sample", "one token"])
def test_heads_that_a_pinned_plan_cuts_stay_cut_where_a_dim_of_size_1_was_longer(
    stack: Graph, single: tuple[int, ...]
) -> None:
    """Factors of a reshape are numbered past dims of size 1: that of the heads has another number there."""
    small = capture_on(Stack(4, 64, 4), *single, requires_grad=True)
    for first, other in ((stack, small), (small, stack)):
        plan = plan_with_unit_costs(first, {"tp": 2}, baseline="megatron")
        again = plan_with_unit_costs(other, {"tp": 2}, pinned=plan)
        assert {key: node.outputs for key, node in again.nodes.items()} == {
            key: node.outputs for key, node in plan.nodes.items()
        }
        assert {entry.collective for entry in again.collectives} == {entry.collective for entry in plan.collectives}


def test_pinned_plan_where_a_batch_no_longer_divides(stack: Graph) -> None:
    plan = plan_with_unit_costs(stack, AXES, baseline="data_parallel")
    odd = capture_on(Stack(4, 64, 4), 3, 7, 64, requires_grad=True)
    again = plan_with_unit_costs(odd, AXES, pinned=plan)
    assert {state.placement for state in again.states.values()} == {("I", "I")}


def test_a_pinned_parameter_stays_cut_unevenly_where_no_operator_needs_it_so() -> None:
    """Batch normalisation computes with running statistics in evaluation, on no uneven parts."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
    training = capture_on(model, 4, 3, 6, 6, requires_grad=True)
    plan = plan_with_unit_costs(training, {"tp": 3}, constraints={"1.weight": {"tp": "S(0)"}})
    again = plan_with_unit_costs(capture_on(model.eval(), 4, 3, 6, 6), {"tp": 3}, pinned=plan)
    assert plan.states["1.weight"].placement == again.states["1.weight"].placement == ("S(0)",)


# limits, fallbacks, determinism


def test_no_time_still_gives_a_plan(stack: Graph) -> None:
    plan = plan_with_unit_costs(stack, {"dp": 2, "tp": 4}, forbid_replicated_matmul=True, time_limit=0.0)
    best = plan_with_unit_costs(stack, {"dp": 2, "tp": 4}, forbid_replicated_matmul=True)
    assert plan.certificate.objective >= best.certificate.objective * (1 - 1e-9)
    assert plan.certificate.bound <= best.certificate.objective * (1 + 1e-9)
    assert plan.certificate.gap == pytest.approx(1 - plan.certificate.bound / plan.certificate.objective)


def test_plans_are_the_same_every_time_and_survive_saving(stack: Graph, tmp_path: Path) -> None:
    plans = [plan_with_unit_costs(stack, AXES, forbid_replicated_matmul=True) for _ in range(2)]
    assert plans[0].to_json() == plans[1].to_json()
    plans[0].save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plans[0]


def test_axes_of_size_one_are_left_alone(mlp: Graph) -> None:
    plan = plan_with_unit_costs(mlp, {"dp": 1, "tp": 2, "cp": 1}, forbid_replicated_matmul=True)
    alone = plan_with_unit_costs(mlp, {"tp": 2}, forbid_replicated_matmul=True)
    assert plan.certificate.objective == alone.certificate.objective
    assert {item.axis for item in plan.collectives} == {"tp"}
    assert {node.strategy[0] for node in plan.nodes.values()} == {"invariant"}


def test_an_operator_without_a_rule_runs_whole_and_is_noted(mlp: Graph) -> None:
    nodes = tuple(
        dataclasses.replace(node, op="custom.relu.default") if node.op == "aten.relu.default" else node
        for node in mlp.nodes
    )
    plan = plan_with_unit_costs(mlp.replace(nodes=nodes), AXES, forbid_replicated_matmul=True)
    (note,) = plan.notes
    assert "custom.relu.default has no sharding rule: 1 run whole on every device" in note
    node = next(node for node in plan.nodes.values() if node.op == "custom.relu.default")
    assert not node.has_rule
    assert set(node.strategy) <= {"replicate", "invariant"}


def test_plan_of_inference_has_no_backward(mlp: Graph) -> None:
    model = Layer(64, 4).requires_grad_(False)
    graph = capture_on(model, 8, 16, 64, loss=False)
    plan = search(
        graph,
        mesh=MeshShape.from_dict(AXES),
        cost_model=UnitCosts(AXES, second_per_flop=1.0),
        cluster_info={},
        forbid_replicated_matmul=True,
    )
    assert plan.costs.compute_backward == plan.costs.communication_backward == 0.0
    assert {item.phase for item in plan.collectives} <= {"forward"}
    assert [output.placement for output in plan.outputs.values()] == [("R", "R")]
    assert plan.costs.memory["optimizer"] == plan.costs.memory["gradients"] == 0


# plan files


def test_corrupted_plan_files(mlp: Graph, tmp_path: Path) -> None:
    text = plan_with_unit_costs(mlp, AXES).to_json()
    data = json.loads(text)
    broken = {
        "not JSON at line": text[: len(text) // 2],
        "plan version 99 is not supported": json.dumps({**data, "version": 99}),
        "expected a JSON object, got list": "[]",
        "plan needs 'nodes'": json.dumps({key: value for key, value in data.items() if key != "nodes"}),
        "plan has an unknown field 'extra': expected one of model, ": json.dumps({**data, "extra": 1}),
        "plan.model must be a text, got 3": json.dumps({**data, "model": 3}),
        "a text that is not Unicode": json.dumps({**data, "model": "\ud800"}),
        "plan.training must be true or false, got 1": json.dumps({**data, "training": 1}),
        "plan.costs has an unknown field 'memry', did you mean 'memory'": text.replace('"memory": {', '"memry": {', 1),
        "plan.costs.compute_forward must be a number, got True": json.dumps(
            {**data, "costs": {**data["costs"], "compute_forward": True}}
        ),
        "plan has a number of more than 308 digits": json.dumps(
            {**data, "costs": {**data["costs"], "compute_forward": 10**400}}
        ),
        "plan.step.interval must be a list of 2, got": json.dumps(
            {**data, "step": {**data["step"], "interval": [1.0, 2.0, 3.0]}}
        ),
        "2 types|types for the 1 axes": json.dumps({**data, "mesh": {"names": ["x"], "sizes": [4]}}),
        "expected one of R, I, P and S.dim., got 'Q'": text.replace('"I"', '"Q"'),
    }
    for message, content in broken.items():
        path = tmp_path / "plan.json"
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            Plan.load(path)
    with pytest.raises(ValueError, match="cannot read plan file"):
        Plan.load(tmp_path / "missing.json")
