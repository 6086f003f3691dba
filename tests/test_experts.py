"""Experts as models write them: one operator with independent rows, trained in parallel as on one device."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch

import planner
import runtime.kernels  # noqa: F401  (registers the fused operators)
from passes.capture import capture
from passes.capture.interpret import interpret
from passes.fuse import fuse
from passes.ir.errors import CaptureError
from passes.ir.graph import State
from passes.rules.expert_rules import is_experts
from tests.cells import cells
from tests.expert_families import (
    ByHand,
    CapacityLoop,
    CountingLoop,
    ExpertLoop,
    SkippingLoop,
    SlotLoop,
    SplitLoop,
    family_batch,
    family_model,
)

pytestmark = pytest.mark.usefixtures("models_traced_once")

#: Operators that put rows in an order that depends on all samples.
MIXING = ("sort", "grouped_mm", "index_put", "bincount", "nonzero")
#: One spelling of each model, and what else only one of them has.
RECOGNISED = ("mixtral batched", "qwen3-moe", "deepseek-v3", "gpt-oss")


@pytest.mark.parametrize("name", RECOGNISED)
def test_experts_of_a_layer_are_one_operator_on_batch_and_sequence(name: str) -> None:
    graph = fuse(capture(family_model(name), kwargs=family_batch())).graph
    assert [node.output.shape for node in graph.nodes if is_experts(node)] == [(8, 6, 16)] * 2
    assert not [node.op for node in graph.nodes if any(word in node.op for word in MIXING)]


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("loops", [(8, 6, 16)] * 2),
        ("dense", [(8, 6, 16), (8, 6, 2, 16)]),
        ("dropping loops", [(8, 6, 16)] * 2),
        ("passing loop", [(8, 6, 16)] * 2),
        ("hit loop of a spare class", [(8, 6, 16)] * 2),
        ("splits", [(8, 6, 16)] * 3),
    ],
)
def test_loops_over_experts_and_experts_that_compute_all_tokens_are_one_operator_each(
    name: str, shapes: list[tuple[int, ...]]
) -> None:
    """Of the experts that were hit, and of all with masks; of rows that are cut by how many each expert has; of scores
    of zero behind the experts, and before them.

    Experts whose outputs no score of zero leaves out stay as they are.
    """
    model = family_model(name)
    graph = capture(model, kwargs=family_batch())
    assert [node.output.shape for node in fuse(graph).graph.nodes if is_experts(node)] == shapes
    for concentrated in (1.0, 5.0):  # of fewer experts some have no rows
        for layer in model.layers:  # type: ignore[union-attr]
            torch.nn.init.normal_(layer.gate.weight, std=concentrated)  # type: ignore[union-attr, arg-type]
        weights = dict(model.named_parameters())
        batch = family_batch(batch=8, length=6)
        inputs = {value.name: batch[str(path[0])] for value, path in zip(graph.inputs, graph.input_paths)}
        assert graph.loss is not None
        found = interpret(graph, inputs, functools.partial(_weight, weights))[graph.loss]
        expected = model(**batch)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        gradients = [torch.autograd.grad(loss, [*weights.values()], allow_unused=True) for loss in (found, expected)]
        for one, other, weight in zip(*gradients, weights.values()):
            zero = torch.zeros_like(weight)
            torch.testing.assert_close(one if one is not None else zero, other if other is not None else zero)


def _weight(weights: Mapping[str, torch.Tensor], state: State) -> torch.Tensor:
    return weights[state.path]


@pytest.mark.parametrize("loop", [CountingLoop, SkippingLoop, SlotLoop, CapacityLoop])
def test_a_loop_over_experts_in_which_a_number_of_rows_decides_more_is_refused(loop: type[ExpertLoop]) -> None:
    says = r"'layers.0' .*torch.where\(chosen == index\): .*that the program leaves open: how many"
    with pytest.raises(CaptureError, match=says):
        capture(ByHand(loop, layers=1), kwargs=family_batch())


class WrongSliceLoop(SplitLoop):
    """An expert's rows are as many as its own, from the first row on."""

    def mixed(self, rows: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        sizes = self.counts(chosen).tolist()
        outputs = [expert(rows[: size % len(rows)]) for expert, size in zip(self.experts, sizes)]
        return rows + torch.cat(outputs).sum(0)


class SharedSplitLoop(SplitLoop):
    """What an expert gives is multiplied by how many rows it has."""

    def output(self, expert: torch.nn.Module, piece: torch.Tensor, size: int) -> Any:
        return expert(piece) * size


@pytest.mark.parametrize("loop", [SharedSplitLoop, WrongSliceLoop])
def test_how_many_rows_an_expert_has_may_only_cut_rows(loop: type[ExpertLoop]) -> None:
    says = r"sizes = self.counts\(chosen\).tolist\(\): .*that the program leaves open: how"
    with pytest.raises(CaptureError, match=says):
        capture(ByHand(loop, layers=1), kwargs=family_batch())


def test_rows_that_are_too_many_to_count_stay_in_place() -> None:
    with torch.device("meta"):
        model = family_model("deepseek-v3")
        ids = torch.zeros(1 << 22, 6, dtype=torch.int64)  # over 50 million rows of experts
    names = {node.op for node in capture(model, kwargs={"input_ids": ids, "labels": ids}).nodes}
    assert not [op for op in names if any(word in op for word in (*MIXING, "new_empty"))]


@pytest.mark.parametrize(("mesh", "padding"), [({"dp": 2, "tp": 2}, 0), ({"pp": 1, "dp": 2}, 3)])
def test_a_load_balancing_loss_is_that_of_the_global_batch(mesh: dict[str, int], padding: int) -> None:
    """How many tokens chose each expert, of those that are no padding, is counted over all micro-batches before the
    step."""
    batch = family_batch()
    if padding:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][:padding, 4:] = 0
    report = planner.verify(family_model("mixtral batched"), mesh, batch=batch, steps=1, fix={"num_microbatches": 2})
    assert report.ok, report.table()


