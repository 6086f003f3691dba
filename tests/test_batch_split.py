"""A batch of any number of samples: shared by the ranks where it can be, else computed whole by each, and exact."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from passes.capture import capture, keep_float64
from passes.fuse import fuse
from passes.rules import rule_for
from planner.whole_step.costs.batch_propagation import follow_batch
from runtime.execution.batch_split import BatchSplit, split_of
from tests import stage_models as models
from tests.small_models import seeded
from tests.test_stages import plan_of


def split(num_samples: int, **fix: Any) -> BatchSplit:
    model = seeded(models.Chain)
    with keep_float64():
        graph = fuse(capture(model, kwargs=models.batch_of(model, samples=num_samples))).graph
    return split_of(graph, plan_of(models.Chain, **fix), training=True)


@pytest.mark.parametrize(
    ("num_samples", "fix", "expected"),
    [
        (8, {"dp": 2, "num_microbatches": 2}, BatchSplit(2, 2)),  # as planned
        (6, {"dp": 2, "num_microbatches": 2}, BatchSplit(2, 3)),  # no micro-batch is longer than planned
        (5, {"dp": 2, "num_microbatches": 2}, BatchSplit(1, 5, copies=2)),
        (5, {"dp": 2}, BatchSplit(1, 5, copies=2)),
        (4, {"dp": 2}, BatchSplit(2, 1)),
        (3, {"pp": 2, "num_microbatches": 4}, BatchSplit(1, 3)),
    ],
)
def test_samples_are_divided(num_samples: int, fix: dict[str, Any], expected: BatchSplit) -> None:
    assert split(num_samples, **fix) == expected


@pytest.mark.parametrize("build", [models.SumLoss, models.SumOverBatchSize, models.Positions])
def test_three_samples_on_two_ranks_are_those_of_one_device(build: type[nn.Module]) -> None:
    """A sum, a loss that asks how many samples there are, and a constant with a row for each."""
    plan = plan_of(build, dp=2, num_microbatches=2, zero=3)
    model = seeded(build)
    with pytest.warns(UserWarning, match="3 samples cannot be shared equally by the 2 ranks of dp"):
        report = planner.verify(model, plan, batch=models.batch_of(model, samples=3), steps=1)
    assert report.largest_error <= 1e-9 and report.disagreement == 0


class PairsOfSamples(nn.Module):
    """A contrastive loss, for which ranks exchange samples for other dims."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        projected = F.normalize(torch.cat([self.project(a), self.project(b)]), dim=1)
        similar = projected @ projected.t()
        itself = torch.eye(similar.shape[0], dtype=torch.bool)
        others = (torch.arange(similar.shape[0]) + a.shape[0]) % similar.shape[0]
        return F.cross_entropy(similar.masked_fill(itself, float("-inf")), others)


def test_five_samples_of_a_loss_over_pairs_are_computed_whole_by_each_of_four_ranks() -> None:
    model = seeded(PairsOfSamples)
    batches = [{name: torch.randn(count, 8, dtype=torch.float64) for name in ("a", "b")} for count in (8, 5)]
    plan = planner.verify(model, "dp=4", batch=batches[0], fix={"zero": 3}, steps=1).plan
    with pytest.warns(UserWarning, match="5 samples cannot be shared equally by the 4 ranks of dp"):
        report = planner.verify(model, plan, batch=batches[1], steps=1)
    assert report.largest_error <= 1e-9 and report.disagreement == 0


class Halves(nn.Module):
    """A distance between the halves of a batch: each rank is given all samples, and operators cut them."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.project(x + x.flip(0)))
        half = h.shape[0] // 2
        return torch.cdist(h[:half], h[half : 2 * half]).mean() + h.square().mean()


def test_five_samples_that_only_operators_cut_are_computed_whole_by_each_rank() -> None:
    model = seeded(Halves)
    batches = [{"x": torch.randn(count, 8, dtype=torch.float64)} for count in (8, 5)]
    plan = planner.verify(model, "dp=2", batch=batches[0], fix={"zero": 3}, steps=1).plan
    with pytest.warns(UserWarning, match="a batch of this shape cannot be shared equally by the 2 ranks of dp"):
        report = planner.verify(model, plan, batch=batches[1], steps=1)
    assert report.largest_error <= 1e-9 and report.disagreement == 0


class Cosines(nn.Module):
    """Its width is the number of samples by chance; a token is expanded to one for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.classes = nn.Parameter(torch.ones(1, 1, 8)), nn.Parameter(torch.ones(11, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return (F.normalize(hidden, dim=-1) @ F.normalize(self.classes, dim=-1).T).square().mean()


def test_what_is_expanded_to_a_width_like_the_number_of_samples_mixes_none() -> None:
    graph = capture(Cosines(), args=(torch.ones(8, 3, 8),))
    assert follow_batch(graph, rules=rule_for).mixing == ()


class Scaled(nn.Module):
    """A number of Python's, and a penalty of whose products there are more once that number is no longer 1."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        errors = self.out(torch.tanh(self.hidden(x) * scale)) - x
        return errors.square().mean() + 0.01 * self.out.weight.square().sum()


def test_a_number_that_is_no_longer_one_leaves_samples_in_their_micro_batches() -> None:
    model, x = seeded(Scaled), torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)
    reference = copy.deepcopy(model)
    parallel = planner.compile(
        model, "dp=1", example_inputs={"x": x, "scale": 1.0}, fix={"num_microbatches": 2, "recompute": "none"}
    )
    for scale in (1.0, 1.5):
        reference(x=x, scale=scale).backward()
        parallel.train_step(x=x, scale=scale)
    for name, gradient in parallel.full_gradients().items():
        torch.testing.assert_close(gradient, reference.get_parameter(name).grad, rtol=1e-9, atol=1e-12)
