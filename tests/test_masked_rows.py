"""Rows that a mask of unknown values picks, put back or added up: exact, with gradients, whatever the mask picks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from passes.capture import CaptureError, capture
from tests.capture_parity import assert_parity
from tests.test_capture_passes import check, ops


def put(y: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    result = y.clone()
    result[index] = value
    return result


def rows_of(y: torch.Tensor) -> torch.Tensor:
    return y.sum(-1) > 0


def scaled_in_place(y: torch.Tensor) -> torch.Tensor:
    result = y.clone()
    result[rows_of(y)] *= 3
    return result


def both_means(y: torch.Tensor) -> torch.Tensor:
    """D-FINE's means of matched and of other places."""
    mask = rows_of(y)
    losses = y.square().mean(-1)
    matched = losses[mask].mean() if mask.any() else 0
    others = losses[~mask].mean() if (~mask).any() else 0
    return (matched * mask.sum().sqrt() + others * (~mask).sum().sqrt()) / 3


def bins_of(y: torch.Tensor) -> torch.Tensor:
    """D-FINE's weights between the bins on both sides, of what lies in a bin."""
    bins = torch.tensor([-1.0, -0.25, 0.25, 1.0], dtype=y.dtype)
    left = (bins <= y.unsqueeze(-1)).sum(-1) - 1
    inside = (left >= 0) & (left < 3)
    below, above = bins[left[inside]], bins[left[inside] + 1]
    result = torch.zeros_like(y)
    result[inside] = (y[inside] - below).abs() / ((y[inside] - below).abs() + (above - y[inside]).abs())
    result[left < 0] = 0.0
    return result


#: Half of the picked numbers for which ``is_full`` says so.
HALF = 9


def is_full(rows: torch.Tensor) -> bool:
    num_rows, _ = rows.numel(), rows.dim()
    return num_rows == 2 * HALF


ROWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "put": lambda y: put(torch.zeros_like(y), rows_of(y), y[rows_of(y)] * 2),
    "put elsewhere": lambda y: put(y, y > 0, y[y > 0].sin()),
    "put by places": lambda y: put(y, torch.where(rows_of(y)), y[torch.where(rows_of(y))] + 1),
    "in place": scaled_in_place,
    "added": lambda y: y.index_put(torch.where(rows_of(y)), y[rows_of(y)].tanh(), accumulate=True),
    "means of rows taken away": lambda y: put(y, rows_of(y), y[rows_of(y)] - y[rows_of(y)].mean(1, keepdim=True)),
    "sum": lambda y: y[rows_of(y)].sum(0),
    "sum, dims kept": lambda y: y[rows_of(y)].sum((0, 1), keepdim=True),
    "mean": lambda y: y[rows_of(y)].square().mean(),
    "mean of rows": lambda y: y[rows_of(y)].mean(0),
    "mean over rows and more": lambda y: y[(y.sum((1, 2)) > 0)].mean((0, -1)),
    "masked_select": lambda y: y.masked_select(y > 0).pow(2).mean(),
    "divided by their number": lambda y: y[rows_of(y)].sum() / rows_of(y).sum().clamp(min=1),
    "of two tensors": lambda y: F.mse_loss(y[y > 0], torch.ones_like(y)[y > 0]),
    "cross-entropy": lambda y: F.cross_entropy(y[rows_of(y)], torch.arange(15).reshape(3, 5)[rows_of(y)] % 4),
    "a derivative that is not finite at others": lambda y: y[y > 0].log().sum() + y[y > 0].sqrt().mean(),
    "mean, or zero of no rows": lambda y: y.sum() + (y[y > 0].square().mean() if (y > 0).any() else 0),
    "zero of no rows": lambda y: y.sum() + (y[y > 1e9].mean() if (y > 1e9).any() else torch.tensor(0.0).double()) * 2,
    "means of both": lambda y: y.mean() + both_means(y),
    "targets without gradient": lambda y: (y * bins_of(y.detach())).square(),
    "no row": lambda y: y[y > 1e9].sum() + y.sum(),
}


@pytest.mark.parametrize("name", ROWS)
def test_what_is_computed_of_picked_rows_is_that_of_all_rows_and_a_choice(name: str) -> None:
    assert not {"aten.nonzero_static.default", "aten.index_put.default"} & set(check(ROWS[name], 3, 5, 4))


