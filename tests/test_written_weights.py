"""What writes weights between calls (an optimizer, an average, ``.data``) or in forward: calls use what was written."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch import nn

import planner
from passes.capture import keep_float64
from passes.ir.graph import ParameterWrite
from passes.ir.value_guards import GuardStep, StepResult
from planner.compilation import parallelise
from runtime.execution.call_effects import CallEffects
from runtime.execution.rank_mapping import VirtualPlaces
from runtime.mesh.layout import virtual_ranks
from tests import stage_models as models
from tests.small_models import seeded
from tests.test_stages import plan_of


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_an_evaluation_between_two_writes_keeps_no_weights(zero: int) -> None:
    model = seeded(models.Chain)
    batch = models.batch_of(model)
    plan = plan_of(models.Chain, dp=2, zero=zero)

    with keep_float64(), virtual_ranks(plan.mesh) as layout, torch.no_grad():
        parallel = parallelise(seeded(models.Chain), VirtualPlaces(layout), plan=plan, example_inputs=batch)
        parallel(**batch)
        for piece in parallel.owned():
            piece.tensor.data.mul_(0.5)
        parts = parallel(**batch)
        actual = {name: layout.join(part, ("R",) * len(layout.mesh.names)) for name, part in parts.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
        expected = model(**batch)
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-12, atol=1e-12)


class Queue(nn.Module):
    """Compares with the means of earlier batches, as contrastive learning; forward appends that of this one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.linspace(-1, 1, 24).view(6, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys, hidden = self.seen.clone(), self.first(x).tanh()
        compared = torch.softmax(hidden @ keys.T, -1) @ keys
        with torch.no_grad():
            self.seen.copy_(torch.cat([hidden.mean(0)[None], self.seen[:-1]]))
        return self.second(hidden + compared).square().mean()


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_backward_after_a_call_sees_buffers_as_they_were_before_it(recompute: str) -> None:
    model, x = seeded(Queue), torch.linspace(-2, 2, 12, dtype=torch.float64).view(3, 4)
    reference = copy.deepcopy(model)
    parallel = planner.compile(model, "dp=1", example_inputs={"x": x}, fix={"recompute": recompute})
    for _ in range(2):
        reference(x=x).backward()
        parallel(x=x).backward()
    torch.testing.assert_close(parallel.full_state_dict()["seen"], reference.seen, rtol=1e-12, atol=0)
    for name, gradient in parallel.full_gradients().items():
        torch.testing.assert_close(gradient, reference.get_parameter(name).grad, rtol=1e-9, atol=1e-12)


class KeptWithinBounds(models.Chain):
    """Writes to its weights in forward, once a call: what changes them again would show."""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.first.weight.data.clamp_(-0.1, 0.1)
            with torch.no_grad():
                self.third.weight.mul_(0.5).add_(0.01)
                torch.mul(self.first.bias, 0.5, out=self.first.bias)
            self.second.weight.data = self.second.weight.data / self.second.weight.data.norm()
        return super().forward(x, target)


class Follows(models.Chain):
    """Its third linear is an average of the first one's weights in the past, as the key encoder of MoCo."""

    def __init__(self) -> None:
        super().__init__()
        self.third.requires_grad_(False)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            self.third.weight.lerp_(self.first.weight, 0.25)
            self.third.bias.copy_(self.third.bias * 0.75 + self.first.bias * 0.25)
        return super().forward(x, target)


@pytest.mark.parametrize("fix", [{"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}, {"dp": 2, "zero": 3, "micro_batch": 2}])
@pytest.mark.parametrize("build", [KeptWithinBounds, Follows])
def test_what_forward_writes_to_parameters_is_written_once_a_step(
    build: type[models.Chain], fix: dict[str, int]
) -> None:
    """The micro-batches of a step see the same weights; an optimizer goes on from them."""
    plan = plan_of(build, **fix)
    model = seeded(build)
    assert planner.verify(model, plan, batch=models.batch_of(model)).ok


def test_parameters_that_lie_alike_are_written_in_parts() -> None:
    """Nothing is gathered: one write reads the parameter alone, the other one that lies as it does."""
    model = seeded(models.Chain)
    batch = models.batch_of(model)
    steps = GuardStep("parameter", ("first.weight",)), GuardStep("parameter", ("second.weight",))
    add = GuardStep("aten.add_.Tensor", (StepResult(0), StepResult(1)), writes=True)
    effects = CallEffects((ParameterWrite("first.weight", (*steps, add), elementwise=True),), frozenset())
    plan = plan_of(models.Chain, dp=2, zero=3)
    with keep_float64(), virtual_ranks(plan.mesh) as layout:
        parallel = parallelise(seeded(models.Chain), VirtualPlaces(layout), plan=plan, example_inputs=batch)
        state = parallel._engine.state
        expected = model.first.weight + model.second.weight
        with mock.patch.object(state, "whole", side_effect=AssertionError):
            effects.write_parameters(state)
        torch.testing.assert_close(parallel.full_state_dict()["first.weight"], expected.detach(), rtol=0, atol=0)
