"""``torch.vmap`` in a model: an ensemble, and masks that are written for one pair of positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from passes.capture import CaptureError, capture
from tests.capture_parity import assert_parity

MEMBERS, WIDTH, SAMPLES, LENGTH = 2, 8, 4, 6


class Ensemble(nn.Module):
    """Members of one form, whose weights lie side by side, in one call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Parameter(torch.randn(MEMBERS, WIDTH, WIDTH, dtype=torch.float64) / WIDTH**0.5)
        self.bias = nn.Parameter(torch.randn(MEMBERS, WIDTH, dtype=torch.float64) / 10)
        self.down = nn.Parameter(torch.randn(MEMBERS, WIDTH, WIDTH, dtype=torch.float64) / WIDTH**0.5)

    def member(self, weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        hidden = F.layer_norm(F.linear(x, weights["up"], weights["bias"]).tanh(), (WIDTH,))
        return F.linear(hidden, weights["down"]).softmax(-1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        weights = {"up": self.up, "bias": self.bias, "down": self.down}
        outputs = torch.vmap(self.member, in_dims=(0, None))(weights, x)
        return {"loss": (outputs - x).square().mean()}


class Masked(nn.Module):
    """Attention of which a function of sample, query and key says what it may look at."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> dict[str, torch.Tensor]:
        rows, places = torch.arange(len(x)), torch.arange(x.shape[1])

        def may_look(row: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return (key <= query) & padding.index_select(0, row[None])[0].index_select(0, key[None])[0]

        mask: Any = may_look
        for dims in ((None, None, 0), (None, 0, None), (0, None, None)):
            mask = torch.vmap(mask, in_dims=dims)
        q, k, v = self.qkv(x).chunk(3, -1)
        attention = F.scaled_dot_product_attention(q, k, v, attn_mask=mask(rows, places, places))
        return {"loss": (attention - x).square().mean()}


def sequences() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, LENGTH, WIDTH, dtype=torch.float64, generator=generator)


def test_an_ensemble_has_its_own_gradients() -> None:
    assert_parity(Ensemble(), args=(sequences(),))


def test_a_mask_of_single_positions_is_that_of_all() -> None:
    padding = torch.ones(SAMPLES, LENGTH, dtype=torch.bool)
    padding[1::2, 4:] = False
    assert_parity(Masked(), args=(sequences(), padding))


def test_an_ensemble_trains_on_four_devices_as_on_one() -> None:
    report = planner.verify(Ensemble(), "dp=2,tp=2", batch={"x": sequences()})
    assert report.ok and report.tolerance == 1e-9, report.table()


class PartlyFrozen(Ensemble):
    def member(self, weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            hidden = F.linear(x, weights["up"])
        return F.linear(hidden, weights["down"])


def test_gradients_that_are_off_inside_are_refused_with_the_line() -> None:
    with pytest.raises(CaptureError, match=r"with torch.no_grad\(\).*torch.vmap cannot be traced: detach its result"):
        capture(PartlyFrozen(), args=(sequences(),))
