"""A contrastive loss is over the whole batch, and its logits of all pairs stay where they are computed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import planner

pytestmark = pytest.mark.usefixtures("models_traced_once")

WIDTH, FEATURES = 32, 16


class TwoTowers(nn.Module):
    """Texts and pictures are mapped to features; ``pair`` compares every text with every picture."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = nn.Linear(WIDTH, FEATURES), nn.Linear(WIDTH, FEATURES)
        self.scale, self.bias = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(-1.0))

    def logits(self, texts: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        text, image = F.normalize(self.text(texts), dim=-1), F.normalize(self.image(images), dim=-1)
        return text @ image.T * self.scale.exp()


class Softmax(TwoTowers):
    """CLIP's loss: every text finds its picture, every picture its text."""

    def forward(self, texts: torch.Tensor, images: torch.Tensor) -> tuple[torch.Tensor]:
        logits = self.logits(texts, images)
        pair = torch.arange(len(logits), device=logits.device)
        return ((F.cross_entropy(logits, pair) + F.cross_entropy(logits.T, pair)) / 2,)


class Sigmoid(TwoTowers):
    """SigLIP's loss: each pair is a question of its own."""

    def forward(self, texts: torch.Tensor, images: torch.Tensor) -> tuple[torch.Tensor]:
        logits = self.logits(texts, images) + self.bias
        signs = 2 * torch.eye(logits.shape[0], device=logits.device) - torch.ones_like(logits)
        return (-F.logsigmoid(signs * logits).sum(-1).mean(),)


def batch(size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(size, WIDTH, generator=generator) for name in ("texts", "images")}


@pytest.mark.parametrize("model", [Softmax, Sigmoid])
def test_no_device_is_sent_the_logits_of_all_pairs(model: type[TwoTowers]) -> None:
    pairs = 2048
    plan = planner.plan(model(), "dgx-h100:1", mesh="dp=8", example_inputs=batch(pairs))
    exchanged = {entry.collective: entry.num_bytes for entry in plan.collectives}
    logits = pairs * pairs * 4
    assert sum(exchanged.values()) < logits / 8
    assert not plan.notes


@pytest.mark.parametrize("mesh", ["dp=2,tp=2"])
@pytest.mark.parametrize("model", [Softmax, Sigmoid])
def test_the_loss_is_that_of_the_whole_batch(model: type[TwoTowers], mesh: str) -> None:
    report = planner.verify(model(), mesh, batch=batch(8), steps=1)
    assert report.ok and report.largest_error < 1e-9, report.table()
