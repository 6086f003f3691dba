"""Baselines of whole steps: each is what it says, and the planner's step is never slower."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from cost_models import Cluster
from cost_models.step_time import step_memory, step_seconds
from passes.capture import capture
from passes.ir.graph import Graph
from passes.plan import Plan
from planner.library import load_config
from planner.pipeline_ilp.cuts import greedy_partition, partition
from planner.pipeline_ilp.stage_problem import as_step, fits
from planner.planning import capture_for_planning
from planner.verification.verify_model import slow_devices
from planner.whole_step.best_first import Search
from planner.whole_step.candidates.demands import Demands, read_demands
from planner.whole_step.candidates.expert_layouts import (
    BASELINES,
    BaselineSpace,
    Missing,
    Priced,
    as_assignment,
    baseline_named,
    best_of_baseline,
)
from planner.whole_step.candidates.tensor_roles import transformers_roles
from planner.whole_step.plan_step import plan_step
from planner.whole_step.result.lighter import fullest
from planner.whole_step.result.uniform_plans import in_other_orders, plainer
from tests.small_models import squared_error

pytestmark = pytest.mark.usefixtures("models_traced_once")


class ConvNet(nn.Module):
    """Two convolutions and a classifier of uneven sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 32, 3, padding=1)
        self.last = nn.Linear(32 * 64, 128)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.second(torch.relu(self.first(images))))
        return self.last(hidden.flatten(1))


CASES = {
    "tiny-llama": Cluster.parse("cpu-local:8"),
    "tiny-gpt2": slow_devices(8),
    "conv": Cluster.parse("8x1080ti"),
}


@functools.cache
def captured(model: str) -> Graph:
    if model == "conv":
        return capture(ConvNet(), args=(torch.zeros(16, 3, 8, 8), torch.zeros(16, 128)), loss_fn=squared_error)
    return capture_for_planning(model, batch_size=16, seq_len=32)


@functools.cache
def space(model: str) -> BaselineSpace:
    return BaselineSpace(captured(model), config=None if model == "conv" else load_config(model))


@functools.cache
def baselines(model: str) -> dict[str, Priced | Missing]:
    return {name: best_of_baseline(name, space(model), CASES[model], Demands()) for name in BASELINES}


def priced(model: str, name: str, fix: dict[str, Any], **options: Any) -> Priced:
    baseline = best_of_baseline(name, space(model), CASES[model], read_demands(fix, **options))
    assert isinstance(baseline, Priced), baseline
    return baseline


def on_axis(plan: Plan, axis: str) -> dict[str, str]:
    """Where each parameter is stored along one axis."""
    index = plan.mesh.names.index(axis)
    return {path: state.placement[index] for path, state in plan.states.items()}


@pytest.mark.parametrize("model", CASES)
def test_no_baseline_is_faster(model: str) -> None:
    plan = plan_step(captured(model), CASES[model], Demands())
    assert plan.step is not None
    for name, baseline in baselines(model).items():
        if isinstance(baseline, Priced):
            # Within the gap the plan that takes less memory is chosen (planner.whole_step.result.lighter).
            is_lighter = max(rank.total for rank in plan.step.memory) < fullest(baseline.judged)
            slack = Demands().gap if is_lighter else 1e-9
            assert plan.step.costs.simulated <= baseline.simulated * (1 + slack), name


@pytest.mark.parametrize("model", CASES)
def test_a_baseline_keeps_to_its_row_and_treats_all_layers_alike(model: str) -> None:
    for name, baseline in baselines(model).items():
        if isinstance(baseline, Missing):
            continue
        step, fixed = baseline.plan().step, baseline_named(name).fixed
        assert step is not None
        groups = [group for chunk in step.chunks for group in chunk.groups]
        assert all(step.axes[axis] in fixed[axis] for axis in step.axes if axis in fixed), name
        assert len({group.recompute for group in groups}) == 1
        assert groups[0].recompute in fixed["recompute"]
        assert step.schedule in (*fixed.get("schedule", ()), "none")
        assert step.costs.simulated == baseline.simulated
        assert baseline.plan().certificate.objective == pytest.approx(baseline.seconds)


def test_data_parallel_keeps_everything_whole_and_fully_sharded_nothing() -> None:
    for name, stage in (("ddp", 0), ("fsdp", 3)):
        plan = priced("tiny-llama", name, {}).plan()
        assert plan.step is not None
        assert {axis for axis, size in plan.step.axes.items() if size > 1} == {"dp"}
        assert {group.zero for chunk in plan.step.chunks for group in chunk.groups} == {stage}
        assert all(where in "RI" for where in on_axis(plan, "tp").values())


def test_megatron_splits_columns_then_rows_and_the_vocabulary() -> None:
    stored = on_axis(priced("tiny-llama", "megatron", {"tp": 2, "pp": 1}).plan(), "tp")
    layer = "model.layers.0"
    columns = [f"{layer}.self_attn.{name}_proj.weight" for name in "qkv"]
    columns += [f"{layer}.mlp.{name}_proj.weight" for name in ("gate", "up")]
    assert {stored[path] for path in columns} == {"S(0)"}
    assert {stored[f"{layer}.self_attn.o_proj.weight"], stored[f"{layer}.mlp.down_proj.weight"]} == {"S(1)"}
    assert stored["model.embed_tokens.weight"] == "S(0)"
    assert stored[f"{layer}.input_layernorm.weight"] in "RI"


