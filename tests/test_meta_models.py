"""Programs that are made of a model on meta run on what is loaded into it later, buffers included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import planner
from tests.small_models import seeded


class Scaled(nn.Module):
    """A buffer in the state dict, and one outside of it that no file holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("scale", torch.arange(1.0, 9.0))
        self.register_buffer("weights", torch.arange(1.0, 9.0) / 4, persistent=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return {"loss": (x * self.weights).square().mean()}


X = {"x": torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(4, 8)}


@pytest.mark.parametrize("options", [{}, {"fix": {"zero": 0}}])
def test_what_is_loaded_is_what_programs_read(options: dict[str, Any]) -> None:
    single = seeded(Scaled)
    with torch.device("meta"):
        empty = Scaled().double()
    parallel = planner.compile(empty, "dp=1", example_inputs=X, **options)
    parallel.load_full_state_dict(single.state_dict())
    with pytest.raises(ValueError, match="'weights' still on the meta device"):
        parallel.train_step(**X)
    parallel.load_full_state_dict({"weights": single.weights}, strict=False)
    for scale in (single.scale.clone(), torch.ones(8, dtype=torch.float64)):
        with torch.no_grad():
            single.scale.copy_(scale)
        parallel.load_full_state_dict({"scale": scale}, strict=False)
        single.zero_grad()
        parallel.zero_grad()
        loss = single(**X)["loss"]
        loss.backward()
        torch.testing.assert_close(parallel.train_step(**X), loss.detach(), rtol=1e-12, atol=0)
        gradients = {name: parameter.grad for name, parameter in single.named_parameters()}
        torch.testing.assert_close(dict(parallel.full_gradients()), gradients, rtol=1e-9, atol=1e-15)
