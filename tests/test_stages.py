"""Steps cut into micro-batches and pipeline chunks: what each chunk's program takes, gives and computes."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import planner
from passes.capture import capture, keep_float64
from passes.emit import emit
from passes.fuse import fuse
from passes.ir.graph import Graph
from passes.pipeline_cut import StageGraph, StepPrograms, step_programs
from passes.plan import Plan
from passes.shard import PlanMismatch
from planner.compilation import parallelise
from planner.library import load_config
from planner.planning import capture_for_planning
from planner.verification.verify_model import slow_devices
from planner.whole_step.candidates.demands import read_demands
from planner.whole_step.plan_step import plan_step
from runtime.execution.rank_mapping import VirtualPlaces
from runtime.mesh.layout import virtual_ranks
from tests import stage_models as models
from tests.small_models import seeded

pytestmark = pytest.mark.usefixtures("models_traced_once")

#: Models that can be run in micro-batches, by what is special about them.
ADDITIVE: dict[str, type[nn.Module]] = {
    "mean": models.Chain,
    "sum": models.SumLoss,
    "number of samples as a constant": models.SumOverBatchSize,
    "penalty on weights": models.WeightPenalty,
    "penalty on weights of repeated blocks": models.PenalisedMlp,
    "weight of the loss that is trained": models.LearntWeight,
    "weighted mean": models.MeanOverWeights,
    "frozen first and last": models.Frozen,
    "skip connections": models.Skip,
    "constants with a batch dim": models.Positions,
    "one layer used again and again": models.SharedLayers,
    "several inputs": models.TwoInputs,
    "an input selected between layers": models.SelectedBetweenLayers,
}
#: Models whose samples depend on each other.
MIXING: dict[str, type[nn.Module]] = {"root of a mean": models.RootMeanSquare, "batch norm": models.Normalised}


def plan_of(build: type[nn.Module], **fix: Any) -> Plan:
    sizes = {"pp": 1, "dp": 1, "cp": 1, "tp": 1}
    sizes |= {axis: size for axis, size in fix.items() if axis in sizes}
    devices = slow_devices(sizes["pp"] * sizes["dp"] * sizes["cp"] * sizes["tp"])
    model = seeded(build)
    layout_options = {**sizes, "recompute": "none", "zero": 0, **fix}
    with keep_float64():
        return planner.plan(model, devices, example_inputs=models.batch_of(model), fix=layout_options)


def graph_of(build: type[nn.Module]) -> Graph:
    model = seeded(build)
    with keep_float64():
        return fuse(capture(model, kwargs=models.batch_of(model))).graph


@functools.cache
def programs(build: type[nn.Module], *, pp: int = 2, num_microbatches: int = 4) -> StepPrograms:
    return step_programs(graph_of(build), plan_of(build, pp=pp, num_microbatches=num_microbatches))


def names(locals_: Any) -> list[str]:
    return [local.value.name for local in locals_]


def inputs_of(stage: StageGraph) -> list[str]:
    """Inputs of the model that a chunk takes."""
    return [str(path[0]) for path in stage.sharded.graph.input_paths if path[0] not in ("received", "total")]


def states_of(stage: StageGraph) -> set[str]:
    return {state.path for state in stage.sharded.graph.states}


# -- what the programs are -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mean", "sum", "number of samples as a constant", "penalty on weights"])
def test_what_is_known_from_shapes_needs_no_totals(name: str) -> None:
    parts = programs(ADDITIVE[name])
    assert parts.totals is None and parts.num_microbatches == 4


@pytest.mark.parametrize(("name", "taken"), [("weighted mean", ["target"]), ("several inputs", ["importance"])])
def test_what_is_known_from_inputs_is_a_total_of_the_whole_batch(name: str, taken: list[str]) -> None:
    parts = programs(ADDITIVE[name])
    assert parts.totals is not None
    assert [str(path[0]) for path in parts.totals.graph.input_paths] == taken
    (placement,) = parts.totals.output_placements.values()
    assert placement[0] == "P"
    totals = [path for stage in parts.stages for path in stage.sharded.graph.input_paths if path[0] == "total"]
    assert totals == [("total", name) for name in parts.totals.graph.outputs]


def test_every_chunk_takes_only_the_inputs_and_weights_that_it_uses() -> None:
    first, last = programs(models.TwoInputs).stages
    assert inputs_of(first) == ["x", "other"] and inputs_of(last) == ["importance", "target"]
    assert states_of(first) == {"left.weight", "left.bias", "right.weight", "right.bias"}
    assert states_of(last) == {"both.weight", "both.bias"}


def test_what_crosses_a_cut_is_received_as_it_was_sent() -> None:
    for build in ADDITIVE.values():
        stages = programs(build).stages
        assert stages[0].received == ()
        for before, behind in itertools.pairwise(stages):
            assert before.sent == behind.received and before.sent


def test_a_skip_connection_passes_through_the_chunks_between() -> None:
    stages = programs(models.Skip, pp=4).stages
    assert [len(stage.received) for stage in stages] == [0, 2, 2, 2]
    assert all("first" in names(stage.received) for stage in stages[1:])
    assert [inputs_of(stage) for stage in stages] == [["x"], [], [], ["x", "target"]]


def test_positions_are_made_where_they_are_used_and_not_sent() -> None:
    first, last = programs(models.Positions).stages
    assert len(first.sent) == 1 and len(last.received) == 1
    assert "torch.arange" in emit(first.sharded).source and "torch.arange" not in emit(last.sharded).source


def test_a_penalty_on_weights_is_counted_once() -> None:
    """By one of all ranks and micro-batches, in the chunk of the loss."""
    last = programs(models.WeightPenalty).stages[-1]
    assert "first.weight" in states_of(last)
    assert "ops.of_first_microbatch" in emit(last.sharded).source


def test_layers_that_share_weights_are_units_of_their_own() -> None:
    stages = programs(models.SharedLayers).stages
    users = [stage.index for stage in stages for unit in stage.units if "layer.up.weight" in unit_paths(unit)]
    assert len(users) == 4 and len(set(users)) > 1


def unit_paths(unit: Any) -> list[str]:
    return [full for _, _, full in unit.states]


def test_outputs_of_an_earlier_chunk_are_handed_on_to_the_last() -> None:
    plan = plan_of(models.Chain, pp=2, num_microbatches=4)
    parts = step_programs(graph_of(models.Chain), plan, num_microbatches=1, outputs=("loss", "y", "hidden"))
    assert len(parts.stages[-1].received) == 2
    assert set(parts.stages[-1].sharded.output_placements) == {"loss", "y", "hidden"}
    alone = step_programs(graph_of(models.Chain), plan)
    assert len(alone.stages[-1].received) == 1 and set(alone.stages[-1].sharded.output_placements) == {"loss"}


@pytest.mark.parametrize("name", ["tiny-t5", "tiny-gpt2"])
def test_a_call_has_its_weights_where_training_has_them(name: str) -> None:
    """Also where weights are converted before the first operator of a chunk."""
    graph = fuse(capture_for_planning(load_config(name), batch_size=8, seq_len=12)).graph
    demands = read_demands({"pp": 2, "tp": 2, "num_microbatches": 4, "schedule": "zb_h1", "recompute": "none"})
    plan = plan_step(graph, slow_devices(4), demands)
    training = step_programs(graph, plan)
    call = step_programs(graph, plan, num_microbatches=1, outputs=tuple(graph.outputs), like=training)
    for stage, trained in zip(call.stages, training.stages, strict=True):
        used = {path for unit in stage.units for path in unit_paths(unit)}
        assert used and used <= {path for unit in trained.units for path in unit_paths(unit)}


def test_what_is_no_sum_over_samples_is_refused() -> None:
    """A plan with one micro-batch, run with more."""
    for build in MIXING.values():
        plan = plan_of(build, num_microbatches=1)
        with pytest.raises(ValueError, match="num_microbatches=1"):
            step_programs(graph_of(build), plan, num_microbatches=4)


def test_a_weight_that_only_a_total_needs_is_refused() -> None:
    """It would be gathered for no unit of the step; frozen, it is data."""
    with pytest.raises(ValueError, match=r"'gate\.weight' is needed for a total of the whole batch alone"):
        step_programs(graph_of(models.Gated), plan_of(models.Gated, pp=2, num_microbatches=4))
    assert programs(models.FrozenGate).counting


def test_outputs_that_are_no_sums_are_refused() -> None:
    with pytest.raises(ValueError, match="'y' is no sum over samples"):
        step_programs(graph_of(models.Chain), plan_of(models.Chain, num_microbatches=4), outputs=("loss", "y"))


def test_a_plan_of_other_stages_is_refused() -> None:
    with pytest.raises((PlanMismatch, ValueError)):
        step_programs(graph_of(models.Skip), plan_of(models.Chain, pp=2))


# -- what the planner makes of them --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MIXING)
def test_samples_that_depend_on_each_other_are_planned_in_one_micro_batch(name: str) -> None:
    with pytest.raises(ValueError, match="num_microbatches must be 1"):
        plan_of(MIXING[name], num_microbatches=2)
    free = plan_of(MIXING[name], dp=2)
    assert free.step is not None and free.step.num_microbatches == 1


def test_an_output_beside_the_loss_does_not_forbid_micro_batches() -> None:
    class Reports(models.Chain):
        """A root mean square that is looked at, and not trained on."""

        def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
            outputs = super().forward(x, target)
            return {**outputs, "error": torch.sqrt(outputs["loss"])}

    plan = plan_of(Reports, num_microbatches=4)
    report = planner.verify(seeded(Reports), plan, batch=models.batch_of(seeded(Reports)))
    assert report.ok, report.table()


# -- what they compute ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ADDITIVE)
def test_four_micro_batches_compute_what_one_device_does(name: str) -> None:
    """In two chunks."""
    check(ADDITIVE[name], pp=2, num_microbatches=4)


@pytest.mark.parametrize("name", ["penalty on weights of repeated blocks", "one layer used again and again"])
def test_weights_that_are_used_in_several_places_may_be_sharded(name: str) -> None:
    check(ADDITIVE[name], pp=2, dp=2, num_microbatches=2, zero=3, recompute="full")


def test_a_penalty_is_counted_once_on_several_ranks() -> None:
    check(models.WeightPenalty, dp=2, tp=2, num_microbatches=2, zero=2)


@pytest.mark.parametrize("name", MIXING)
def test_models_whose_samples_depend_on_each_other_run_in_one(name: str) -> None:
    check(MIXING[name], pp=2, dp=2, num_microbatches=1)


def check(build: type[nn.Module], **fix: Any) -> None:
    model = seeded(build)
    report = planner.verify(model, plan_of(build, **fix), batch=models.batch_of(model), steps=1)
    assert report.ok, report.table()


def test_a_call_gives_the_outputs_of_every_chunk() -> None:
    model = seeded(models.Chain)
    batch = models.batch_of(model)
    expected = model(**batch)
    plan = plan_of(models.Chain, pp=2, num_microbatches=4)
    with keep_float64(), virtual_ranks(plan.mesh) as layout, torch.no_grad():
        places = VirtualPlaces(layout, num_stages=2)
        parts = parallelise(seeded(models.Chain), places, plan=plan, example_inputs=batch)(**batch)
        whole = {name: layout.join(parts[name], ("R", "R", "R")) for name in expected}
    for name, tensor in expected.items():
        torch.testing.assert_close(whole[name], tensor.detach(), rtol=1e-12, atol=1e-12)


class Policy(nn.Module):
    """Returns a parameter as it is, as policies return the logarithm of their spread."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)
        self.log_spread = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.second(torch.tanh(self.first(x))), self.log_spread


