"""Models that hold what autograd computed are copied, verified and trained like any other."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import planner
from passes.capture.independent_copy import independent_copy


class Normalised(nn.Module):
    """Its first weight is a product that ``weight_norm`` keeps as an attribute; it keeps its last outputs, too."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.first = nn.utils.weight_norm(nn.Linear(8, 8))
        self.second = nn.Linear(8, 8)
        self.outputs: list[tuple[torch.Tensor, ...]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.second(self.first(x).tanh())
        self.outputs.append((out,))
        return out.square().mean()


X = torch.randn(4, 8, dtype=torch.float64)


def test_a_copy_shares_nothing_and_computes_the_same() -> None:
    model = Normalised().double()
    model(X)
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)
    copied = independent_copy(model)
    torch.testing.assert_close(copied(X), model(X), rtol=0, atol=0)
    assert copied.first.weight_g is not model.first.weight_g
    assert not copied.outputs[0][0].requires_grad
    assert model.outputs[0][0].requires_grad


@pytest.mark.filterwarnings("ignore:forward of Normalised changes")
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_weight_norm_is_verified(mesh: str) -> None:
    report = planner.verify(Normalised(), mesh, batch={"x": X}, steps=2)
    assert report.ok, report
