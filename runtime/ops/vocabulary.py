"""Embedding and cross-entropy with the vocabulary sharded over mesh axes; nothing of its size is ever gathered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from spmd_types import I, P, R, V

from runtime import kernels
from runtime.kernels.cross_entropy import (
    LossOptions,
    check_smoothing,
    check_target,
    dtype_of_losses,
    logits_gradient,
    losses_of,
    row_sums,
)
from runtime.kernels.type_rules import gets_gradient
from runtime.ops.mesh_types import first_of_shard, groups_of
from runtime.torch_compat.process_groups import functional_collectives as funcol


def embedding(
    indices: torch.Tensor,
    weight: torch.Tensor,
    *,
    vocabulary: int,
    axes: Sequence[str],
    padding_idx: int | None = None,
) -> torch.Tensor:
    """Rows of a table whose rows are sharded over ``axes`` (outermost first): P on each of them.

    Args:
        indices: integers, any shape, in [0, vocabulary), the same on all ranks of ``axes``.
        weight: this rank's rows, [vocabulary / ranks, hidden]; the last ranks may have fewer.
        vocabulary: number of rows of the whole table.
        padding_idx: row that gets no gradient.

    Returns:
        [*indices.shape, hidden], zero where the row is another rank's.
    """
    local = indices - first_of_shard(vocabulary, axes, weight.device)
    rows = F.embedding(local.clamp(0, weight.shape[0] - 1), weight)
    if padding_idx is not None:
        rows = torch.where((indices == padding_idx).unsqueeze(-1), rows.detach(), rows)
    elsewhere = (local < 0) | (local >= weight.shape[0])
    vectors = rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)
    for axis in axes:
        vectors = spmd.reinterpret(vectors, axis, src=V, dst=P)
    return vectors


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reuse_logits: bool = False,
    dtype: torch.dtype | None = None,
    vocabulary: int | None = None,
    axes: Sequence[str] = (),
) -> torch.Tensor:
    """Cross-entropy of each position; 0 where the target is ``ignore_index``.

    Args:
        logits: [..., v], sharded along v over ``axes`` (outermost first), whole if there are none.
        target: class indices, [...], the same on all ranks of ``axes``.
        label_smoothing: weight of the uniform distribution over all classes, in [0, 1].
        z_loss: coefficient of the squared log-sum-exp.
        reuse_logits: write the gradient of the logits over the logits, which nobody else may read.
        dtype: of the losses; by default that of ``logits``.
        vocabulary: size of v on all ranks together; required with ``axes``.

    Returns:
        Losses [...]; I on ``axes`` (R if nothing requires a gradient). The vocabulary costs
        two all-reduces per axis: of the largest logit, and of 2 sums (3 with smoothing) per position.
    """
    if not axes:
        return kernels.cross_entropy(
            logits,
            target,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            reuse_logits=reuse_logits,
            dtype=dtype,
        )
    assert vocabulary is not None, "a sharded vocabulary needs its whole size"
    check_target(logits.shape[:-1], target)
    check_smoothing(label_smoothing)
    start = first_of_shard(vocabulary, axes, logits.device)
    loss = LossOptions(vocabulary, ignore_index, label_smoothing, z_loss)
    losses: torch.Tensor = _ShardedCrossEntropy.apply(
        logits, target, start, loss, reuse_logits, dtype or dtype_of_losses(logits), groups_of(axes)
    )
    return losses


class _ShardedCrossEntropy(torch.autograd.Function):
    """Cross-entropy over local logits [..., v / ranks]; ``start`` [1] is the class of the first of them."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        start: torch.Tensor,
        loss: LossOptions,
        reuse_logits: bool,
        dtype: torch.dtype,
        groups: tuple[dist.ProcessGroup, ...],
    ) -> torch.Tensor:
        largest, sums = row_sums(logits, target, start, smoothing=loss.label_smoothing > 0)
        losses, statistic = reduced_losses(largest, sums, target, logits.shape[-1], loss, groups)
        ctx.save_for_backward(logits, target, start, statistic)
        ctx.options = (loss, reuse_logits)
        return losses.to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        logits, target, start, statistic = ctx.saved_tensors
        loss, reuse_logits = ctx.options
        if torch.is_grad_enabled():  # a gradient that is differentiated reads the logits again
            ctx.options = (loss, False)
        result = logits_gradient(grad, logits, target, statistic, start, loss, reuse_logits=reuse_logits)
        return result, None, None, None, None, None, None

    @staticmethod
    def spmd_typecheck(
        *, logits: torch.Tensor, target: torch.Tensor, start: torch.Tensor, groups: tuple[dist.ProcessGroup, ...]
    ) -> Any:
        # Targets have no gradient: they are R where logits may be I.
        spmd.rules.ignore(start, target)
        losses = spmd.rules.einsum("...v->...", logits)
        return reduced_type(losses, groups, has_gradient=gets_gradient(logits))


def reduced_losses(
    largest: torch.Tensor,
    sums: torch.Tensor,
    target: torch.Tensor,
    width: int,
    loss: LossOptions,
    groups: tuple[dist.ProcessGroup, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """``kernels.cross_entropy.losses_of`` from the ``row_sums`` of ``width`` classes of every rank.

    Two all-reduces per group: of ``largest``, and of ``sums`` compared with the largest of all.
    """
    highest = _reduced(largest, "max", groups)
    # every sum is of differences from the largest logit: sums of the logits themselves would round them away
    lower = largest - highest
    parts = [sums[0] * lower.exp(), sums[1]]
    if loss.label_smoothing:
        parts.append(sums[2] + width * lower)
    return losses_of(highest, _reduced(torch.stack(parts), "sum", groups), target, loss)


def reduced_type(losses: Any, groups: tuple[dist.ProcessGroup, ...], *, has_gradient: bool) -> Any:
    """The type of losses that were reduced over ``groups``: where no gradient flows, R."""
    for group in groups:
        losses = spmd.rules.all_reduce(losses, group, src=V, dst=I if has_gradient else R)
    return losses


def _reduced(tensor: torch.Tensor, operation: str, groups: tuple[dist.ProcessGroup, ...]) -> torch.Tensor:
    for group in groups:
        tensor = funcol.wait_tensor(funcol.all_reduce(tensor.contiguous(), operation, group))
    return tensor
