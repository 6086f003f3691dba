"""Fake quantisation (quantisation-aware training): losses and gradients of one device, also where channels are cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.small_models import seeded
from tests.test_runtime import sharded

Quantise = Callable[["Quantised", torch.Tensor], torch.Tensor]


class Quantised(nn.Module):
    """Quantises the weight of its first layer, of which tests cut the output channels."""

    def __init__(self, *, quantise: Quantise) -> None:
        super().__init__()
        self.quantise = quantise
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.register_buffer("scale", torch.tensor(0.05))
        self.register_buffer("zero_point", torch.tensor(1, dtype=torch.int32))
        self.register_buffer("scales", torch.linspace(0.02, 0.08, 8))
        self.register_buffer("zero_points", torch.arange(8, dtype=torch.int32) % 3)
        self.learned = nn.Parameter(torch.linspace(0.02, 0.08, 8))
        self.learned_one = nn.Parameter(torch.tensor([0.05]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.linear(x, self.quantise(self, self.first.weight), self.first.bias)
        return self.second(hidden.tanh()).square().mean()


BY_TORCH: dict[str, Quantise] = {
    "numbers": lambda model, weight: torch.fake_quantize_per_tensor_affine(weight, 0.05, 1, -8, 7),
    "tensors": lambda model, weight: torch.fake_quantize_per_tensor_affine(
        weight, model.scale.float(), model.zero_point, -8, 7
    ),
    "channels": lambda model, weight: torch.fake_quantize_per_channel_affine(
        weight, model.scales.float(), model.zero_points, 0, -8, 7
    ),
}
#: In float32 alone.
LEARNED: dict[str, Quantise] = {
    "learned": lambda model, weight: torch._fake_quantize_learnable_per_tensor_affine(
        weight, model.learned_one, torch.zeros(1), -8, 7, 0.5
    ),
    "learned channels": lambda model, weight: torch._fake_quantize_learnable_per_channel_affine(
        weight, model.learned, torch.zeros(8), 0, -8, 7, 0.5
    ),
}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(kind, dtype) for kind in BY_TORCH for dtype in (torch.float32, torch.float64)]
    + [(kind, torch.float32) for kind in LEARNED],
)
@pytest.mark.parametrize("cut", [True, False], ids=["channels cut", "free"])
def test_it_trains_as_on_one_device(kind: str, dtype: torch.dtype, cut: bool) -> None:
    quantise = {**BY_TORCH, **LEARNED}[kind]
    model = seeded(Quantised, quantise=quantise).to(dtype)
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)
    constraints = {"first.weight": {"tp": "S(0)"}} if cut else None
    with sharded(model, "tp=2", constraints=constraints) as (parallel, _, layout):
        loss = parallel(x)
        loss.backward()
        gradients = parallel.full_gradients()
        node = next(node for key, node in parallel.plan.nodes.items() if "fake_quantize" in key)
        assert not cut or node.strategy[0].startswith("cut")
        with layout.plain():
            expected = model(x)
            expected.backward()
        torch.testing.assert_close(layout.join(loss, ("I",)), expected)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad)
