"""Cross-entropy of a linear layer's logits that are never all held, with the vocabulary sharded over mesh axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist

from runtime import kernels
from runtime.kernels.cross_entropy import LossOptions, check_smoothing
from runtime.kernels.linear_cross_entropy import as_autocast, check_linear, linear_gradients, linear_row_sums
from runtime.kernels.type_rules import gets_gradient, product_type
from runtime.ops.mesh_types import first_of_shard, groups_of
from runtime.ops.vocabulary import reduced_losses, reduced_type


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk_tokens: int | None = None,
    dtype: torch.dtype | None = None,
    vocabulary: int | None = None,
    axes: Sequence[str] = (),
) -> torch.Tensor:
    """``cross_entropy(linear(hidden, weight, bias), target)`` of each position, with few logits held at a time.

    Args:
        hidden: [..., h], R on ``axes``: its gradient is a partial sum.
        weight, bias: [v, h] and [v], sharded along v over ``axes`` (outermost first), whole if there are none.
        target: class indices, [...], the same on all ranks of ``axes``.
        chunk_tokens: positions of which the logits are held at a time; None to choose.
        dtype: of the losses; None for that of ``hidden``.
        vocabulary: size of v on all ranks together; required with ``axes``.

    Returns:
        Losses [...] as ``cross_entropy`` gives them, with its two all-reduces per axis for all positions together.
    """
    if not axes:
        return kernels.linear_cross_entropy(
            hidden,
            weight,
            target,
            bias,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            chunk_tokens=chunk_tokens,
            dtype=dtype,
        )
    assert vocabulary is not None, "a sharded vocabulary needs its whole size"
    check_linear(hidden, weight, bias, target, chunk_tokens)
    check_smoothing(label_smoothing)
    start = first_of_shard(vocabulary, axes, weight.device)
    hidden, weight, bias, usual = as_autocast(hidden, weight, bias)
    loss = LossOptions(vocabulary, ignore_index, label_smoothing, z_loss)
    losses: torch.Tensor = _ShardedLinearCrossEntropy.apply(
        hidden, weight, bias, target, start, loss, chunk_tokens, dtype or usual, groups_of(axes)
    )
    return losses


class _ShardedLinearCrossEntropy(torch.autograd.Function):
    """With local rows of the weight [v / ranks, h]; ``start`` [1] is the class of the first of them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        start: torch.Tensor,
        loss: LossOptions,
        chunk_tokens: int | None,
        dtype: torch.dtype,
        groups: tuple[dist.ProcessGroup, ...],
    ) -> torch.Tensor:
        smoothing = loss.label_smoothing > 0
        largest, sums = linear_row_sums(
            hidden, weight, bias, target, start, smoothing=smoothing, chunk_tokens=chunk_tokens
        )
        losses, statistic = reduced_losses(largest, sums, target, weight.shape[0], loss, groups)
        ctx.save_for_backward(hidden, weight, bias, target, statistic, start)
        ctx.loss, ctx.chunk_tokens = loss, chunk_tokens
        ctx.gradients_together = True  # for whoever would ask for them one by one
        return losses.to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        requested = ctx.needs_input_grad[:3]
        gradients = linear_gradients(requested, grad, ctx.saved_tensors, ctx.loss, chunk_tokens=ctx.chunk_tokens)
        return *gradients, None, None, None, None, None, None

    @staticmethod
    def spmd_typecheck(
        *,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        start: torch.Tensor,
        groups: tuple[dist.ProcessGroup, ...],
    ) -> Any:
        # Targets have no gradient: they are R where the others may be I.
        spmd.rules.ignore(start, target)
        if bias is None:
            losses = product_type("...h,vh->...", hidden, weight)
        else:
            losses = product_type("...h,vh,v->...", hidden, weight, bias)
        operands = (hidden, weight, bias)
        has_gradient = any(map(gets_gradient, operands))
        return reduced_type(losses, groups, has_gradient=has_gradient)
