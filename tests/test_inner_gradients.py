"""Models that differentiate inside their forward pass: gradients of gradients, sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner

pytestmark = pytest.mark.usefixtures("models_traced_once")


class InnerStep(nn.Module):
    """The loss after one step of gradient descent, for every task with weights of its own."""

    def __init__(self, activation: str = "tanh") -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(4, 16) / 2)
        self.bias = nn.Parameter(torch.zeros(1, 16))
        self.second = nn.Parameter(torch.randn(16, 2) / 4)
        self.activation = activation

    def predict(self, x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        first, bias, second = weights
        return getattr(F, self.activation)(x @ first + bias) @ second

    def forward(self, support: torch.Tensor, targets: torch.Tensor, query: torch.Tensor, wanted: torch.Tensor) -> Any:
        weights = [weight.expand(len(support), *weight.shape) for weight in self.parameters()]
        inner = (self.predict(support, weights) - targets).square().mean((1, 2)).sum()
        gradients = torch.autograd.grad(inner, weights, create_graph=True)
        adapted = [weight - 0.3 * gradient for weight, gradient in zip(weights, gradients)]
        return {"loss": F.mse_loss(self.predict(query, adapted), wanted)}


class Slopes(nn.Module):
    """Fits the slope of an energy by its inputs, through linear layers, a change in place and a detached factor."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 16)
        self.down = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor, slopes: torch.Tensor) -> dict[str, torch.Tensor]:
        x = x.detach().requires_grad_(True)
        hidden = self.up(x).sigmoid()
        energy = self.down(hidden * hidden.detach().exp().mul_(0.5))
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return {"loss": F.mse_loss(force, slopes)}


def _double(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("activation", ["tanh", "relu", "gelu"])
def test_second_order_gradients_through_an_inner_step(activation: str) -> None:
    torch.manual_seed(0)
    batch = dict(zip(("support", "targets", "query", "wanted"), _double((4, 5, 4), (4, 5, 2), (4, 3, 4), (4, 3, 2))))
    model = InnerStep(activation).double()
    report = planner.verify(model, "dp=2", batch=batch, constraints={"input:*": {"dp": "S(0)"}})
    assert report.ok, report.table()


def test_gradient_by_the_inputs() -> None:
    torch.manual_seed(0)
    batch = dict(zip(("x", "slopes"), _double((4, 3, 4), (4, 3, 4))))
    report = planner.verify(Slopes().double(), "dp=2", batch=batch, constraints={"input:*": {"dp": "S(0)"}})
    assert report.ok, report.table()


def test_tasks_are_split_without_a_collective_before_the_loss() -> None:
    batch = _double((4, 5, 4), (4, 5, 2), (4, 3, 4), (4, 3, 2))
    model = InnerStep().double()
    plan = planner.plan(model, mesh="dp=2", example_inputs=tuple(batch), constraints={"input:*": {"dp": "S(0)"}},
                        forbid_collectives=("all_gather",))  # fmt: skip
    assert not plan.notes
    assert {entry.collective for entry in plan.collectives} <= {"all_reduce"}
