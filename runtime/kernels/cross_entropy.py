"""Cross-entropy of logits and classes; keeps two numbers for each token, and no second copy of the logits.

    loss = log Σ exp(x) - (1 - s) x[target] - s/v Σ x + z (log Σ exp(x))²

with label smoothing s (Szegedy et al., "Rethinking the Inception architecture", 2016) and z-loss z (Chowdhery et al.,
"PaLM", 2022). Where the classes are sharded, ``row_sums`` of each shard are reduced and go to ``losses_of``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from runtime.kernels.direct import are_plain
from runtime.kernels.language import tl, triton
from runtime.kernels.library import (
    differentiable,
    differentiable_again,
    gradients_of,
    in_dtype,
    is_torchs_own,
    register,
    wide,
)
from runtime.kernels.logit_rows import (
    add_up_row,
    aten_gradient,
    aten_sums,
    is_small,
    is_tiny,
    launch_options,
    layout_of,
    readable_rows,
    row_offset,
    shapes_of_sums,
    small_gradient,
    small_losses,
    triton_gradient,
    triton_sums,
)


class LossOptions(NamedTuple):
    """What a loss is besides its logits and targets; see ``cross_entropy``."""

    vocabulary: int
    ignore_index: int
    label_smoothing: float
    z_loss: float


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reuse_logits: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Loss of each token; 0 (and no gradient) where the target is ``ignore_index``.

    Args:
        logits: [..., v].
        target: class indices [...].
        label_smoothing: weight of the uniform distribution over all classes, in [0, 1].
        z_loss: coefficient of the squared log-sum-exp.
        reuse_logits: write the gradient of the logits over the logits. Only where nobody reads them after this call
            (as of a linear layer's output); they can then go backward once.
        dtype: of the losses; by default that of the logits (float32 under autocast, as torch's).

    Returns:
        [...], summed in at least float32.

    Raises:
        ValueError: if shapes, dtypes or options are wrong.
        IndexError: on a CPU, if a target is no class; elsewhere its loss is NaN.
    """
    check_target(logits.shape[:-1], target)
    check_smoothing(label_smoothing)
    is_plain = dtype in (None, logits.dtype) and is_small(logits, None, label_smoothing, z_loss)
    if is_plain and reuse_logits:
        is_plain = is_tiny(target.numel(), logits.shape[-1])
    if is_plain and is_torchs_own(logits) and are_plain((target,)):
        return torchs_own_losses(logits, target, ignore_index)
    dtype = dtype or dtype_of_losses(logits)
    losses, _ = _forward(logits, target, ignore_index, label_smoothing, z_loss, reuse_logits, dtype)
    result: torch.Tensor = losses
    return result


