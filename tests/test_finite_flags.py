"""Flags that tell whether numbers are finite, which models ask for to clamp: traced as finite, checked at calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import planner
from passes.capture import interpret
from tests.capture_parity import assert_parity

X = torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4)

Flag = Callable[[torch.Tensor], torch.Tensor]

INFINITE, NO_NUMBER = float("inf"), float("nan")

#: Spellings, each of a flag that is True where some number is not finite.
SPELLINGS: dict[str, Flag] = {
    "not all finite": lambda y: ~torch.isfinite(y).all(),
    "any infinite or no number": lambda y: torch.isinf(y).any() | torch.isnan(y).any(),
    "the largest is infinite": lambda y: y.abs().max() == INFINITE,
    "some differ from themselves": lambda y: (y != y).any(),
    "how many are no numbers": lambda y: y.isnan().sum() > 0,
}


class Clamped(nn.Module):
    """A detector's layer: clamps what overflowed."""

    def __init__(self, is_wild: Flag) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.is_wild = is_wild

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.is_wild(y):
            y = torch.clamp(y, -1e3, 1e3)
        return y.square().mean()


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_flag_is_traced_as_for_finite_numbers_and_checked(spelling: str) -> None:
    model = Clamped(SPELLINGS[spelling])
    graph = assert_parity(model, args=(X,))
    assert not any("clamp" in node.op for node in graph.nodes)
    weights = dict(model.named_parameters())
    wild = X.clone()
    wild[0, 0] = INFINITE if spelling == "the largest is infinite" else NO_NUMBER
    with pytest.raises(ValueError, match=r"numbers are not finite.*if self\.is_wild\(y\)"):
        interpret(graph, {graph.inputs[0].name: wild}, lambda state: weights.get(state.path, state.data))


@pytest.mark.parametrize("scale", [1.0, 1e5])
def test_a_flag_that_finite_numbers_do_not_decide_selects(scale: float) -> None:
    model = Clamped(lambda y: (y.abs() > 1e3).any() | torch.isnan(y).any())
    assert any("clamp" in node.op for node in assert_parity(model, args=(X * scale,)).nodes)


def test_four_devices_train_as_one() -> None:
    model = Clamped(SPELLINGS["not all finite"])
    assert planner.verify(model, "dp=2,tp=2", batch=(X,), loss_fn=lambda loss, _: loss).ok
