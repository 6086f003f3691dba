"""The parallel module, on every rank of a mesh in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import planner
from passes.capture import capture
from passes.ir.graph import Graph
from passes.ir.types import MeshShape
from passes.plan import Plan
from planner.compilation import parallelise
from planner.planning import as_cluster, plan_graph
from runtime.execution.rank_mapping import VirtualPlaces
from runtime.mesh.communication_counter import CommunicationCounter
from runtime.mesh.layout import VirtualLayout, virtual_ranks
from runtime.module.parallel_module import ParallelModule
from tests.small_models import Mlp, TiedClassifier, mlp_batch, seeded, squared_error, token_batch

pytestmark = pytest.mark.usefixtures("models_traced_once")

DP_TP = "dp=2,tp=2"


class Planner:
    """Plans as compile does, and counts how often."""

    def __init__(self, mesh: str, **options: Any) -> None:
        self.mesh = MeshShape.parse(mesh)
        self.options = options
        self.calls: list[Plan | None] = []

    def __call__(self, graph: Graph, pinned: Plan | None) -> Plan:
        self.calls.append(pinned)
        cluster = as_cluster(None, num_devices=self.mesh.num_devices)
        return plan_graph(graph, cluster, mesh=self.mesh, pinned=pinned, forbid_replicated_matmul=True, **self.options)


@contextmanager
def sharded(
    model: nn.Module, mesh: str = DP_TP, *, loss_fn: Callable[..., Any] | None = None, **options: Any
) -> Iterator[tuple[ParallelModule, Planner, VirtualLayout]]:
    planner = Planner(mesh, **options)
    with virtual_ranks(planner.mesh) as layout:
        places = VirtualPlaces(layout)
        yield parallelise(copy.deepcopy(model), places, plan=None, planner=planner, loss_fn=loss_fn), planner, layout


def joined(output: torch.Tensor, layout: VirtualLayout) -> torch.Tensor:
    return layout.join(output, ("I",) * len(layout.mesh.names))


BATCH_PINS = {"input:*": {"dp": "S(0)"}}


def test_names_and_shapes_of_parameters_are_the_originals() -> None:
    model = seeded(TiedClassifier)
    with sharded(model) as (parallel, _, _):
        parallel(**token_batch())
        assert [name for name, _ in parallel.named_parameters()] == [name for name, _ in model.named_parameters()]
        assert parallel.embedding.weight is parallel.output.weight
        whole = parallel.full_state_dict()
    assert list(whole) == list(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(whole[name], tensor)


def test_optimizer_made_before_the_first_call_trains_the_shards() -> None:
    model = seeded(Mlp)
    batch = mlp_batch()
    with sharded(model, "tp=2", loss_fn=squared_error) as (parallel, _, layout):
        parallel(*batch).loss.backward()
        gradients = parallel.full_gradients()
        with layout.plain():
            squared_error(model(batch[0]), batch).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-12)


def test_frozen_parameters_stay_frozen_and_unused_ones_stay() -> None:
    with sharded(seeded(TiedClassifier)) as (parallel, _, _):
        parallel(**token_batch()).loss.backward()
        assert not parallel.scale.requires_grad and parallel.scale.grad is None
        assert parallel.unused.weight.grad is None
        parallel.scale.requires_grad_(True)
        with pytest.raises(ValueError, match="frozen"):
            parallel(**token_batch())


def test_layers_that_repeat_may_end_in_one_without_weights() -> None:
    """The block of a copy (linear, activation) names both, and only the first has weights."""

    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(9, 8)
            self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.layers(self.embedding(tokens)).square().mean()

    model, tokens = seeded(Tower), torch.arange(8).reshape(4, 2)
    parallel = planner.compile(copy.deepcopy(model), "dp=1", example_inputs=(tokens,))
    assert "w0, w1 = self.weights" in parallel.source
    loss = model(tokens)
    loss.backward()
    torch.testing.assert_close(parallel.train_step(tokens), loss.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parallel.full_gradients()[name], parameter.grad)


def test_other_shapes_use_the_same_plan_without_a_search() -> None:
    model = seeded(TiedClassifier)
    with sharded(model) as (parallel, planner, layout):
        parallel(**token_batch(batch=8))
        for batch in (token_batch(batch=4), token_batch(length=10), token_batch(batch=8)):
            loss = joined(parallel(**batch).loss, layout)
            with layout.plain():
                torch.testing.assert_close(loss, model(**batch)["loss"].detach(), rtol=1e-9, atol=0)
        parallel.eval()
        with torch.no_grad():
            logits = parallel(token_batch()["tokens"])["logits"]
        with layout.plain():
            torch.testing.assert_close(joined(logits, layout), model(token_batch()["tokens"])["logits"].detach())
        assert planner.calls == [None]


def test_gradients_accumulate() -> None:
    model = seeded(TiedClassifier)
    with sharded(model) as (parallel, _, layout):
        for seed in (1, 2):
            parallel(**token_batch(seed=seed)).loss.backward()
            with layout.plain():
                model(**token_batch(seed=seed))["loss"].backward()
        gradients = parallel.full_gradients()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-15)


def test_sharded_outputs_are_gathered_on_access_and_differentiable() -> None:
    model = seeded(TiedClassifier)
    pins = {"output:logits": {"tp": "S(2)"}}
    with sharded(model, "tp=2", constraints=pins) as (parallel, _, layout):
        outputs = parallel(**token_batch())
        assert isinstance(outputs, dict)
        assert set(outputs) == {"loss", "logits"}
        (outputs["logits"] ** 2).mean().backward()
        gradients = parallel.full_gradients()
        with layout.plain():
            reference = model(**token_batch())
            (reference["logits"] ** 2).mean().backward()
        torch.testing.assert_close(joined(outputs.logits, layout), reference["logits"].detach(), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(joined(outputs[0], layout), reference["loss"].detach(), rtol=1e-9, atol=0)
        with pytest.raises(AttributeError, match="no 'hidden', only loss, logits"):
            _ = outputs.hidden
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-15)


class LossAndLogits(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


class NamedOutputs(TiedClassifier):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return LossAndLogits(**super().forward(*args, **kwargs))


@pytest.mark.parametrize(
    "logits_of", [lambda outputs: outputs[1], lambda outputs: outputs.logits], ids=["place", "name"]
)
def test_named_tuples_of_sharded_outputs_are_gathered_by_place_and_by_name(logits_of: Any) -> None:
    model = seeded(NamedOutputs)
    with sharded(model, "tp=2", constraints={"output:logits": {"tp": "S(2)"}}) as (parallel, _, layout):
        logits = logits_of(parallel(**token_batch()))
        with layout.plain():
            expected = model(**token_batch()).logits
        torch.testing.assert_close(joined(logits, layout), expected.detach(), rtol=1e-9, atol=1e-12)


class ListedScales(nn.Module):
    """Layers whose scales stand in a list of parameters beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.scales = nn.ParameterList(nn.Parameter(torch.rand(8)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, scale in zip(self.layers, self.scales):
            x = x + layer(x).tanh() * scale
        return x.square().mean()


@pytest.mark.parametrize("options", [{}, {"fix": {"dp": 1}}], ids=["mesh", "step"])
def test_parameters_in_lists_are_found_by_their_number(options: dict[str, Any]) -> None:
    model, x = seeded(ListedScales), torch.rand(4, 8, dtype=torch.float64)
    parallel = planner.compile(model, "dp=1", example_inputs={"x": x}, **options)
    loss, gradients = parallel.train_step(x=x), parallel.full_gradients()
    expected = model(x)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-12)


def test_inputs_that_a_planner_pins_but_cannot_cut_are_refused() -> None:
    with sharded(seeded(TiedClassifier), "dp=4", constraints=BATCH_PINS) as (parallel, _, _):
        parallel(**token_batch(batch=8))
        with pytest.raises(ValueError, match=r"cannot be met by 'input:tokens'"):
            parallel(**token_batch(batch=6))


def test_state_dict_round_trip_and_its_errors() -> None:
    model, other = seeded(TiedClassifier), seeded(TiedClassifier)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    with sharded(model) as (parallel, _, layout):
        parallel(**token_batch())
        parallel.load_full_state_dict(other.state_dict())
        loss = joined(parallel(**token_batch()).loss, layout)
        with layout.plain():
            torch.testing.assert_close(loss, other(**token_batch())["loss"].detach(), rtol=1e-9, atol=0)
        state = dict(other.state_dict())
        del state["middle.bias"]
        with pytest.raises(ValueError, match=r"missing 'middle.bias', unknown none"):
            parallel.load_full_state_dict(state)
        with pytest.raises(ValueError, match=r"'middle.bias' has shape \[4\]"):
            parallel.load_full_state_dict(state | {"middle.bias": torch.zeros(4)})


def test_own_samples_are_refused_where_the_plan_cuts_no_batch() -> None:
    with sharded(seeded(TiedClassifier), "dp=2", constraints={"input:*": {"dp": "R"}}) as (parallel, _, _):
        parallel(**token_batch())
        with pytest.raises(ValueError, match="the plan cuts no input over dp"):
            parallel(**token_batch(), local_inputs=True)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean() + torch.tanh(y.cumsum(0)).mean()


@pytest.mark.parametrize("placement", ["R", "S(1)"])
def test_own_samples_are_refused_where_the_plan_cuts_something_else(placement: str) -> None:
    pins = {"input:x": {"dp": "S(0)"}, "input:y": {"dp": placement}}
    with sharded(seeded(TwoInputs), "dp=2", constraints=pins) as (parallel, _, _):
        batch = {"x": torch.ones(4, 4, dtype=torch.float64), "y": torch.ones(4, 6, dtype=torch.float64)}
        parallel(**batch)
        with pytest.raises(ValueError, match=r"of input 'y' \(shape \[2, 6\], planned for \[4, 6\]\) the plan"):
            parallel(**{name: tensor[:2] for name, tensor in batch.items()}, local_inputs=True)


class OddKeys(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[Any, Any]:
        hidden = self.linear(x)
        return {"loss": hidden.mean(), "layers.0": hidden, 3: {"a.b": [hidden * 2]}}


def test_outputs_are_gathered_by_any_key() -> None:
    model, x = seeded(OddKeys), torch.ones(4, 4, dtype=torch.float64)
    pins = {"input:x": {"dp": "S(0)"}, "output:layers.0": {"dp": "S(0)"}, "output:3.a.b.0": {"dp": "S(0)"}}
    with sharded(model, "dp=2", constraints=pins) as (parallel, _, layout):
        outputs = parallel(x)
        assert torch.equal(joined(outputs["layers.0"], layout), model(x)["layers.0"])
        assert torch.equal(joined(outputs[3]["a.b"][0], layout), model(x)[3]["a.b"][0])


def test_outputs_of_one_name_are_refused() -> None:
    class Ambiguous(OddKeys):
        def forward(self, x: torch.Tensor) -> dict[Any, Any]:
            return {"a.b": self.linear(x), "a": {"b": x}}

    with pytest.raises(ValueError, match=r"two outputs, at \['a.b'\] and at \['a', 'b'\], are both 'a.b'"):
        capture(Ambiguous(), args=(torch.ones(4, 4),))


def test_local_inputs_give_the_same_loss() -> None:
    with sharded(seeded(TiedClassifier), "dp=2", constraints=BATCH_PINS) as (parallel, _, layout):
        batch = token_batch()
        whole = joined(parallel(**batch).loss, layout)
        placements = {name: parallel.plan.inputs[name].placement for name in batch}
        local = {name: layout.split(tensor, placements[name]) for name, tensor in batch.items()}
        assert torch.equal(joined(parallel(**local, local_inputs=True).loss, layout), whole)


def test_without_data_ranks_every_rank_passes_the_whole_batch() -> None:
    pins = {"input:tokens": {"tp": "S(0)"}, "input:labels": {"tp": "R"}}
    with sharded(seeded(TiedClassifier), "tp=2", constraints=pins) as (parallel, _, layout):
        whole = joined(parallel(**token_batch()).loss, layout)
        assert torch.equal(joined(parallel(**token_batch(), local_inputs=True).loss, layout), whole)


def test_collectives_are_as_planned() -> None:
    with sharded(seeded(TiedClassifier)) as (parallel, _, layout):
        parallel(**token_batch())
        with CommunicationCounter(layout.device_mesh) as counter:
            parallel(**token_batch()).loss.backward()
        assert set(counter.collectives) == {entry for entry in parallel.plan.collectives if entry.count}


def test_bfloat16_trains() -> None:
    model = seeded(TiedClassifier).bfloat16()
    with sharded(model) as (parallel, _, layout):
        loss = parallel(**token_batch()).loss
        loss.backward()
        assert all(
            parameter.grad.dtype == torch.bfloat16 for parameter in parallel.parameters() if parameter.grad is not None
        )
        with layout.plain():
            torch.testing.assert_close(
                joined(loss, layout).float(), model(**token_batch())["loss"].detach().float(), rtol=2e-2, atol=0
            )


def test_meta_models_are_initialised_alike_on_every_mesh() -> None:
    states = []
    for mesh in ("tp=2", "dp=4"):
        with torch.device("meta"):
            model = Mlp()
        with sharded(model, mesh, loss_fn=squared_error) as (parallel, _, _):
            batch = tuple(tensor.float() for tensor in mlp_batch())
            with pytest.raises(ValueError, match=r"meta device.*load_full_state_dict"):
                parallel(*batch)
            parallel.initialise(seed=7)
            parallel(*batch).loss.backward()
            states.append(parallel.full_state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert float(states[0]["first.weight"].std()) > 0


class Scaled(nn.Module):
    """A linear layer between two buffers that no state dict holds; its own code computes only one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 8)
        self.register_buffer("scale", torch.linspace(1.0, 2.0, 16), persistent=False)
        self.register_buffer("kept", torch.tensor([1, 0, 1, 1, 0, 1, 1, 1]), persistent=False)

    def reset_parameters(self) -> None:
        self.scale.copy_(torch.linspace(1.0, 2.0, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * self.scale) * self.kept


def test_buffers_outside_of_the_state_dict_are_computed_or_asked_for() -> None:
    """After weights are loaded into a model on meta; never left as whatever stood in memory."""
    model, batch = Scaled(), tuple(tensor.float() for tensor in mlp_batch())
    with torch.device("meta"):
        empty = Scaled()
    with sharded(empty, "tp=2", loss_fn=squared_error) as (parallel, _, layout):
        parallel.load_full_state_dict(model.state_dict())
        with pytest.raises(ValueError, match=r"'kept' still on.* no file holds .*state_dict\(\{'kept': value"):
            parallel(*batch)
        parallel.load_full_state_dict({"kept": model.kept}, strict=False)
        loss = parallel(*batch).loss
        with layout.plain():
            torch.testing.assert_close(joined(loss, layout), squared_error(model(batch[0]), batch).detach())


def test_a_changed_dtype_is_refused() -> None:
    with sharded(seeded(Mlp), "tp=2") as (parallel, _, _), pytest.raises(ValueError, match="keeps the dtypes"):
        parallel.half()


def test_plan_and_source_are_there_after_the_first_call() -> None:
    with sharded(seeded(Mlp), "tp=2", loss_fn=squared_error) as (parallel, _, _):
        with pytest.raises(ValueError, match="first call"):
            _ = parallel.plan
        with pytest.raises(ValueError, match="first call"):
            _ = parallel.source
        parallel(*mlp_batch())
        assert "class Residual(Block):  # layers.{0..2}" in parallel.source
        assert parallel.plan.mesh == MeshShape(("tp",), (2,))


def test_training_after_a_first_call_without_gradients() -> None:
    """A plan made in evaluation keeps its shards; the operators of the training step are chosen anew."""
    model = seeded(Mlp)
    batch = mlp_batch()
    with sharded(model, "dp=2,tp=2") as (parallel, _, layout):
        parallel.eval()
        with torch.no_grad():
            parallel(batch[0])
        parallel.train()
        output = parallel(batch[0])
        squared_error(output, batch).backward()
        gradients = parallel.full_gradients()
        with layout.plain():
            squared_error(model(batch[0]), batch).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-12)
