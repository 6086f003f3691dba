"""What writes weights between calls (an optimizer, an average, ``.data``): the next call uses what was written."""

from __future__ import annotations

import pytest
import torch

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
