"""A small mixture of experts that calls the operator itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from runtime import kernels  # noqa: F401  (registers torch.ops.meshwright)


class Mixture(nn.Module):
    """A residual layer of experts with softmax routing; every token takes ``k`` of them."""

    def __init__(
        self, *, size: int, inner: int, num_experts: int, k: int, activation: str, biases: bool, balanced: bool
    ) -> None:
        super().__init__()
        halves = 2 if activation.startswith(("swiglu", "geglu")) else 1
        self.k, self.activation = k, activation
        self.register_buffer("e_score_correction_bias", torch.zeros(num_experts) if balanced else None)
        self.norm = nn.LayerNorm(size)
        self.router = nn.Linear(size, num_experts, bias=False)
        self.gate_up = nn.Parameter(torch.randn(num_experts, halves * inner, size) / size**0.5)
        self.down = nn.Parameter(torch.randn(num_experts, size, inner) / inner**0.5)
        self.gate_up_bias = nn.Parameter(0.1 * torch.randn(num_experts, halves * inner)) if biases else None
        self.down_bias = nn.Parameter(0.1 * torch.randn(num_experts, size)) if biases else None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of ``x`` and the experts' outputs, and each token's probabilities of the experts."""
        tokens = self.norm(x)
        probabilities = self.router(tokens).softmax(-1)
        scores, ids = self.route(probabilities)
        outputs = torch.ops.meshwright.experts(
            tokens, ids, scores, self.gate_up, self.down, self.gate_up_bias, self.down_bias, self.activation
        )
        return x + outputs, probabilities

    def route(self, probabilities: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and ids of the experts that each token takes; a bias only changes which."""
        if self.e_score_correction_bias is None:
            return probabilities.topk(self.k)
        ids = (probabilities + self.e_score_correction_bias).topk(self.k)[1]
        return probabilities.gather(-1, ids), ids


class MixtureModel(nn.Module):
    """Tokens → embedding → mixtures → logits → loss."""

    def __init__(
        self,
        *,
        vocabulary: int = 32,
        size: int = 16,
        inner: int = 8,
        num_experts: int = 4,
        k: int = 2,
        layers: int = 2,
        activation: str = "swiglu",
        biases: bool = False,
        balanced: bool = False,
        balance_loss: float = 0.0,
    ) -> None:
        super().__init__()
        self.balance_loss = balance_loss
        self.embedding = nn.Embedding(vocabulary, size)
        self.layers = nn.ModuleList(
            Mixture(
                size=size,
                inner=inner,
                num_experts=num_experts,
                k=k,
                activation=activation,
                biases=biases,
                balanced=balanced,
            )
            for _ in range(layers)
        )
        self.output = nn.Linear(size, vocabulary, bias=False)

    def loads(self, tokens: torch.Tensor) -> dict[str, list[int]]:
        """How many pairs of a token and a choice each expert of each layer gets."""
        x, result = self.embedding(tokens), {}
        for place, layer in enumerate(self.layers):
            x, probabilities = layer(x)
            _, ids = layer.route(probabilities)
            result[f"layers.{place}"] = torch.bincount(ids.flatten(), minlength=len(layer.down)).tolist()
        return result

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, balance = self.embedding(tokens), torch.zeros(())
        for layer in self.layers:
            x, probabilities = layer(x)
            if self.balance_loss:
                balance = balance + imbalance(probabilities)
        loss = F.cross_entropy(self.output(x).flatten(0, 1), labels.flatten())
        return loss + self.balance_loss * balance if self.balance_loss else loss


def imbalance(probabilities: torch.Tensor) -> torch.Tensor:
    """The loss of Switch transformers: experts × Σ share of the tokens × mean probability."""
    num_experts = probabilities.shape[-1]
    shares = F.one_hot(probabilities.argmax(-1), num_experts).to(probabilities.dtype).mean((0, 1))
    return num_experts * (shares * probabilities.mean((0, 1))).sum()


def mixture(**options: object) -> MixtureModel:
    """The model in float64, from a fixed seed."""
    torch.manual_seed(0)
    return MixtureModel(**options).double()  # type: ignore[arg-type]


def mixture_batch(*, batch: int = 8, length: int = 6, vocabulary: int = 32) -> dict[str, torch.Tensor]:
    """One global batch."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocabulary, (batch, length), generator=generator)
    return {"tokens": tokens, "labels": tokens.roll(-1, 1)}