REFUSED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "their number": lambda y: y[rows_of(y)].sum() / y[rows_of(y)].shape[0],
    "in their order": lambda y: y[rows_of(y)].cumsum(0).sum(),
    "their largest": lambda y: y[rows_of(y)].amax(0),
    "each with the next": lambda y: (y[rows_of(y)] - y[rows_of(y)].roll(1, 0)).sum(),
    "a root of weights": lambda y: (y[y > 0] + y.sum()).sqrt().sum(),
    "a factor that is not finite at others": lambda y: (y[y > 0] * y.detach()[y > 0].log() + y.sum()).sum(),
    "whether all are": lambda y: y[y > 0].sum() * (10 if (y > 0).sum() == y.numel() else 1),
    "whether each sample is": lambda y: y[y.sum((1, 2)) > 0].sum() * (10 if len(y[y.sum((1, 2)) > 0]) == len(y) else 1),
    "whether two are": lambda y: y[rows_of(y)].sum() * (10 if rows_of(y).sum() == 2 else 1),
    "whether there are as many as its source says": lambda y: (
        y[rows_of(y)].sum() * (10 if len(y[rows_of(y)]) == 7 else 1)
    ),
    "whether a function says so": lambda y: y[y > 0].sum() * (10 if is_full(y[y > 0]) else 1),
    "whether there are as many as samples": lambda y: (
        y[rows_of(y)].sum() * (10 if y[rows_of(y)].size(0) == len(y) else 1)
    ),
    "one where there are none": lambda y: y.sum() + (y[y > 0].mean() if (y > 0).any() else 1.0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_know_of_each_other_are_refused(name: str) -> None:
    class Picking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 5, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return REFUSED[name](x * self.weight)

    with pytest.raises(CaptureError, match=r"how many (rows|entries of) a mask"):
        capture(Picking(), args=(torch.randn(3, 5, 4),))


class OfOwnLayer(nn.Module):
    """A layer that rows go through whose own sum says so."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.own = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return put(y, rows_of(y), self.own(y[rows_of(y)]).relu()).square().sum()


def test_rows_go_through_a_layer_of_their_own() -> None:
    torch.manual_seed(0)
    assert "aten.index_put.default" not in ops(assert_parity(OfOwnLayer().double(), args=(torch.randn(6, 4).double(),)))


class OnlyWhereThereAreRows(OfOwnLayer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return super().forward(x) if rows_of(y).any() else y.square().sum()


def test_a_layer_that_is_left_out_where_the_mask_picks_nothing_is_refused() -> None:
    """Its weights would have gradients of zeros for none, and AdamW would let them decay."""
    with pytest.raises(CaptureError, match=r"rows that a mask picks go through 'own\.bias' only if there are any"):
        capture(OnlyWhereThereAreRows(), args=(torch.randn(6, 4),))


class HardExamples(nn.Module):
    """The mean loss of the samples that are over a bound."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x).tanh()
        losses = F.cross_entropy(x, y, reduction="none")
        return {"loss": losses[losses > 1.9].mean()}


@pytest.mark.parametrize(("mesh", "options"), [("dp=2,tp=2", {}), ("pp=2", {"fix": {"num_microbatches": 2}})])
def test_the_mean_over_picked_samples_is_that_of_the_global_batch(mesh: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 8), "y": torch.arange(8)}
    assert planner.verify(HardExamples(), mesh, batch=batch, **options).ok


class ExamplesOfTwoKinds(HardExamples):
    """The mean losses of the hard samples and of those that are harder than any: zero for none."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x).tanh()
        losses = F.cross_entropy(x, y, reduction="none")
        hard, hardest = losses > 1.9, losses > 1e6
        others = losses[hardest].mean() if hardest.any() else 0
        return {"loss": losses.mean() + (losses[hard].mean() if hard.any() else 0) + others}


def test_the_mean_over_no_samples_of_the_global_batch_is_zero_where_the_model_says_so() -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 8), "y": torch.arange(8)}
    assert planner.verify(ExamplesOfTwoKinds(), "dp=2,tp=2", batch=batch).ok
