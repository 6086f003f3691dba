"""Embedding bags, losses with a mean inside, recurrent layers: as torch computes them, and cut where they can be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from passes.capture import capture
from passes.ir.graph import Graph
from passes.rules import rule_for
from tests.capture_parity import assert_parity

pytestmark = pytest.mark.usefixtures("models_traced_once")

ROWS, WIDTH = 10, 4


class Bags(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(ROWS, WIDTH, **options).double()

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        indices, offsets, weights = (*inputs, None, None)[:3]
        return self.table(indices, offsets, weights).square().sum()


RECTANGLE = torch.tensor([[1, 2, 2, 9], [0, 3, 3, 3], [5, 1, 7, 0]])
#: Bags of unlike lengths, one of them empty.
FLAT, OFFSETS = torch.tensor([1, 2, 2, 9, 0, 3]), torch.tensor([0, 2, 2, 5])
WEIGHTS = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("options", "inputs"),
    [
        *[({"mode": mode}, (RECTANGLE,)) for mode in ("sum", "mean", "max")],
        *[({"mode": mode, "padding_idx": 3}, (RECTANGLE,)) for mode in ("sum", "mean")],
        *[({"mode": mode}, (FLAT, OFFSETS)) for mode in ("sum", "mean")],
        ({"mode": "mean", "padding_idx": 2}, (FLAT, OFFSETS)),
        ({"mode": "sum", "include_last_offset": True}, (FLAT, torch.tensor([0, 2, 2, 6]))),
        ({"mode": "sum"}, (RECTANGLE, None, WEIGHTS)),
        ({"mode": "sum", "padding_idx": 3}, (RECTANGLE, None, WEIGHTS)),
        ({"mode": "sum"}, (FLAT, OFFSETS, WEIGHTS.flatten()[:6])),
    ],
)
def test_bags_are_look_ups_and_sums(options: dict[str, Any], inputs: tuple[Any, ...]) -> None:
    graph = assert_parity(Bags(**options), args=inputs)
    assert "aten.embedding.default" in [node.op for node in graph.nodes]
    assert unruled(graph) == []


def unruled(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes if not node.constant and rule_for(node, graph.values) is None]


class Recommender(nn.Module):
    """Tables for each categorical feature beside dense features, as DLRM has them."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(64, 8, mode="sum") for _ in range(2))
        self.dense, self.top = nn.Linear(4, 8), nn.Linear(24, 1)

    def forward(self, numbers: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        bags = [self.tables[0](indices[0].view(8, 2)), self.tables[1](indices[1], offsets)]
        return self.top(torch.cat([self.dense(numbers), *bags], dim=1)).square().mean()


@pytest.mark.parametrize("placement", ["S(0)", "S(1)"])
def test_tables_of_a_recommender_are_cut_by_rows_and_by_columns(placement: str) -> None:
    torch.manual_seed(0)
    batch = (torch.randn(8, 4), torch.randint(0, 64, (2, 16)), torch.tensor([0, 1, 4, 4, 8, 9, 12, 15]))
    pins = {"tables.*": {"tp": placement}}
    report = planner.verify(Recommender(), "tp=2", batch=batch, constraints=pins, steps=1)
    assert report.ok, report.table()


class Scores(nn.Module):
    def __init__(self, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.loss, self.linear = loss, nn.Linear(6, 4).double()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss(self.linear(x), y)


NUMBERS = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).softmax(-1)
CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: F.cross_entropy(x, y),
        lambda x, y: F.cross_entropy(x, y, label_smoothing=0.2, weight=CLASS_WEIGHTS),
        lambda x, y: F.cross_entropy(x, y, reduction="sum"),
        lambda x, y: F.cross_entropy(x.reshape(2, 4, 4), y.reshape(2, 4, 4), weight=CLASS_WEIGHTS),
        lambda x, y: F.cross_entropy(x[0], y[0]),
        lambda x, y: F.margin_ranking_loss(x, y, torch.sign(y - 0.2), margin=0.1),
        lambda x, y: F.triplet_margin_loss(x, y, y * 2),
        lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(8), reduction="sum"),
        lambda x, y: F.hinge_embedding_loss(x, torch.sign(y - 0.2)),
        lambda x, y: F.multi_margin_loss(x, y.argmax(1)),
        lambda x, y: F.binary_cross_entropy_with_logits(x, y, pos_weight=CLASS_WEIGHTS),
    ],
)
def test_losses_have_independent_samples(loss: Callable[..., torch.Tensor]) -> None:
    graph = assert_parity(Scores(loss), args=(NUMBERS, TARGETS))
    assert unruled(graph) == []


