"""Small modules for tests of the runtime."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode


class Mlp(nn.Module):
    """Three blocks of two linears with a residual; positional input, bare tensor out."""

    def __init__(self, *, size: int = 16, hidden: int = 32, outputs: int = 8, layers: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(size, size)
        self.layers = nn.ModuleList(Residual(size, hidden) for _ in range(layers))
        self.last = nn.Linear(size, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class Residual(nn.Module):
    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, hidden)
        self.down = nn.Linear(hidden, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class TiedClassifier(nn.Module):
    """Embedding tied to the output layer, a frozen scale, a buffer; loss if there are labels, dict out."""

    def __init__(self, *, vocabulary: int = 32, size: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size)
        self.middle = nn.Linear(size, size)
        self.output = nn.Linear(size, vocabulary, bias=False)
        self.output.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.full((size,), 0.5), requires_grad=False)
        self.register_buffer("shift", torch.linspace(-1.0, 1.0, size))
        self.unused = nn.Linear(3, 3)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        hidden = torch.tanh(self.middle(self.embedding(tokens)) * self.scale + self.shift)
        logits = self.output(hidden)
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


def squared_error(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    """A loss function for ``Mlp``: the target is the second of the batch."""
    return F.mse_loss(outputs, batch[1])


def mlp_batch(*, batch: int = 8, size: int = 16, outputs: int = 8, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    with maybe_disable_local_tensor_mode():
        generator = torch.Generator().manual_seed(seed)
        return (
            torch.randn(batch, size, generator=generator, dtype=torch.float64),
            torch.randn(batch, outputs, generator=generator, dtype=torch.float64),
        )


def token_batch(*, batch: int = 8, length: int = 6, vocabulary: int = 32, seed: int = 0) -> dict[str, torch.Tensor]:
    """Tokens and labels; each sample ignores another number of labels."""
    with maybe_disable_local_tensor_mode():
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(vocabulary, (batch, length), generator=generator)
        labels = tokens.clone()
        for sample in range(batch):
            labels[sample, : sample % length] = -100
    return {"tokens": tokens, "labels": labels}


def seeded(build: Any, **arguments: Any) -> nn.Module:
    """``build(**arguments)`` in float64 with the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build(**arguments).double()
