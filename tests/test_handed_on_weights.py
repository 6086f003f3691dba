"""A weight that a unit uses without a gradient and hands on to where it gets one: reduced once, and counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import planner


class ScoredRows(nn.Module):
    """Each head first picks rows, which has no gradient, and is trained where all heads score what was picked."""

    def __init__(self, *, depth: int, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(num_features, num_features) for _ in range(depth))
        self.heads = nn.ModuleList(nn.Linear(num_features, num_classes) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        picked = []
        for layer, head in zip(self.layers, self.heads):
            hidden = layer(x)
            best = head(hidden).max(-1).values.topk(4, dim=1).indices
            picked.append(hidden.gather(1, best.unsqueeze(-1).expand(-1, -1, hidden.shape[-1])))
        return torch.cat([head(rows) for head, rows in zip(self.heads, picked)], 1)


def mean_square(output: torch.Tensor, _: Any) -> torch.Tensor:
    return output.square().mean()


@pytest.mark.parametrize(("depth", "num_features", "num_classes"), [(2, 32, 4), (3, 32, 4), (3, 16, 8)])
def test_the_gradient_of_a_weight_that_a_unit_hands_on_is_counted(
    depth: int, num_features: int, num_classes: int
) -> None:
    torch.manual_seed(0)
    model = ScoredRows(depth=depth, num_features=num_features, num_classes=num_classes)
    batch = (torch.randn(4, 16, num_features),)

    report = planner.verify(model, "dp=2,tp=2", batch=batch, loss_fn=mean_square)

    assert report.ok, report.table()