class Tagger(nn.Module):
    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)[0]).square().mean()


@pytest.mark.parametrize(
    ("layer", "width"),
    [(nn.LSTM(6, 8, 2, batch_first=True, bidirectional=True), 16), (nn.GRU(6, 8, batch_first=True), 8)],
)
def test_recurrent_layers_cut_their_batch(layer: nn.Module, width: int) -> None:
    torch.manual_seed(0)
    pins = {"input:*": {"dp": "S(0)"}}
    report = planner.verify(Tagger(layer, width), "dp=2", batch=(torch.randn(4, 3, 6),), constraints=pins, steps=1)
    assert report.ok, report.table()
    (recurrent,) = [node for node in report.plan.nodes.values() if node.op in ("aten.lstm.input", "aten.gru.input")]
    assert recurrent.strategy == ("cut b",)


def test_recurrent_layers_run_again_with_their_gradients() -> None:
    """Under ``selective`` a GRU's gradients were wrong: it writes over the products that were kept."""
    torch.manual_seed(0)
    fix = {"recompute": "selective"}
    batch = (torch.randn(4, 3, 6),)
    for layer in (nn.GRU(6, 8, batch_first=True), nn.LSTM(6, 8, batch_first=True)):
        report = planner.verify(Tagger(layer, 8), "dp=2", batch=batch, fix=fix, steps=1)
        assert report.ok, report.table()


def test_recurrent_layers_get_their_first_states_in_one_piece() -> None:
    """As cuDNN wants them: the zeros of two layers are those of one, expanded."""
    model = Tagger(nn.LSTM(6, 8, num_layers=2, batch_first=True), 8)
    source = planner.compile(model, "dp=1", example_inputs=(torch.randn(4, 3, 6),)).source
    assert ".expand(2, 4, 8)" in source and "[zeros.contiguous(), zeros.contiguous()]" in source


def test_recurrent_layers_are_not_compiled() -> None:
    """Torch's compiler generates no code for them on a processor."""
    model, x = Tagger(nn.GRU(6, 8, batch_first=True), 8), torch.randn(4, 3, 6)
    parallel = planner.compile(model, "dgx-h100:1x1", example_inputs=(x,), loss_fn=lambda y, _: y, compiled=True)
    with mock.patch("torch.compile", side_effect=lambda forward, **_: forward) as compiled:
        parallel.train_step(x)
    names = [call.args[0].__code__.co_names for call in compiled.call_args_list]
    assert names and all("gru" not in each for each in names)
    torch.testing.assert_close(
        parallel.full_gradients()["head.bias"], torch.autograd.grad(model(x), model.head.bias)[0]
    )


def test_recurrent_layers_count_their_products() -> None:
    from passes.rules import forward_flops

    graph = capture(Tagger(nn.LSTM(6, 8, batch_first=True), 8), args=(torch.randn(4, 3, 6),))
    (node,) = [node for node in graph.nodes if node.op == "aten.lstm.input"]
    assert forward_flops(node, graph.values) == 2 * 4 * 3 * (4 * 8 * 6 + 4 * 8 * 8)


def test_pipelines_are_cut_between_recurrent_layers_and_what_follows() -> None:
    torch.manual_seed(0)
    model = Tagger(nn.LSTM(6, 8, batch_first=True), 8)
    report = planner.verify(model, "pp=2", batch=(torch.randn(4, 3, 6),), steps=1)
    assert report.ok, report.table()
    assert [chunk.groups[0].count for chunk in report.plan.step.chunks] == [1, 1]