def test_a_parameter_may_be_an_output() -> None:
    model, x = seeded(Policy), torch.randn(4, 4, dtype=torch.float64)
    parallel = planner.compile(seeded(Policy), "pp=1,dp=1", example_inputs=(x,))
    for module in (model, parallel):
        mean, log_spread = module(x)
        ((mean * log_spread.exp()).square().mean() + log_spread.sum()).backward()
    for name, gradient in parallel.full_gradients().items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad)
    assert len(parallel.full_gradients()) == 5


class CallsBack(models.Chain):
    """Without a target, the first layer is run once more behind the last."""

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if target is not None:
            return super().forward(x, target)
        return {"y": self.first(self.third(torch.tanh(self.second(torch.tanh(self.first(x))))))}


def test_a_call_whose_weights_are_trained_in_an_earlier_chunk_is_refused() -> None:
    model = seeded(CallsBack)
    batch = models.batch_of(model)
    plan = plan_of(CallsBack, pp=2, num_microbatches=4)
    with keep_float64(), virtual_ranks(plan.mesh) as layout, torch.no_grad():
        parallel = parallelise(model, VirtualPlaces(layout, num_stages=2), plan=plan, example_inputs=batch)
        with pytest.raises(ValueError, match=r"'first\.\w+' in pipeline chunk 2, which training does not"):
            parallel(x=batch["x"])


