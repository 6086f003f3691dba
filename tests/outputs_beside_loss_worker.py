"""One rank of the tests of weights that outputs beside the loss depend on, and the loss does not."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import planner
from passes.capture import keep_float64
from tests.ranks import answer, task
from tests.small_models import seeded


class Probed(nn.Module):
    """A probe reads what comes out of one of the layers."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.first, self.last, self.probe = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(16, 3)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.layer = layer

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden, outputs = self.first(x), {}
        for number, layer in enumerate(self.layers):
            hidden = hidden + F.gelu(layer(hidden))
            if number == self.layer:
                outputs["probed"] = self.probe(hidden)
        return {"loss": F.mse_loss(self.last(hidden), y), **outputs}


def batch_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(8, 8, generator=generator, dtype=torch.float64) for name in ("x", "y")}


def differences(fix: dict[str, int], layer: int, *, trains_probe: bool) -> dict[str, float]:
    """How far losses, gradients, the probe's outputs and weights are from one device's, in three steps and behind them.

    Args:
        trains_probe: let the second step's loss depend on the probe too.
    """
    single = seeded(Probed, layer=layer)
    parallel = planner.compile(seeded(Probed, layer=layer), example_inputs=batch_of(0), fix=fix)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (single, parallel)]
    errors = dict.fromkeys(("loss", "gradients", "probed", "weights"), 0.0)
    for number in range(3):
        losses = []
        for model, optimizer in zip((single, parallel), optimizers):
            optimizer.zero_grad()
            outputs = model(**batch_of(number))
            loss = outputs["loss"]
            if trains_probe and number == 1:
                loss = loss + outputs["probed"].square().mean()
            loss.backward()
            losses.append(float(loss.detach()))
        gradients = {name: one.grad for name, one in single.named_parameters() if one.grad is not None}
        _note(errors, "loss", abs(losses[0] - losses[1]))
        _note(errors, "gradients", _largest(parallel.full_gradients(), gradients))
        for optimizer in optimizers:
            optimizer.step()
    with torch.no_grad():
        probed = [model.eval()(**batch_of(3))["probed"] for model in (parallel, single)]
    _note(errors, "probed", float((probed[0] - probed[1]).abs().max()))
    _note(errors, "weights", _largest(parallel.full_state_dict(), single.state_dict()))
    return errors


def _note(errors: dict[str, float], name: str, error: float) -> None:
    errors[name] = max(errors[name], error)


def _largest(tensors: dict[str, torch.Tensor], expected: dict[str, Any]) -> float:
    if set(tensors) != set(expected):
        return float("inf")
    return max(float((tensors[name] - value).abs().max()) for name, value in expected.items())


if __name__ == "__main__":
    cases = task()
    with keep_float64():
        answer([differences(fix, layer, trains_probe=trains_probe) for fix, layer, trains_probe in cases])
