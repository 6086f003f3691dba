"""What a pipeline's cut among layers alike costs: activations are sent even where the first layer is one of the run,
gradients only where there are some."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import planner
from planner.auditing.repriced_step import reprice
from planner.auditing.subject import subject_of
from planner.verification.verify_model import slow_devices
from tests.small_models import Residual, squared_error

SIZE, SAMPLES, MICROBATCHES = 64, 16, 2
CLUSTER = slow_devices(2)
#: Seconds of a micro-batch's activations, or of their gradients.
SENT = CLUSTER.levels[0].latency + SAMPLES // MICROBATCHES * SIZE * 4 / CLUSTER.levels[0].bandwidth


class Alike(nn.Module):
    """Equal layers and nothing else, the first of them frozen."""

    def __init__(self, *, layers: int, frozen: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual(SIZE, 2 * SIZE) for _ in range(layers))
        for layer in self.layers[:frozen]:
            layer.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("layers", "frozen", "returned"),
    [
        pytest.param(10, 8, 0.0, id="between frozen layers"),
        pytest.param(4, 3, 0.0, id="before the first that trains"),
        pytest.param(6, 0, SENT, id="between layers that train"),
    ],
)
def test_a_cut_costs_what_crosses_it(layers: int, frozen: int, returned: float) -> None:
    model, batch = Alike(layers=layers, frozen=frozen), (torch.randn(SAMPLES, SIZE), torch.randn(SAMPLES, SIZE))
    layout = {"pp": 2, "num_microbatches": MICROBATCHES, "schedule": "1f1b", "recompute": "none"}
    plan = planner.plan(model, CLUSTER, example_inputs=batch, loss_fn=squared_error, fix=layout)
    assert plan.step is not None
    assert bool(plan.step.memory[0].gradients) == bool(returned)

    subject = subject_of(plan, model, example_inputs=batch, loss_fn=squared_error)
    priced = reprice(subject.graph, plan, CLUSTER)
    first, second = priced.step.chunks
    assert (second.receive_forward, first.receive_backward) == pytest.approx((SENT, returned), rel=1e-6)
    assert plan.step.costs.seconds == pytest.approx(priced.seconds.total, rel=1e-9)