def assert_calls_are_one_devices(build: type[nn.Module], output: str, **fix: Any) -> None:
    """A call without a target, whose parts are joined, gives ``output`` as one device does."""
    model = seeded(build)
    batch = models.batch_of(model)
    expected = model(x=batch["x"])[output].detach()
    plan = plan_of(build, pp=2, **fix)
    with keep_float64(), virtual_ranks(plan.mesh) as layout, torch.no_grad():
        parallel = parallelise(model, VirtualPlaces(layout, num_stages=2), plan=plan, example_inputs=batch)
        parts = parallel(x=batch["x"])[output]
        torch.testing.assert_close(layout.join(parts, ("R", "R", "R")), expected, rtol=1e-12, atol=1e-12)


class Scales(models.Chain):
    """Without a target, what comes out is multiplied by numbers that training does not have."""

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if target is not None:
            return super().forward(x, target)
        y = self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return {"y": y * torch.tensor([0.5 + place for place in range(y.shape[-1])], dtype=y.dtype)}


def test_a_call_may_have_literals_that_training_does_not() -> None:
    assert_calls_are_one_devices(Scales, "y", num_microbatches=4)


class TiedEnds(models.Chain):
    """The last layer has the first one's weight, and a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.third.weight = self.first.weight

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        y = self.third(torch.tanh(self.first(x)))
        return {"y": y} if target is None else {"loss": self.loss(y, target)}


def test_a_tied_weight_is_used_in_the_chunk_that_has_the_others_of_its_operator() -> None:
    assert_calls_are_one_devices(TiedEnds, "y", num_microbatches=2)


class AlsoShares(models.Chain):
    """Without a target, what comes out is normalised: operators that training does not have."""

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if target is not None:
            return super().forward(x, target)
        y = self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return {"shares": torch.softmax(y, dim=-1)}


def test_a_call_may_have_operators_that_training_does_not() -> None:
    assert_calls_are_one_devices(AlsoShares, "shares", dp=2, num_microbatches=2)
