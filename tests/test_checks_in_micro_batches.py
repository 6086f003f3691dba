"""Errors that a model raises for some elements, and gradients that it takes itself, keep it in micro-batches."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from passes.capture import capture
from tests.capture_parity import graph_loss
from tests.small_models import seeded


class Density(nn.Module):
    """torch refuses variances below zero, the model what is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(6, 16), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mean, spread = self.out(torch.tanh(self.hidden(x))).unbind(1)
        if not torch.isfinite(mean).all():
            raise ValueError("not finite")
        return F.gaussian_nll_loss(mean, y, spread + 2.0)


class Penalised(nn.Module):
    """The gradient penalty of a critic (Gulrajani et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(6, 16), nn.Softplus(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        point = (2 * x).requires_grad_(True)
        (slope,) = torch.autograd.grad(self.critic(point).sum(), point, create_graph=True)
        return (self.critic(x).squeeze(1) * y).mean() + ((slope.norm(dim=1) - 1) ** 2).mean()


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"x": torch.randn(8, 6, generator=generator).double(), "y": torch.randn(8, generator=generator).double()}


@pytest.mark.parametrize("build", [Density, Penalised])
def test_it_runs_in_micro_batches(build: type[nn.Module]) -> None:
    report = planner.verify(seeded(build), "dp=2", batch=batch(), fix={"num_microbatches": 2}, steps=1)
    assert report.ok, report.table()


@pytest.mark.parametrize(
    ("spread", "x", "words"), [(-9.0, 1.0, "gaussian_nll_loss"), (0.0, float("nan"), r"isfinite\(mean\)")]
)
def test_an_element_that_is_refused_raises(spread: float, x: float, words: str) -> None:
    model = seeded(Density)
    graph = capture(model, kwargs=batch())
    assert [node.op for node in graph.nodes if "checked" in node.op] == ["meshwright.checked_each.default"] * 2
    with torch.no_grad():
        model.out.bias[1] += spread
    values = {**batch()}
    values["x"][3, 0] *= x
    with pytest.raises(ValueError, match=f"the model raises an error here: .*{words}"):
        graph_loss(graph, model, (), values)
