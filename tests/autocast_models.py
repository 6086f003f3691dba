"""Models, batches and losses whose float targets have more digits than bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Batch = dict[str, torch.Tensor]
LossFunction = Callable[[torch.Tensor, Batch], torch.Tensor]


def by_hand(outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
    return ((outputs - batch["target"]) ** 2).mean()


def weighted(outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
    return (batch["weight"] * (outputs - batch["target"]).abs()).sum() / batch["weight"].sum()


def soft_targets(outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
    return F.kl_div(F.log_softmax(outputs, -1), batch["share"], reduction="batchmean")


def soft_targets_by_hand(outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
    return (outputs.logsumexp(-1) - (outputs * batch["share"]).sum(-1)).mean()


LOSSES: dict[str, LossFunction] = {
    "mse": lambda outputs, batch: F.mse_loss(outputs, batch["target"]),
    "l1": lambda outputs, batch: F.l1_loss(outputs, batch["target"]),
    "huber": lambda outputs, batch: F.huber_loss(outputs, batch["target"]),
    "binary cross-entropy": lambda outputs, batch: F.binary_cross_entropy_with_logits(outputs, batch["share"]),
    "cross-entropy of shares": lambda outputs, batch: F.cross_entropy(outputs, batch["share"]),
    "kl": soft_targets,
    "kl by hand": soft_targets_by_hand,
    "squares by hand": by_hand,
    "weighted": weighted,
    "of outputs alone": lambda outputs, batch: outputs.square().mean(),
}


def batch_of() -> Batch:
    """Eight samples; targets near 1001, which are 1000 in bfloat16."""
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(8, 16, generator=generator),
        "target": 1001 + 0.3 * torch.randn(8, 4, generator=generator),
        "share": torch.randn(8, 4, generator=generator).softmax(-1),
        "weight": torch.rand(8, 1, generator=generator),
    }


class Perceptron(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)))


class OwnLoss(Perceptron):
    """Computes its loss itself, by hand."""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> Any:
        return {"loss": ((super().forward(x) - target) ** 2).mean()}


class Reconstruction(nn.Module):
    """Its input is its target too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> Any:
        return {"loss": (self.down(F.relu(self.up(x))) - x).square().mean()}


class Layers(nn.Module):
    """Layers one after the other, and a head of four numbers."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(layers), nn.LazyLinear(4)
        with torch.no_grad():
            self(batch_of()["x"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x
        return self.head(x.flatten(1))


class Residual(nn.Module):
    """Adds what it computes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.scale = nn.LayerNorm(16), nn.Linear(16, 16), nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.linear(self.norm(x))) * self.scale


#: What an input in float32 meets first.
FIRST_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: Layers(nn.Unflatten(1, (1, 16)), nn.Conv1d(1, 3, 3)),
    "lstm": lambda: Layers(nn.Unflatten(1, (4, 4)), nn.LSTM(4, 8, batch_first=True)),
    "gru": lambda: Layers(nn.Unflatten(1, (4, 4)), nn.GRU(4, 8, batch_first=True)),
    "attention": lambda: Layers(
        nn.Unflatten(1, (4, 4)), nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    ),
    "layer norm": lambda: Layers(nn.LayerNorm(16)),
    "rms norm": lambda: Layers(nn.RMSNorm(16)),
    "batch norm": lambda: Layers(nn.BatchNorm1d(16)),
    "group norm": lambda: Layers(nn.Unflatten(1, (4, 4)), nn.GroupNorm(2, 4)),
    "residual": lambda: Layers(Residual()),
    "prelu": lambda: Layers(nn.PReLU()),
}


def under_autocast(model: nn.Module, loss_fn: LossFunction, batch: Batch) -> torch.Tensor:
    """The loss on one device; of outputs in float32, which a GPU's autocast makes of them in each loss."""
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(batch["x"])
    return loss_fn(outputs.float(), batch)
