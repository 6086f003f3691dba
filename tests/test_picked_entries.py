"""Entries picked row by row, ``x[torch.arange(len(x)), picks]``, are gathered: rows stay apart, values are the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import planner
from tests.capture_parity import assert_parity

BATCH, LENGTH, CLASSES = 8, 3, 4
X = torch.randn(BATCH, LENGTH, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
PICKS = torch.randint(-LENGTH, LENGTH, (BATCH,), generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(0, CLASSES, (BATCH, LENGTH), generator=torch.Generator().manual_seed(2))
PAIRS = torch.tensor([[0, 2]])


def rows() -> torch.Tensor:
    return torch.arange(BATCH)


def places() -> torch.Tensor:
    return torch.arange(LENGTH)


def put(x: torch.Tensor, *indices: torch.Tensor, values: torch.Tensor | float, adds: bool = False) -> torch.Tensor:
    return torch.index_put(x, indices, torch.as_tensor(values, dtype=x.dtype), accumulate=adds)


Operator = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
#: Of x, picks (some count from the end) and labels.
GATHERED: list[Operator] = [
    lambda x, picks, labels: x[rows(), picks],
    lambda x, picks, labels: x[rows(), picks.int()],
    lambda x, picks, labels: x[rows()[:, None], places(), labels],
    lambda x, picks, labels: x[rows()[:, None], labels % LENGTH],
    lambda x, picks, labels: x[:, places(), labels[0]],
    lambda x, picks, labels: x.transpose(0, 1)[picks, rows()],
    lambda x, picks, labels: x.transpose(0, 1)[labels % LENGTH, rows()[:, None]],
    lambda x, picks, labels: x[rows()[:, None], PAIRS],
]
SCATTERED: list[Operator] = [
    lambda x, picks, labels: put(x, rows(), picks, values=0.5),
    lambda x, picks, labels: put(x, rows(), picks, values=x[:, 0] * 2),
    lambda x, picks, labels: put(x, rows()[:, None], places(), labels, values=x[..., 0].sin()),
    lambda x, picks, labels: put(x, rows()[:, None], labels % LENGTH, values=x.cos(), adds=True),
    lambda x, picks, labels: put(x.transpose(0, 1), picks, rows(), values=x[:, 1]),
]


class Picked(nn.Module):
    def __init__(self, *operators: Operator) -> None:
        super().__init__()
        self.operators = operators
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, CLASSES, dtype=torch.float64))

    def forward(self, x: torch.Tensor, picks: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        results = [each(x * self.scale, picks, labels) for each in self.operators]
        return sum((each.square().mean() for each in results), torch.zeros((), dtype=torch.float64))


def picking_operators(*operators: Operator) -> set[str]:
    graph = assert_parity(Picked(*operators), args=(X, PICKS, LABELS))
    return {node.op for node in graph.nodes} & {f"aten.{name}" for name in PICKING}


PICKING = ("index.Tensor", "index_put.default", "gather.default", "scatter.src", "scatter_add.default")


@pytest.mark.parametrize("place", range(len(GATHERED)))
def test_entries_are_gathered(place: int) -> None:
    assert picking_operators(GATHERED[place]) == {"aten.gather.default"}


@pytest.mark.parametrize("place", range(len(SCATTERED)))
def test_entries_are_scattered(place: int) -> None:
    adds = place == 3
    assert picking_operators(SCATTERED[place]) == {"aten.scatter_add.default" if adds else "aten.scatter.src"}


@pytest.mark.parametrize(
    "operator",
    [
        lambda x, picks, labels: x[rows()[:4], picks[:4]],
        lambda x, picks, labels: x[rows().flip(0), picks],
        lambda x, picks, labels: x[rows(), :, picks],
        lambda x, picks, labels: x[picks + LENGTH, picks],
    ],
)
def test_other_lookups_stay(operator: Operator) -> None:
    """Not all rows, not in order, not side by side, no row of its own for each sample."""
    assert picking_operators(operator) == {"aten.index.Tensor"}


def test_samples_are_picked_in_micro_batches_on_data_ranks() -> None:
    fix = {"dp": 2, "num_microbatches": 2}
    batch = {"x": X, "picks": PICKS, "labels": LABELS}
    operators = [GATHERED[0], GATHERED[2], *SCATTERED[:4]]
    report = planner.verify(Picked(*operators), "pp=1,dp=2", batch=batch, fix=fix)
    assert report.ok, report.table()
