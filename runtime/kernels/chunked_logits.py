"""Losses of a linear layer and their gradients, a chunk of tokens at a time, so that all logits never exist."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from runtime.kernels.cross_entropy import LossOptions, autocasts, check_classes, losses_of
from runtime.kernels.logit_rows import shapes_of_sums

#: Fewest tokens in a chunk. Each chunk reads and writes the float32 gradient of the weight once, 8 bytes for an
#: element, and multiplies 2·tokens times for it: with fewer tokens a GPU would spend most of the time on the former.
LEAST_CHUNK = 1024


def tokens_at_a_time(tokens: int, hidden: int, vocabulary: int) -> int:
    """Tokens in a chunk: so many that their logits are as large as ``hidden`` of all tokens, but not too few."""
    return min(max(-(-tokens * hidden // max(vocabulary, 1)), LEAST_CHUNK), max(tokens, 1))


def chunks(hidden: torch.Tensor, weight: torch.Tensor, chunk_tokens: int | None) -> Iterator[slice]:
    """Places of the tokens of each chunk among all."""
    tokens = hidden.shape[:-1].numel()
    step = chunk_tokens or tokens_at_a_time(tokens, hidden.shape[-1], weight.shape[0])
    for first in range(0, tokens, step):
        yield slice(first, min(first + step, tokens))


def sums_with(row_sums: Callable[..., Any]) -> Callable[..., Any]:
    def run(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        start: torch.Tensor | None,
        smoothing: bool,
        chunk_tokens: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        largest, sums = shapes_of_sums(hidden, target, start, smoothing)
        flat_largest, flat_sums = largest.view(-1), sums.view(len(sums), -1)
        rows, classes = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
        with without_autocast(hidden):
            for lines in chunks(hidden, weight, chunk_tokens):
                largest_and_sums = row_sums(F.linear(rows[lines], weight, bias), classes[lines], start, smoothing)
                flat_largest[lines], flat_sums[:, lines] = largest_and_sums
        return largest, sums

    return run


def losses_with(row_sums: Callable[..., Any]) -> Callable[..., Any]:
    sums_of = sums_with(row_sums)

    def run(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        chunk_tokens: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        if target.device.type == "cpu":
            check_classes(target, weight.shape[0], ignore_index)
        loss = LossOptions(weight.shape[0], ignore_index, label_smoothing, z_loss)
        largest, sums = sums_of(hidden, weight, bias, target, None, label_smoothing > 0, chunk_tokens)
        losses, _ = losses_of(largest, sums, target, loss)
        return losses.to(dtype or hidden.dtype)

    return run


def gradients_with(row_sums: Callable[..., Any], row_gradient: Callable[..., Any]) -> Callable[..., Any]:
    def run(
        grad: torch.Tensor,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        statistic: torch.Tensor | None,
        start: torch.Tensor | None,
        vocabulary: int,
        ignore_index: int,
        label_smoothing: float,
        z_loss: float,
        chunk_tokens: int | None,
        requested: Sequence[bool],
    ) -> tuple[torch.Tensor, ...]:
        loss = LossOptions(vocabulary, ignore_index, label_smoothing, z_loss)
        rows, classes, grads = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1), grad.reshape(-1)
        statistics = None if statistic is None else statistic.reshape(2, -1)
        by_hidden, by_weight, by_bias = totals(hidden, weight, bias, requested)
        with without_autocast(hidden):
            for lines in chunks(hidden, weight, chunk_tokens):
                logits = F.linear(rows[lines], weight, bias)
                if statistics is None:
                    largest, sums = row_sums(logits, classes[lines], start, label_smoothing > 0)
                    _, of_chunk = losses_of(largest, sums, classes[lines], loss)
                else:
                    of_chunk = statistics[:, lines]
                row_gradient(logits, grads[lines], logits, classes[lines], of_chunk, start, *loss)
                if requested[0]:
                    torch.mm(logits, weight, out=by_hidden.view(rows.shape)[lines])
                if requested[1]:
                    add_product(by_weight, logits.t(), rows[lines])
                if requested[2]:
                    by_bias += logits.sum(0, dtype=by_bias.dtype)
        return by_hidden, by_weight.to(weight.dtype), by_bias.to(weight.dtype)

    return run


def totals(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, requested: Sequence[bool]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Room for the gradients; those of weight and bias are added up in at least float32. Nothing if not requested."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    by_hidden = hidden.new_empty(hidden.shape if requested[0] else 0)
    by_weight = weight.new_zeros(weight.shape if requested[1] else 0, dtype=wide)
    return by_hidden, by_weight, weight.new_zeros(weight.shape[:1] if requested[2] else 0, dtype=wide)


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """``total += left @ right``, not rounded to the dtype of the factors in between."""
    if total.dtype != left.dtype and total.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def without_autocast(hidden: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Backward is not under autocast either: both must compute the same logits."""
    device = hidden.device.type
    return torch.autocast(device, enabled=False) if autocasts(device) else contextlib.nullcontext()
