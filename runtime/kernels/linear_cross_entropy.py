"""Cross-entropy of a linear layer's logits, a chunk of tokens at a time, so that all logits are never held.

Backward computes the logits of a chunk once more, makes them their own gradient in place, and adds up the weight's
gradient (the idea of Liger Kernel: Hsu et al., "Liger Kernel: Efficient Triton kernels for LLM training", 2024). The
products are torch's, the row work is that of ``runtime.kernels.logit_rows``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from runtime.kernels.chunked_logits import (
    gradients_with,
    losses_with,
    sums_with,
    tokens_at_a_time,
    totals,
    without_autocast,
)
from runtime.kernels.cross_entropy import (
    LossOptions,
    aten_small_losses,
    autocasts,
    check_smoothing,
    check_target,
    check_whole,
    plain_losses,
    torchs_own_losses,
)
from runtime.kernels.direct import are_plain
from runtime.kernels.library import (
    differentiable,
    differentiable_again,
    gradients_of,
    in_dtype,
    is_torchs_own,
    register,
)
from runtime.kernels.logit_rows import (
    aten_gradient,
    aten_sums,
    is_tiny,
    shapes_of_sums,
    small_gradient,
    triton_gradient,
    triton_sums,
)
from runtime.kernels.rows import is_one_block


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
) -> torch.Tensor:
    """``cross_entropy(linear(hidden, weight, bias), target)`` for each token.

    Args:
        hidden: [..., h].
        weight, bias: [v, h] and [v], of the same dtype.
        target: class indices [...].
        chunk_tokens: tokens of which the logits are held at a time; by default ``tokens_at_a_time``.
        dtype: of the losses; by default that of ``hidden``, float32 under autocast (the product is in its dtype then).

    Returns:
        [...]; computed in at least float32.

    Raises:
        ValueError: if shapes, dtypes or options are wrong.
        IndexError: on a CPU, if a target is no class; elsewhere its loss is NaN.
    """
    check_linear(hidden, weight, bias, target, chunk_tokens)
    check_smoothing(label_smoothing)
    if _is_tiny(hidden, weight, bias, target, label_smoothing, z_loss, chunk_tokens, dtype):
        return torchs_own_losses(F.linear(hidden, weight, bias), target, ignore_index)
    hidden, weight, bias, usual = as_autocast(hidden, weight, bias)
    losses: torch.Tensor = _forward(
        hidden, weight, bias, target, ignore_index, label_smoothing, z_loss, chunk_tokens, dtype or usual
    )
    return losses


def linear_row_sums(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    start: torch.Tensor | None,
    *,
    smoothing: bool,
    chunk_tokens: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``runtime.kernels.cross_entropy.row_sums`` of the logits."""
    sums: tuple[torch.Tensor, torch.Tensor] = _sums(hidden, weight, bias, target, start, smoothing, chunk_tokens)
    return sums


def linear_gradients(
    requested: Sequence[bool],
    grad: torch.Tensor,
    saved: Sequence[torch.Tensor | None],
    loss: LossOptions,
    *,
    chunk_tokens: int | None,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of hidden, weight and bias; None for those not ``requested``.

    Args:
        grad: of the losses.
        saved: hidden, weight, bias, target, ``statistic`` and ``start`` as of ``cross_entropy.logits_gradient``;
            without a statistic each chunk's own logits give it (then they must have all classes).
    """
    requested = [needed and tensor is not None for needed, tensor in zip(requested, saved)]
    gradients = _backward(grad, *saved, *loss, chunk_tokens, requested)
    return tuple(gradient if needed else None for gradient, needed in zip(gradients, requested))


def as_autocast(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.dtype]:
    """The operands as autocast would give them to a linear layer, and the dtype that it would give losses."""
    device = hidden.device.type
    if hidden.dtype == torch.float64 or not autocasts(device):
        return hidden, weight, bias, hidden.dtype
    dtype = torch.get_autocast_dtype(device)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), torch.float32


def check_linear(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    chunk_tokens: int | None,
) -> None:
    check_target(hidden.shape[:-1], target)
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(f"weight is {list(weight.shape)}, expected [classes, {hidden.shape[-1]}] as hidden has")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias is {list(bias.shape)}, expected one number for each class, [{weight.shape[0]}]")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}, expected at least 1, or None to choose")


def _is_tiny(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    label_smoothing: float,
    z_loss: float,
    chunk_tokens: int | None,
    dtype: torch.dtype | None,
) -> bool:
    """Whether the logits are so few that torch's own operators, which keep them, are better."""
    return (
        not (label_smoothing or z_loss or chunk_tokens)
        and dtype in (None, hidden.dtype)
        and is_tiny(target.numel(), weight.shape[0])
        and not autocasts(hidden.device.type)
        and is_torchs_own(hidden, weight, bias)
        and are_plain((target,))
    )


def _small_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, loss: LossOptions, chunk_tokens: int | None
) -> torch.Tensor | None:
    """All logits, where they are one block of one chunk on a processor and the loss is a plain one."""
    tokens = hidden.shape[:-1].numel()
    chunk = chunk_tokens or tokens_at_a_time(tokens, hidden.shape[-1], weight.shape[0])
    if loss.label_smoothing or loss.z_loss or tokens > chunk or not is_one_block(hidden, tokens * weight.shape[0]):
        return None
    with without_autocast(hidden):
        return F.linear(hidden, weight, bias)


