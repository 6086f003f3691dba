"""Verification in float64: nothing is rounded on the way, and zero gradients do not become steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import planner
from passes.capture import keep_float64

#: Floats that models make of sizes and whole numbers in a dtype of their own.
MADE: dict[str, Callable[[], torch.Tensor]] = {
    "a size": lambda: torch.zeros(2, dtype=torch.float32),
    "positions": lambda: torch.arange(4, dtype=torch.float32),
    "a sum": lambda: torch.ones(2, dtype=torch.int64).cumsum(0, dtype=torch.float32),
    "float": lambda: torch.ones(2, dtype=torch.int64).float(),
    "to": lambda: torch.ones(2, dtype=torch.bool).to(torch.float32),
    "type": lambda: torch.ones(2, dtype=torch.int32).type(torch.bfloat16),
}


@pytest.mark.parametrize("name", MADE)
def test_what_is_made_of_no_floats_is_wide(name: str) -> None:
    with keep_float64(new_too=True):
        assert MADE[name]().dtype == torch.float64
    with keep_float64():
        assert MADE[name]().dtype != torch.float64


def test_bits_that_are_read_as_floats_stay() -> None:
    bits = torch.tensor([0x3F800000], dtype=torch.int32)
    with keep_float64(new_too=True):
        assert bits.view(torch.float32).item() == 1.0 and bits.view(dtype=torch.float32).item() == 1.0


class BiasBeforeNorm(nn.Module):
    """The gradient of a bias that the norm takes out again is zero, and rounding of the others' size is left of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.outer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": 1e4 * self.outer(self.norm(self.inner(x)).relu()).square().sum()}


def test_a_gradient_of_rounding_alone_moves_no_weight() -> None:
    torch.manual_seed(0)
    report = planner.verify(BiasBeforeNorm(), "dp=2", batch={"x": torch.randn(16, 8)})
    assert report.ok and report.largest_error < 1e-9


class KeepsAngles(nn.Module):
    """Keeps what it has computed once outside of its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.angles: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.angles is None:
            self.angles = torch.arange(8, dtype=torch.float32) / 7
        return {"loss": (self.inner(x) * self.angles.cos()).square().sum()}


def test_a_model_that_has_kept_floats_of_an_earlier_call_is_traced() -> None:
    torch.manual_seed(0)
    model, x = KeepsAngles(), torch.randn(8, 8)
    model(x)
    assert planner.verify(model, "dp=2", batch={"x": x}).ok


#: Products of a tensor that is wide and one that the model made in a dtype of its own.
MIXED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "operator": lambda wide, narrow: wide.float() @ narrow,
    "operator the other way round": lambda wide, narrow: narrow @ wide.to(torch.float32),
    "einsum": lambda wide, narrow: torch.einsum("ij,jk->ik", wide.float(), narrow),
    "linear": lambda wide, narrow: nn.functional.linear(wide.float(), narrow, bias=narrow[0]),
}


@pytest.mark.parametrize("name", MIXED)
def test_products_of_a_wide_and_a_narrow_tensor_are_wide(name: str) -> None:
    wide, narrow = torch.full((2, 2), 1 / 3, dtype=torch.float64), torch.arange(4.0).reshape(2, 2)
    with keep_float64():
        product = MIXED[name](wide, narrow)
        assert torch.equal(product, MIXED[name](wide, narrow.double())) and product.dtype == torch.float64