def test_tensor_parallelism_of_experts_stays_within_a_node() -> None:
    cluster = Cluster.parse("dgx-h100:2")
    baseline = best_of_baseline("megatron", space("tiny-llama"), cluster, read_demands({"tp": 16}))
    assert isinstance(baseline, Missing)
    assert isinstance(best_of_baseline("megatron", space("tiny-llama"), cluster, read_demands({"tp": 2})), Priced)


def test_the_plan_that_transformers_has_for_llama_is_read() -> None:
    graph = captured("tiny-llama")
    tp_roles = transformers_roles(graph, load_config("tiny-llama"))
    assert tp_roles is not None
    roles = {
        node.module_path: tp_roles.named_roles[node.name] for node in graph.nodes if node.name in tp_roles.named_roles
    }
    layers = {path.rpartition(".")[2]: role for path, role in roles.items()}
    columns = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "column")
    assert layers == {**columns, "o_proj": "row", "down_proj": "row"}
    stored = on_axis(priced("tiny-llama", "transformers tp", {"tp": 2}).plan(), "tp")
    assert stored["model.layers.0.self_attn.q_proj.weight"] == "S(0)"
    assert stored["model.layers.0.mlp.down_proj.weight"] == "S(1)"
    assert stored["model.embed_tokens.weight"] in "RI"


def test_without_sequence_parallelism_norms_see_whole_activations() -> None:
    plan = priced("tiny-llama", "transformers tp", {"tp": 2}).plan()
    index = plan.mesh.names.index("tp")
    norms = [node for key, node in plan.nodes.items() if "input_layernorm" in key]
    assert norms
    assert all(where[index] in "RI" for node in norms for where in node.outputs)


def test_pipelines_are_cut_by_rule() -> None:
    for name, rule in (("uniform parameters", partition), ("greedy parameters", greedy_partition)):
        solution = priced("tiny-llama", name, {"pp": 2}).judged.solution
        figures = solution.sharded.figures
        costs = [sum(w.elements for w in each.weights) for each in figures for _ in range(each.unit.count)]
        begins, _ = rule(costs, solution.candidate.num_chunks)
        assert solution.stages.assignment == as_assignment([each.unit.count for each in figures], begins)


def test_a_baseline_that_cannot_be_says_why() -> None:
    def reason(model: str, name: str, **options: Any) -> str:
        baseline = best_of_baseline(name, space(model), CASES[model], Demands(**options))
        assert isinstance(baseline, Missing)
        return baseline.reason

    assert "base_model_tp_plan" in reason("tiny-gpt2", "transformers tp")
    assert "base_model_pp_plan" in reason("conv", "transformers pp")
    assert "GiB" in reason("tiny-llama", "ddp", memory_limit=1000.0)
    with pytest.raises(ValueError, match="unknown baseline 'expert'"):
        baseline_named("expert")


def test_chunks_begin_where_they_are_cut() -> None:
    assert as_assignment([1, 4, 1], [2, 4]) == (
        ((0, 0, 1), (1, 0, 1)),
        ((1, 0, 2),),
        ((1, 0, 1), (2, 0, 1)),
    )


def test_plainer_versions_have_one_stage_and_fit() -> None:
    planner = Search(space("tiny-llama").level_one(None, CASES["tiny-llama"]), CASES["tiny-llama"], Demands())
    solution = planner.run().solutions[0]
    versions = list(plainer(solution))
    assert versions
    for version in versions:
        problem, assignment = version.problem, version.stages.assignment
        used = [(run, choice) for groups in assignment or () for run, choice, _ in groups]
        divisible = [(run, choice) for run, choice in used if len({c.label[1] for c in problem.runs[run].choices}) > 1]
        assert len({problem.runs[run].choices[choice].label[1] for run, choice in divisible}) == 1
        step = as_step(problem, assignment or ())
        assert fits(problem, step_memory(step))
        assert version.seconds == step_seconds(step).total


def test_a_solution_is_also_played_under_the_other_schedule_of_whole_backwards() -> None:
    demands = read_demands(fix={"pp": 2, "num_microbatches": 4, "schedule": "gpipe"})
    cluster = CASES["tiny-llama"]
    solution = Search(space("tiny-llama").level_one(None, cluster), cluster, demands).run().solutions[0]
    (other,) = in_other_orders(solution, Demands())
    steps = [as_step(each.problem, each.assignment) for each in (solution, other)]
    assert [each.candidate.schedule for each in (solution, other)] == ["gpipe", "1f1b"]
    assert other.seconds == step_seconds(steps[1]).total <= step_seconds(steps[0]).total == solution.seconds
    assert step_memory(steps[1])[0] < step_memory(steps[0])[0]
    assert not list(in_other_orders(solution, demands))  # which has been asked for
    few = read_demands(fix={"pp": 2, "num_microbatches": 1})
    alone = Search(space("tiny-llama").level_one(None, cluster), cluster, few).run().solutions[0]
    assert not list(in_other_orders(alone, Demands()))  # 1F1B needs a micro-batch for each rank
