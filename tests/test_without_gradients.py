"""What a model does under ``torch.no_grad`` with tensors that have gradients costs no other use its gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import planner
from passes.capture import CaptureError, capture
from tests.small_models import seeded

X = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(4, 8)


class Selecting(nn.Module):
    """Rows are selected by what ``look`` makes of the features, without a gradient."""

    def __init__(self, look: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.before, self.after, self.look = nn.Linear(8, 8), nn.Linear(8, 8), look

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.before(x)
        with torch.no_grad():
            chosen = self.look(features).sum(-1, keepdim=True) > 0
        return (self.after(features) * chosen).square().mean()


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.to(x.dtype),
        lambda x: x.to(x.device).double(),
        lambda x: x.type(torch.float64).contiguous(),
        lambda x: x.float(),
        lambda x: x.clone().mul_(2),
    ],
)
def test_conversions_without_gradients_leave_later_gradients(look: Callable[[torch.Tensor], torch.Tensor]) -> None:
    report = planner.verify(seeded(Selecting, look=look), "dp=2", batch=(X,), steps=1)
    assert report.ok, report.table()


@pytest.mark.parametrize("look", [lambda x: x.mul_(2), lambda x: x.__setitem__(0, 0.0) or x])
def test_writes_without_gradients_to_what_has_one_are_refused(look: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(CaptureError, match="a tensor that has a gradient, or where gradients are off"):
        capture(seeded(Selecting, look=look), args=(X,))
