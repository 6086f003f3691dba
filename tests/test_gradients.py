"""Gradients under every kind of plan are those of one device: added up over batches, of any shape, clipped, saved."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from runtime.module.accumulation import Accumulation
from runtime.zero.group import StateGroup
from runtime.zero.norm import clip_gradients
from tests.ranks import run_on_ranks
from tests.small_models import seeded, token_batch

PIPELINE = {"pp": 2, "dp": 2, "num_microbatches": 2, "schedule": "1f1b", "recompute": "none"}
DATA = {"dp": 4, "num_microbatches": 2, "recompute": "none"}
BOTH = {**DATA, "dp": 2, "tp": 2}
CASES: tuple[dict[str, Any], ...] = (
    {"name": "mesh", "mesh": "dp=2,tp=2"},
    {"name": "pipeline zero 1", "fix": {**PIPELINE, "zero": 1}},
    {"name": "pipeline zero 3", "fix": {**PIPELINE, "zero": 3, "recompute": "full"}},
    {"name": "pipeline tp", "fix": {**PIPELINE, "dp": 1, "tp": 2, "zero": 0, "schedule": "zb_h1"}},
    {"name": "zero 2", "fix": {**BOTH, "zero": 2, "recompute": "full"}},
    {"name": "zero 3", "fix": {**DATA, "zero": 3}},
    {"name": "loss in chunks", "fix": {**BOTH, "zero": 1, "recompute": "chunked_loss"}},
)


@functools.cache
def results() -> dict[str, dict[str, float]]:
    return run_on_ranks("gradients_worker", 4, CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_gradients_of_several_batches_are_those_of_one_device(case: dict[str, Any]) -> None:
    """``tests/gradients_worker.py`` says what is compared."""
    wrong = {name: error for name, error in results()[case["name"]].items() if not error <= 1e-9}
    assert not wrong


class Averaged(nn.Module):
    """The mean of some rows of a table (``bag``: as one operator), and a linear layer."""

    def __init__(self, *, bag: bool = False, **options: Any) -> None:
        super().__init__()
        table = nn.EmbeddingBag(32, 16, mode="sum", **options) if bag else nn.Embedding(32, 16, **options)
        self.table, self.output = table, nn.Linear(16, 32)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        rows = self.table(tokens)
        return {"loss": F.cross_entropy(self.output(rows if rows.dim() == 2 else rows.mean(1)), labels)}


@pytest.mark.parametrize("options", [{"scale_grad_by_freq": True}, {"sparse": True}, {"sparse": True, "bag": True}])
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2"])
def test_gradients_of_tables_are_those_that_their_options_ask_for(mesh: str, options: dict[str, Any]) -> None:
    """Most tokens occur often, on both data ranks."""
    tokens = token_batch(vocabulary=4)["tokens"]
    batch = {"tokens": tokens, "labels": torch.arange(8)}
    fix = {"fix": {"num_microbatches": 1, "zero": 2}} if mesh == "dp=2" else {"forbid_replicated_matmul": True}
    report = planner.verify(seeded(Averaged, **options), mesh, batch=batch, steps=1, **fix)
    assert report.ok, report.table()


class Tied(nn.Module):
    """An embedding that is used again for the logits, and layers in between."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.output = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.output.weight = self.table.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.table(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return {"loss": F.cross_entropy(self.output(hidden).flatten(0, 1), labels.flatten())}


def test_a_tied_weight_is_gathered_for_its_uses_alone() -> None:
    """Behind the first use comes the first layer, behind the second nothing that could be gathered ahead."""
    report = planner.verify(seeded(Tied), "dp=2", batch=token_batch(), steps=1, fix={"zero": 3, "num_microbatches": 2})
    assert report.ok, report.table()


def test_steps_that_would_not_add_up_to_a_mean_are_refused() -> None:
    accumulation = Accumulation()
    assert [accumulation.weight_of_step(weight) for weight in (None, 0.25, 2)] == [1.0, 0.25, 2.0]
    with accumulation.over(2):
        assert [accumulation.weight_of_step(None) for _ in range(2)] == [0.5, 0.5]
        with pytest.raises(ValueError, match="has seen its 2 train_step calls"):
            accumulation.weight_of_step(None)
    with pytest.raises(ValueError, match="saw 1 train_step calls"), accumulation.over(2):
        accumulation.weight_of_step(None)
    with pytest.raises(ValueError, match="give one of the two"), accumulation.over(1):
        accumulation.weight_of_step(0.5)
    with pytest.raises(ValueError, match="inside of"), accumulation.over(1), accumulation.over(1):
        pass
    with pytest.raises(KeyError), accumulation.over(2):
        raise KeyError  # an error inside is not hidden by the missing steps
    for num_steps in (0, -1, 1.5, True, None):
        with pytest.raises(ValueError, match="whole number"), accumulation.over(num_steps):  # type: ignore[arg-type]
            pass
    for weight in (math.nan, math.inf, True, "1"):
        with pytest.raises(ValueError, match="finite number"):
            accumulation.weight_of_step(weight)  # type: ignore[arg-type]


def clipped(max_norm: float, gradient: float = 2.0, **options: Any) -> tuple[float, float]:
    """The norm, and the gradient that is left, of a model of one parameter."""
    parameter = nn.Parameter(torch.zeros((), dtype=torch.float64))
    parameter.grad = torch.tensor(gradient, dtype=torch.float64)
    norm = clip_gradients([(parameter, True)], StateGroup(), max_norm=max_norm, **options)
    return float(norm), float(parameter.grad)


def test_gradients_are_clipped_to_norms_that_there_are() -> None:
    assert clipped(math.inf) == (2.0, 2.0) and clipped(0.0) == (2.0, 0.0)
    for max_norm in (-1.0, -math.inf, math.nan):
        with pytest.raises(ValueError, match="must be zero or above"):
            clipped(max_norm)
    for norm_type in (0.0, -2.0, math.nan):
        with pytest.raises(ValueError, match="norm_type"):
            clipped(1.0, norm_type=norm_type)
    with pytest.raises(ValueError, match="infinite or not a number"):
        clipped(1.0, math.inf, error_if_nonfinite=True)
