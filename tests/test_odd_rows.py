"""Products whose rows have an odd number of elements of two bytes: priced as slow, cut or whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import planner
from cost_models import Cluster
from passes.rules.kinds import row_step


class Head(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(64, num_classes, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(x), labels)


def seconds(num_classes: int, *, tp: int) -> float:
    """Of a step, where odd rows leave a tenth of the rate and all but arithmetic is free."""
    data = Cluster.uniform(tp, latency=0.0, bandwidth=1e30, flops=1e9).to_dict()
    data["device"]["efficiency"] = {"matmul": {"odd_rows": 0.1}}
    batch = {"x": torch.randn(8, 64, dtype=torch.bfloat16), "labels": torch.zeros(8, dtype=torch.long)}
    plan = planner.plan(Head(num_classes), Cluster.from_dict(data), example_inputs=batch, fix={"tp": tp})
    return plan.step.costs.simulated


@pytest.mark.parametrize("tp", [1, 2])
def test_an_odd_number_of_classes_is_ten_times_as_slow_whole_or_cut(tp: int) -> None:
    """Two ranks have 16 and 15 of 31 classes: the second's rows are odd."""
    assert seconds(31, tp=tp) / seconds(32, tp=tp) == pytest.approx(10 * 31 / 32 if tp == 1 else 10.0, rel=0.05)


@pytest.mark.parametrize(
    ("shape", "step"),
    [((1, 8191, 512, 64), 8), ((1, 8192, 511, 64), 1), ((4, 8, 64, 63), 1), ((1, 8, 1, 64), 8), ((1, 8, 30522, 64), 2)],
)
def test_rows_are_as_long_as_n_or_k(shape: tuple[int, int, int, int], step: int) -> None:
    assert row_step(shape) == step
