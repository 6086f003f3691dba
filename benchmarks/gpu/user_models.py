"""Models as users write them, each with batches, for ``benchmarks.gpu.training``."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

Batch = dict[str, torch.Tensor]


class UserModel(NamedTuple):
    """``batch`` makes one on the CPU, of the model's dtype."""

    make: Callable[[], nn.Module]
    batch: Callable[[torch.dtype], Batch]
    dtype: torch.dtype = torch.float64


class Tagger(nn.Module):
    """Tied weights, a frozen layer, a parameter without dims."""

    def __init__(self, width: int = 64, vocabulary: int = 100) -> None:
        super().__init__()
        self.embedding, self.frozen = nn.Embedding(vocabulary, width), nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(3)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.embedding(x))
        for block in self.blocks:
            hidden = hidden + torch.tanh(self.scale) * block(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, stride=2), nn.GroupNorm(4, 32), nn.SiLU(), nn.AdaptiveAvgPool2d(1),
        )  # fmt: skip
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.layers(x).flatten(1)), y)


class Recurrent(nn.Module):
    """An LSTM of two layers and a GRU in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 32, 2, batch_first=True)
        self.gru = nn.GRU(32, 16, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.head(self.gru(self.lstm(x)[0])[0])[:, -1, 0], y)


class Operators(nn.Module):
    """Attention of torch's own layer, Fourier transforms, scans, sorting, scattering, embedding bags."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.bag, self.act = nn.EmbeddingBag(50, 32, mode="mean"), nn.PReLU()
        self.table = nn.Parameter(torch.randn(50, 32))

    def forward(self, x: torch.Tensor, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        hidden = torch.fft.irfft(torch.fft.rfft(hidden, dim=1) * 0.9, n=hidden.shape[1], dim=1)
        hidden = hidden + self.act(hidden.cumsum(1) / 10) + self.bag(ids)[:, None]
        values, places = hidden.topk(3, -1)
        hidden = hidden.scatter_add(-1, places, values.sigmoid())
        hidden = hidden + hidden.sort(-1)[0].softmax(-1) + torch.logsumexp(hidden, -1, keepdim=True)
        scores = F.normalize(hidden.flip(1), dim=-1) @ self.table.T
        return F.huber_loss(scores.mean(1), y)


class NamesItsGpu(nn.Module):
    """A forward that says ``device="cuda"`` itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        places = torch.arange(16, device="cuda").to(x.dtype) + torch.zeros(16).cuda()
        return F.mse_loss(self.layer(x) + torch.sin(places), y)


class Drawing(nn.Module):
    """Dropout, dropout of attention, noise: what plans draw does not depend on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.dropout = nn.Linear(32, 64), nn.Linear(64, 32), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.second(self.dropout(F.gelu(self.first(x)))) + 0.1 * torch.randn_like(x)
        heads = hidden.view(4, 2, 8, 4)
        hidden = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2)
        noise = torch.rand(hidden.shape, device=hidden.device, dtype=hidden.dtype)
        return (F.dropout(hidden, 0.5) * noise).square().mean()


def tokens(dtype: torch.dtype, rows: int = 8) -> Batch:
    """A batch of ``Tagger``."""
    return {"x": torch.randint(100, (rows, 16)), "y": torch.randint(100, (rows, 16))}


def _images(dtype: torch.dtype) -> Batch:
    return {"x": torch.randn(8, 3, 32, 32, dtype=dtype), "y": torch.randint(10, (8,))}


def _sequences(dtype: torch.dtype) -> Batch:
    return {"x": torch.randn(8, 12, 16, dtype=dtype), "y": torch.randn(8, dtype=dtype)}


def _mixed(dtype: torch.dtype) -> Batch:
    ids = torch.randint(50, (8, 5))
    return {"x": torch.randn(8, 12, 32, dtype=dtype), "ids": ids, "y": torch.randn(8, 50, dtype=dtype)}


def _vectors(dtype: torch.dtype) -> Batch:
    return {"x": torch.randn(8, 16, dtype=dtype), "y": torch.randn(8, 16, dtype=dtype)}


USER_MODELS = {
    "tagger": UserModel(Tagger, tokens),
    "convolutions": UserModel(Convolutions, _images),
    "recurrent layers": UserModel(Recurrent, _sequences, torch.float32),
    "many operators": UserModel(Operators, _mixed),
    "a forward that names the GPU": UserModel(NamesItsGpu, _vectors),
}