def test_a_product_of_means_that_both_have_gradients_is_refused_in_micro_batches() -> None:
    """It has another value on each micro-batch, and its gradient another factor."""

    def loss_fn(outputs: Any, batch: Any) -> torch.Tensor:
        importance = outputs.router_logits[0].softmax(-1).mean(0)
        return outputs.loss + importance.square().sum()

    says = (
        r"the model mixes the samples of a batch, so num_microbatches must be 1: aten.square.default in the model "
        r"itself or its loss needs mean_\d+ of all samples. .*square of a mean.*train with num_microbatches = 1"
    )
    with pytest.raises(ValueError, match=says):
        planner.verify(
            family_model("mixtral"), "dp=2,ep=2", batch=family_batch(), loss_fn=loss_fn, fix={"num_microbatches": 2}
        )


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    cells(
        [
            ("gpt-oss", {"ep": 2, "tp": 2}, {"fix": {"zero": 3, "recompute": "selective"}}),
            # experts are cut over tp, too, whose ranks send what goes to their own: as many tokens as routing says
            ("deepseek-v3", {"ep": 2, "tp": 2}, {}),
            ("dropping loops", {"ep": 2, "pp": 2}, {"fix": {"num_microbatches": 2}}),
        ],
        [
            ("loop", {"ep": 2, "tp": 2}, {}),
            ("qwen3-moe", {"ep": 2, "tp": 2}, {"fix": {"zero": 3, "recompute": "selective"}}),
        ],
    ),
)
def test_experts_train_as_on_one_device(name: str, mesh: dict[str, int], options: dict[str, Any]) -> None:
    """What is gathered again for the backward pass is counted, too: tokens and ids that travelled are not.

    Tokens that are dropped do not travel: exchanges may carry less than planned.
    """
    report = planner.verify(family_model(name), mesh, batch=family_batch(), steps=1, **options)
    assert report.ok, report.table()
    assert report.tolerance == (1e-5 if "dtype" in options else 1e-9)
