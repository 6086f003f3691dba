"""Small chunks with everything that may cross a cut, and the same model on one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from runtime.pipeline import TensorSpec

BATCH, SKIP = 3, 4
#: How a chunk holds its weights and what it keeps: see ``Chunk``.
VARIANTS = ("plain", "checkpoint", "selective", "token", "token-checkpoint", "frozen-start", "frozen-middle")


def width(cut: int) -> int:
    """Features of the hidden state that crosses before chunk ``cut``: uneven."""
    return 4 + 3 * (cut % 3)


def cut_specs(cut: int, variant: str) -> tuple[TensorSpec, ...]:
    """What crosses before chunk ``cut``: hidden state, a skip connection, ids, a constant, something nobody reads."""
    grows = variant != "frozen-start" or cut > 1
    made_by_first = variant != "frozen-start"
    return (
        TensorSpec((BATCH, width(cut)), torch.float64, grows),
        TensorSpec((BATCH, SKIP), torch.float64, made_by_first),
        TensorSpec((BATCH,), torch.int64, False),
        TensorSpec((BATCH, 1), torch.float64, False),
        TensorSpec((2,), torch.float64, made_by_first),
    )


class Weights(torch.autograd.Function):
    """A token becomes all weights of a chunk; their gradients go straight to the owners."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, owners: list[nn.Parameter]) -> Any:
        ctx.set_materialize_grads(False)
        ctx.owners = owners
        return tuple(owner.detach().clone() for owner in owners)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        for owner, gradient in zip(ctx.owners, gradients):
            if gradient is not None:
                owner.grad = gradient.clone() if owner.grad is None else owner.grad + gradient
        return torch.zeros(()), None


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_matmul = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_matmul else CheckpointPolicy.PREFER_RECOMPUTE


class Chunk:
    """One chunk as a ``StageRunner``. The variant says where weights come from and what is run again."""

    def __init__(self, index: int, num_chunks: int, variant: str = "plain") -> None:
        generator = torch.Generator().manual_seed(index)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(0.5 * torch.randn(*shape, generator=generator, dtype=torch.float64))

        before, after = width(index), width(index + 1)
        self.index, self.num_chunks, self.variant = index, num_chunks, variant
        self.received = () if index == 0 else cut_specs(index, variant)
        self.sent = () if index == num_chunks - 1 else cut_specs(index + 1, variant)
        self.weights = [
            weight(before),
            weight(after, before),
            weight(after),
            weight(after, after),
            weight(5, after),
            weight(SKIP, before),
        ]
        frozen = (variant == "frozen-start" and index == 0) or (variant == "frozen-middle" and index == 1)
        for owner in self.weights:
            owner.requires_grad_(not frozen)
        self.token = nn.Parameter(torch.zeros(()))
        self.tokens = [self.token] if variant.startswith("token") else self.weights
        self.fails_at: int | None = None
        self.gradients_enabled: list[bool] = []

    def run(self, received: tuple[torch.Tensor, ...], microbatch: int) -> tuple[torch.Tensor, ...]:
        if microbatch == self.fails_at:
            raise ArithmeticError("this chunk fails")
        self.gradients_enabled.append(torch.is_grad_enabled())
        if not received:
            received = first_inputs(microbatch)
        x, skip, ids, scale, spare = received
        x, memory = self._remembered(self._body)(x, ids, scale)
        if self.index == 0:
            skip, spare = memory, memory[0, :2] * 2
        if self.index == self.num_chunks - 1:
            return (((x - target(microbatch, x)) ** 2).sum() / 7 + (skip * skip * scale).sum(),)
        return x, skip, ids, scale, spare

    def _remembered(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if self.variant in ("checkpoint", "token-checkpoint"):
            return lambda *args: checkpoint(function, *args, use_reentrant=False)
        if self.variant == "selective":
            contexts = lambda: create_selective_checkpoint_contexts(keep_products)  # noqa: E731
            return lambda *args: checkpoint(function, *args, use_reentrant=False, context_fn=contexts)
        return function

    def _body(self, x: torch.Tensor, ids: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights = Weights.apply(self.token, self.weights) if self.variant.startswith("token") else self.weights
        gain, up, bias, square, table, side = weights
        normed = x * gain
        memory = torch.tanh(F.linear(normed, side))
        h = torch.tanh(F.linear(normed, up, bias)) * scale + F.embedding(ids, table)
        h = h + torch.tanh(F.linear(F.linear(h * bias, square), square)) * bias
        return h.t().contiguous().t(), memory


def first_inputs(microbatch: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1000 + microbatch)
    x = torch.randn(BATCH, width(0), generator=generator, dtype=torch.float64)
    ids = torch.randint(0, 5, (BATCH,), generator=generator)
    scale = torch.rand(BATCH, 1, generator=generator, dtype=torch.float64)
    return x, torch.zeros(()), ids, scale, torch.zeros(())


def target(microbatch: int, like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2000 + microbatch)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64)


@functools.cache
def on_one_process(
    num_chunks: int, num_microbatches: int, variant: str
) -> tuple[list[torch.Tensor], list[list[torch.Tensor | None]]]:
    """Losses of the micro-batches, and the gradients of every chunk's weights."""
    frozen = variant if variant.startswith("frozen") else "plain"
    chunks = [Chunk(index, num_chunks, frozen) for index in range(num_chunks)]
    losses = []
    for microbatch in range(num_microbatches):
        tensors: tuple[torch.Tensor, ...] = ()
        for chunk in chunks:
            tensors = chunk.run(tensors, microbatch)
        if tensors[0].requires_grad:
            tensors[0].backward()
        losses.append(tensors[0].detach())
    return losses, [[owner.grad for owner in chunk.weights] for chunk in chunks]
