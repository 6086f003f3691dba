"""Embedding and cross-entropy with the vocabulary sharded over mesh axes; nothing of its size is ever gathered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from spmd_types import I, P, R, V

from runtime.ops.types import first_of_shard, groups_of


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
        weight: this rank's rows, [vocabulary / ranks, hidden].
        vocabulary: number of rows of the whole table.
        padding_idx: row that gets no gradient.

    Returns:
        [*indices.shape, hidden], zero where the row is another rank's.
    """
    local = indices - first_of_shard(vocabulary, weight.shape[0], axes, weight.device)
    rows = F.embedding(local.clamp(0, weight.shape[0] - 1), weight)
    if padding_idx is not None:
        rows = torch.where((indices == padding_idx).unsqueeze(-1), rows.detach(), rows)
    elsewhere = (local < 0) | (local >= weight.shape[0])
    found = rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)
    for axis in axes:
        found = spmd.reinterpret(found, axis, src=V, dst=P)
    return found


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    vocabulary: int | None = None,
    axes: Sequence[str] = (),
) -> torch.Tensor:
    """Cross-entropy of each position; 0 where the target is ``ignore_index``.

    Args:
        logits: [..., v], sharded along v over ``axes`` (outermost first), whole if there are none.
        target: class indices, [...], the same on all ranks of ``axes``.
        label_smoothing: weight of the uniform distribution over all classes, in [0, 1].
        vocabulary: size of v on all ranks together; required with ``axes``.

    Returns:
        Losses [...] in the dtype of ``logits``; I on ``axes`` (R if nothing requires a gradient). The vocabulary costs
        two all-reduces per axis: of the largest logit, and of 2 sums (3 with smoothing) per position.
    """
    if not axes:
        losses = F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]),
            target.reshape(-1),
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction="none",
        )
        return losses.reshape(target.shape)
    assert vocabulary is not None, "a sharded vocabulary needs its whole size"
    start = first_of_shard(vocabulary, logits.shape[-1], axes, logits.device)
    return _ShardedCrossEntropy.apply(logits, target, start, ignore_index, label_smoothing, vocabulary, groups_of(axes))


class _ShardedCrossEntropy(torch.autograd.Function):
    """Cross-entropy over local logits [..., v / ranks]; ``start`` [1] is the class of the first of them."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        start: torch.Tensor,
        ignore_index: int,
        label_smoothing: float,
        vocabulary: int,
        groups: tuple[dist.ProcessGroup, ...],
    ) -> torch.Tensor:
        scores = _wide(logits)
        largest = _reduced(scores.amax(-1), "max", groups)
        # every sum is of differences from the largest logit: sums of the logits themselves would round them away
        scores = scores - largest.unsqueeze(-1)
        place, inside = _local_place(target, start, scores.shape[-1])
        chosen = scores.gather(-1, place.unsqueeze(-1)).squeeze(-1).masked_fill(~inside, 0.0)
        parts = [scores.exp().sum(-1), chosen]
        if label_smoothing:
            parts.append(scores.sum(-1))
        sums = _reduced(torch.stack(parts), "sum", groups)
        log_sum = sums[0].log()
        losses = log_sum - (1.0 - label_smoothing) * sums[1]
        if label_smoothing:
            losses = losses - label_smoothing / vocabulary * sums[2]
        ctx.save_for_backward(logits, target, start, largest, log_sum)
        ctx.options = (ignore_index, label_smoothing, vocabulary)
        return losses.masked_fill(target == ignore_index, 0.0).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        logits, target, start, largest, log_sum = ctx.saved_tensors
        ignore_index, label_smoothing, vocabulary = ctx.options
        scores = _wide(logits) - largest.unsqueeze(-1)
        place, inside = _local_place(target, start, scores.shape[-1])
        wanted = (1.0 - label_smoothing) * inside.unsqueeze(-1).to(scores.dtype)
        slope = (scores - log_sum.unsqueeze(-1)).exp() - label_smoothing / vocabulary
        slope = slope.scatter_add(-1, place.unsqueeze(-1), -wanted)
        weight = _wide(grad).masked_fill(target == ignore_index, 0.0)
        return (slope * weight.unsqueeze(-1)).to(logits.dtype), None, None, None, None, None, None

    @staticmethod
    def spmd_typecheck(
        *, logits: torch.Tensor, target: torch.Tensor, start: torch.Tensor, groups: tuple[dist.ProcessGroup, ...]
    ) -> Any:
        spmd.rules.ignore(start)
        losses = spmd.rules.einsum("...v,...->...", logits, target)
        whole = I if logits.requires_grad else R
        for group in groups:
            losses = spmd.rules.all_reduce(losses, group, src=V, dst=whole)
        return losses


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """At least float32."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _local_place(target: torch.Tensor, start: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each target stands among this rank's classes (clamped), and whether it is one of them."""
    place = target - start
    return place.clamp(0, count - 1), (place >= 0) & (place < count)


def _reduced(tensor: torch.Tensor, operation: str, groups: tuple[dist.ProcessGroup, ...]) -> torch.Tensor:
    for group in groups:
        tensor = funcol.wait_tensor(funcol.all_reduce(tensor.contiguous(), operation, group))
    return tensor
