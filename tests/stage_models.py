"""Small modules whose steps are awkward to cut into micro-batches or pipeline chunks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode

from tests.small_models import Mlp, Residual

SIZE = 16


class Chain(nn.Module):
    """Three linears in a row; the loss is any function of what they give, the target, and the module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(SIZE, SIZE) for _ in range(3))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.first(x))
        y = self.third(torch.tanh(self.second(hidden)))
        return {"loss": self.loss(y, target), "y": y, "hidden": hidden}

    def loss(self, y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(y, target)


class SumLoss(Chain):
    def loss(self, y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (y - target).square().sum()


class SumOverBatchSize(Chain):
    """The number of samples becomes a constant of the program."""

    def loss(self, y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (y - target).square().sum() / y.shape[0]


class WeightPenalty(Chain):
    """A part of the loss that has nothing to do with the samples."""

    def loss(self, y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        penalty = sum(weight.square().sum() for weight in (self.first.weight, self.third.weight))
        return F.mse_loss(y, target) + 0.1 * penalty


class LearntWeight(Chain):
    """The loss is weighted by a number that is trained, and that is added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.3))

    def loss(self, y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(y, target) * torch.exp(-self.scale) + self.scale


class RootMeanSquare(Chain):
    """The loss of the batch is no sum over its samples."""

    def loss(self, y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(F.mse_loss(y, target))


class MeanOverWeights(Chain):
    """A weighted mean: divided by what must be summed over the whole batch first."""

    def loss(self, y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        weights = target[:, :1].abs()
        return (weights * (y - target).square()).sum() / weights.sum()


class Gated(Chain):
    """Divided by how many of the results a gate, which gets no gradient, lets pass."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(SIZE, 1)

    def loss(self, y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (y - target).square().sum() / ((self.gate(y).detach() > 0).sum() + 1)


class FrozenGate(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.gate.requires_grad_(False)


class Frozen(Chain):
    """The first and the last linear are not trained: the first chunk has no gradients at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.third.requires_grad_(False)


class Skip(nn.Module):
    """What the first linear gives is used again behind all layers, and the input too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.layers = nn.ModuleList(Residual(SIZE, SIZE) for _ in range(4))
        self.last = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = early = self.first(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return {"loss": F.mse_loss(self.last(hidden * early) + x, target)}


class Positions(nn.Module):
    """Position embeddings of indices that are spread over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, SIZE)
        self.layers = nn.ModuleList(Residual(SIZE, SIZE) for _ in range(2))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        positions = torch.arange(x.shape[1]).expand(x.shape[0], x.shape[1])
        x = x + self.embedding(positions)
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.mse_loss(x, target)}


class SharedLayers(nn.Module):
    """One layer, used four times over."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.layer = Residual(SIZE, SIZE)
        self.last = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.first(x)
        for _ in range(4):
            x = self.layer(x)
        return {"loss": F.mse_loss(self.last(x), target)}


class Weighed(nn.Module):
    """A residual layer that a weight of each position scales."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x)) * weight


class SelectedBetweenLayers(nn.Module):
    """Each layer is passed a part of an input that is selected anew before it, as of the edges of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Weighed() for _ in range(4))
        self.last = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor, other: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x, other[..., :1])
        return {"loss": F.mse_loss(self.last(x), target)}


class TwoInputs(nn.Module):
    """The second input joins late; each sample has a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(SIZE, SIZE)
        self.right = nn.Linear(SIZE, SIZE)
        self.both = nn.Linear(2 * SIZE, SIZE)

    def forward(
        self, x: torch.Tensor, other: torch.Tensor, importance: torch.Tensor, target: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.left(x))
        joined = self.both(torch.cat((hidden, torch.tanh(self.right(other))), dim=-1))
        return {"loss": ((joined - target).square().mean(dim=(1, 2)) * importance).sum() / importance.sum()}


class Normalised(nn.Module):
    """Batch norm: the samples of a batch depend on each other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.norm = nn.BatchNorm1d(SIZE, track_running_stats=False)
        self.last = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.norm(self.first(x[:, 0]))
        return {"loss": F.mse_loss(self.last(hidden), target[:, 0])}


class PenalisedMlp(Mlp):
    """Repeated blocks whose weights are in the loss too."""

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None) -> Any:
        y = super().forward(x)
        penalty = sum(layer.up.weight.square().sum() for layer in self.layers)
        return {"loss": F.mse_loss(y, target) + 0.1 * penalty}


def batch_of(model: nn.Module, *, samples: int = 8, length: int = 6) -> dict[str, torch.Tensor]:
    """One batch of what the model's ``forward`` takes."""
    with maybe_disable_local_tensor_mode():
        generator = torch.Generator().manual_seed(0)
        names = type(model).forward.__code__.co_varnames[1 : type(model).forward.__code__.co_argcount]
        shapes = {"importance": (samples,)}
        if isinstance(model, PenalisedMlp):
            shapes |= {"target": (samples, length, 8)}
        return {
            name: torch.randn(shapes.get(name, (samples, length, SIZE)), generator=generator, dtype=torch.float64)
            for name in names
        }
