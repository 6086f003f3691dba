"""What writes weights between calls (an optimizer, an average, ``.data``) or in forward: calls use what was written."""

from __future__ import annotations

import pytest
import torch

import planner
from passes.capture import keep_float64
from planner.compilation import parallelise
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


class KeptWithinBounds(models.Chain):
    """Writes to its weights in forward, once a call: what changes them again would show."""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.first.weight.data.clamp_(-0.1, 0.1)
            with torch.no_grad():
                self.third.weight.mul_(0.5).add_(0.01)
        return super().forward(x, target)


@pytest.mark.parametrize("fix", [{"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}, {"dp": 2, "zero": 3, "micro_batch": 2}])
def test_what_forward_writes_to_parameters_is_written_once_a_step(fix: dict[str, int]) -> None:
    """The micro-batches of a step see the same weights; an optimizer goes on from them."""
    plan = plan_of(KeptWithinBounds, **fix)
    model = seeded(KeptWithinBounds)
    assert planner.verify(model, plan, batch=models.batch_of(model)).ok