def row_sums(
    logits: torch.Tensor, target: torch.Tensor, start: torch.Tensor | None, *, smoothing: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the loss needs of a shard of the classes.

    Args:
        logits: [..., v].
        target: class indices [...]; those outside [start, start + v) are another shard's.
        start: [1], the class of the first logit; None for 0.
        smoothing: whether the third sum is wanted.

    Returns:
        The largest logit [...], and sums [2 or 3, ...]: of exp(x - largest), of x[target] (0 if it is elsewhere), and
        of x - largest. In at least float32.
    """
    sums: tuple[torch.Tensor, torch.Tensor] = _sums(logits, target, start, smoothing)
    return sums


def losses_of(
    largest: torch.Tensor,
    sums: torch.Tensor,
    target: torch.Tensor,
    loss: LossOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses [...] from sums over all classes, NaN where a target is no class; and what the gradient needs [2, ...]."""
    log_sum = sums[0].log()
    losses = log_sum + (1.0 - loss.label_smoothing) * (largest - sums[1])
    if loss.label_smoothing:
        losses = losses - loss.label_smoothing / loss.vocabulary * sums[2]
    if loss.z_loss:
        losses = losses + loss.z_loss * (largest + log_sum).square()
    losses = losses.masked_fill((target < 0) | (target >= loss.vocabulary), torch.nan)
    return losses.masked_fill(target == loss.ignore_index, 0.0), torch.stack((largest, log_sum))


def logits_gradient(
    grad: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    statistic: torch.Tensor,
    start: torch.Tensor | None,
    loss: LossOptions,
    *,
    reuse_logits: bool,
) -> torch.Tensor:
    """Gradient of (a shard of) the logits from that of the losses, in their own memory if ``reuse_logits``.

    A compiler decides itself which memory to use again; a second derivative needs the logits.
    """
    options = (target, statistic, start, *loss)
    if reuse_logits and not torch.is_grad_enabled() and not torch.compiler.is_compiling() and logits.is_contiguous():
        logits = logits.detach()
        # so that whoever goes backward a second time is told
        torch.autograd.graph.increment_version(logits)
        _backward_in_place(logits, grad, *options)
        return logits
    result: torch.Tensor = _backward(grad, logits, *options)
    return result


def dtype_of_losses(logits: torch.Tensor) -> torch.dtype:
    """The logits' own, but float32 where autocast would compute losses."""
    narrow = logits.dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if narrow and autocasts(logits.device.type) else logits.dtype


def autocasts(device: str) -> bool:
    """Whether autocast is on; there is none on meta tensors."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def check_target(tokens: torch.Size, target: torch.Tensor) -> None:
    if target.shape != tokens:
        raise ValueError(f"target is {list(target.shape)}, expected one class for each token, {list(tokens)}")
    if target.is_floating_point() or target.dtype == torch.bool:
        raise ValueError(f"target is {target.dtype}, expected class indices: probabilities are not taken")


def check_smoothing(label_smoothing: float) -> None:
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing}, expected a weight between 0 and 1")


def _aten(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reuse_logits: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if is_small(logits, None, label_smoothing, z_loss):
        losses = aten_small_losses(logits, target, ignore_index)
        # The gradient of so few logits reads no statistic.
        return in_dtype(losses, dtype or logits.dtype), losses.new_zeros((2, *target.shape))
    if target.device.type == "cpu":
        check_classes(target, logits.shape[-1], ignore_index)
    loss = LossOptions(logits.shape[-1], ignore_index, label_smoothing, z_loss)
    largest, sums = aten_sums(logits, target, None, label_smoothing > 0)
    losses, statistic = losses_of(largest, sums, target, loss)
    return losses.to(dtype or logits.dtype), statistic


def torchs_own_losses(logits: torch.Tensor, target: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Losses [...] of logits with all classes by torch's own operator, in the dtype of the logits.

    Raises:
        IndexError: if a target is no class.
    """
    rows, classes = logits.reshape(-1, logits.shape[-1]), in_dtype(target, torch.int64).reshape(-1)
    try:
        return F.cross_entropy(rows, classes, ignore_index=ignore_index, reduction="none").view(target.shape)
    except (IndexError, RuntimeError):
        check_classes(target, logits.shape[-1], ignore_index)
        raise


def aten_small_losses(logits: torch.Tensor, target: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """``small_losses``, with an IndexError if a target is no class."""
    try:
        return small_losses(logits, target, ignore_index)
    except (IndexError, RuntimeError):
        check_classes(target, logits.shape[-1], ignore_index)
        raise


def check_classes(target: torch.Tensor, vocabulary: int, ignore_index: int) -> None:
    """Raise an IndexError if a target on a CPU is no class."""
    wrong = ((target < 0) | (target >= vocabulary)) & (target != ignore_index)
    if bool(wrong.any()):
        raise IndexError(
            f"target {int(target[wrong][0])} is no class: expected 0 to {vocabulary - 1}, "
            f"or ignore_index={ignore_index}"
        )


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    logits_ptr, target_ptr, losses_ptr, statistic_ptr,
    num_rows, inner, outer_stride, inner_stride, ignore_index,
    WIDTH: tl.constexpr, EVEN: tl.constexpr, WANTED: tl.constexpr, Z_LOSS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row).to(tl.int64)
    row_ptr = logits_ptr + row_offset(row, inner, outer_stride, inner_stride)
    is_class = (target >= 0) & (target < WIDTH)
    chosen = tl.load(row_ptr + target, mask=is_class, other=float("nan")).to(WIDE)
    largest, spread, differences = add_up_row(row_ptr, WIDTH, EVEN > 0, WIDE, BLOCK)
    log_sum = tl.log(spread)
    loss = log_sum + WANTED * (largest - chosen)
    if EVEN > 0:
        loss -= EVEN * differences
    if Z_LOSS > 0:
        loss += Z_LOSS * (largest + log_sum) * (largest + log_sum)
    tl.store(losses_ptr + row, tl.where(target == ignore_index, 0.0, loss))
    tl.store(statistic_ptr + row, largest)
    tl.store(statistic_ptr + num_rows + row, log_sum)


def _triton(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reuse_logits: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    losses, statistic = _shapes(logits, target, dtype=dtype)
    if losses.numel():
        rows = readable_rows(logits)
        _kernel[(losses.numel(),)](
            rows, target.contiguous(), losses, statistic,
            losses.numel(), *layout_of(rows), ignore_index,
            EVEN=label_smoothing / logits.shape[-1], WANTED=1.0 - label_smoothing, Z_LOSS=z_loss,
            **launch_options(rows),
        )  # fmt: skip
    return losses, statistic


def _shapes(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reuse_logits: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    _, statistic = shapes_of_sums(logits, target, None, smoothing=False)
    return logits.new_empty(target.shape, dtype=dtype or logits.dtype), statistic


def _gradient_of(run: Any) -> Any:
    def backward(grad: torch.Tensor, logits: torch.Tensor, *options: Any) -> torch.Tensor:
        out = torch.empty_like(logits, memory_format=torch.contiguous_format)
        run(out, grad, logits, *options)
        return out

    return backward


def _aten_gradient(
    grad: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    statistic: torch.Tensor,
    start: torch.Tensor | None,
    vocabulary: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> torch.Tensor:
    if is_small(logits, start, label_smoothing, z_loss):
        return in_dtype(small_gradient(grad, logits, target, ignore_index), logits.dtype)
    options = (vocabulary, ignore_index, label_smoothing, z_loss)
    result: torch.Tensor = _gradient_of(aten_gradient)(grad, logits, target, statistic, start, *options)
    return result


def _gradient_in_place_of(run: Any) -> Any:
    def backward(logits: torch.Tensor, grad: torch.Tensor, *options: Any) -> None:
        run(logits, grad, logits, *options)

    return backward


_OPTIONS = "int ignore_index=-100, float label_smoothing=0.0, float z_loss=0.0"
_forward = register(
    f"cross_entropy(Tensor logits, Tensor target, {_OPTIONS}, bool reuse_logits=False, ScalarType? dtype=None)"
    " -> (Tensor, Tensor)",
    aten=_aten,
    triton=_triton,
    shapes=_shapes,
)
_sums = register(
    "cross_entropy_sums(Tensor logits, Tensor target, Tensor? start, bool smoothing) -> (Tensor, Tensor)",
    aten=aten_sums,
    triton=triton_sums,
    shapes=shapes_of_sums,
)
_GRADIENT = (
    "Tensor target, Tensor statistic, Tensor? start, "
    "int vocabulary, int ignore_index, float label_smoothing, float z_loss"
)
_backward = register(
    f"cross_entropy_backward(Tensor grad, Tensor logits, {_GRADIENT}) -> Tensor",
    aten=_aten_gradient,
    triton=_gradient_of(triton_gradient),
    shapes=_gradient_of(lambda *arguments: None),
)
_backward_in_place = register(
    f"cross_entropy_backward_(Tensor(a!) logits, Tensor grad, {_GRADIENT}) -> ()",
    aten=_gradient_in_place_of(aten_gradient),
    triton=_gradient_in_place_of(triton_gradient),
    shapes=lambda *arguments: None,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, target, *options, ctx.reuse_logits, _ = inputs
    ctx.loss = LossOptions(logits.shape[-1], *options)
    ctx.save_for_backward(logits, target, output[1])
    ctx.mark_non_differentiable(output[1])


def _gradient(ctx: Any, grad: torch.Tensor, _: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    logits, target, statistic = ctx.saved_tensors
    # a gradient that is differentiated reads the logits again
    ctx.reuse_logits &= not torch.is_grad_enabled()
    result = logits_gradient(grad, logits, target, statistic, None, ctx.loss, reuse_logits=ctx.reuse_logits)
    return result, None, None, None, None, None, None


def plain_losses(logits: torch.Tensor, target: torch.Tensor, loss: LossOptions) -> torch.Tensor:
    """The losses as torch differentiates them; holds copies of the logits."""
    x = wide(logits)
    log_sum = x.logsumexp(-1)
    chosen = x.gather(-1, target.clamp(0, loss.vocabulary - 1).unsqueeze(-1)).squeeze(-1)
    losses = log_sum - (1.0 - loss.label_smoothing) * chosen + loss.z_loss * log_sum.square()
    if loss.label_smoothing:
        losses = losses - loss.label_smoothing / loss.vocabulary * x.sum(-1)
    return losses.masked_fill(target == loss.ignore_index, 0.0)


def check_whole(start: torch.Tensor | None) -> None:
    """Raise a RuntimeError for a shard of the classes, of which no derivative of the gradient can be made."""
    if start is not None:
        raise RuntimeError("cross-entropy over a sharded vocabulary has no second derivative")


def _plain_backward(
    grad: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    statistic: torch.Tensor,
    start: torch.Tensor | None,
    *options: Any,
) -> tuple[torch.Tensor | None, ...]:
    check_whole(start)
    loss = LossOptions(*options)
    return gradients_of(lambda logits: plain_losses(logits, target, loss).to(grad.dtype), (logits,), grad)


differentiable(_forward, save=_save, backward=_gradient)
differentiable_again(_backward, _plain_backward)