_chunked_losses = losses_with(aten_sums)
_chunked_gradients = gradients_with(aten_sums, aten_gradient)


def _aten_losses(
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
    loss = LossOptions(weight.shape[0], ignore_index, label_smoothing, z_loss)
    logits = _small_logits(hidden, weight, bias, loss, chunk_tokens)
    if logits is None:
        losses: torch.Tensor = _chunked_losses(hidden, weight, bias, target, *loss[1:], chunk_tokens, dtype)
        return losses
    return in_dtype(aten_small_losses(logits, target, ignore_index), dtype or hidden.dtype)


def _aten_gradients(
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
    logits = None if start is not None else _small_logits(hidden, weight, bias, loss, chunk_tokens)
    if logits is None:
        gradients: tuple[torch.Tensor, ...] = _chunked_gradients(
            grad, hidden, weight, bias, target, statistic, start, *loss, chunk_tokens, requested
        )
        return gradients
    with without_autocast(hidden):
        change = in_dtype(small_gradient(grad, logits, target, ignore_index), weight.dtype).view(-1, weight.shape[0])
        by_hidden = torch.mm(change, weight).view(hidden.shape) if requested[0] else hidden.new_empty(0)
        by_weight = torch.mm(change.t(), hidden.reshape(len(change), -1)) if requested[1] else weight.new_empty(0)
    return by_hidden, by_weight, change.sum(0) if requested[2] else weight.new_empty(0)


def _shapes_of_sums(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    start: torch.Tensor | None,
    smoothing: bool,
    chunk_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return shapes_of_sums(hidden, target, start, smoothing)


def _shape(
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
    return hidden.new_empty(target.shape, dtype=dtype or hidden.dtype)


def _shapes_of_gradients(
    grad: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *options: Any
) -> tuple[torch.Tensor, ...]:
    by_hidden, by_weight, by_bias = totals(hidden, weight, bias, options[-1])
    return by_hidden, by_weight.to(weight.dtype), by_bias.to(weight.dtype)


_OPERANDS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor target"
_forward = register(
    f"linear_cross_entropy({_OPERANDS}, int ignore_index=-100, float label_smoothing=0.0, float z_loss=0.0, "
    "int? chunk_tokens=None, ScalarType? dtype=None) -> Tensor",
    aten=_aten_losses,
    triton=losses_with(triton_sums),
    shapes=_shape,
)
_sums = register(
    f"linear_cross_entropy_sums({_OPERANDS}, Tensor? start, bool smoothing, int? chunk_tokens=None)"
    " -> (Tensor, Tensor)",
    aten=sums_with(aten_sums),
    triton=sums_with(triton_sums),
    shapes=_shapes_of_sums,
)
_backward = register(
    f"linear_cross_entropy_backward(Tensor grad, {_OPERANDS}, Tensor? statistic, Tensor? start, int vocabulary, "
    "int ignore_index, float label_smoothing, float z_loss, int? chunk_tokens, bool[] requested)"
    " -> (Tensor, Tensor, Tensor)",
    aten=_aten_gradients,
    triton=gradients_with(triton_sums, triton_gradient),
    shapes=_shapes_of_gradients,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    hidden, weight, bias, target, *options, ctx.chunk_tokens, _ = inputs
    ctx.loss = LossOptions(weight.shape[0], *options)
    ctx.save_for_backward(hidden, weight, bias, target)
    ctx.gradients_together = True  # for whoever would ask for them one by one


def _gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    saved = (*ctx.saved_tensors, None, None)
    gradients = linear_gradients(ctx.needs_input_grad[:3], grad, saved, ctx.loss, chunk_tokens=ctx.chunk_tokens)
    return *gradients, None, None, None, None, None, None


def _plain_backward(
    grad: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    statistic: torch.Tensor | None,
    start: torch.Tensor | None,
    *options: Any,
) -> tuple[torch.Tensor | None, ...]:
    """The gradients with all logits held at once."""
    check_whole(start)
    *loss, _, requested = options

    def definition(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        with without_autocast(hidden):
            return plain_losses(F.linear(hidden, weight, bias), target, LossOptions(*loss)).to(grad.dtype)

    gradients = gradients_of(definition, (hidden, weight, bias), grad)
    return tuple(gradient if needed else None for gradient, needed in zip(gradients, requested, strict=True))


differentiable(_forward, save=_save, backward=_gradient)
differentiable_again(_backward, _plain_backward)
