"""Which kernels run on the device that memory is counted for, where torch chooses others on the meta device.

On the meta device torch takes the generic kernels: attention that forms its probabilities, dropout that draws a
mask of the input's dtype. These tables say which fused operators stand in for them, ``"gpu"`` or ``"cpu"``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)

#: Kernels whose outputs a selective recomputation keeps (matrix products, convolutions, fused attention): the names
#: that a policy for ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` marks ``MUST_SAVE``.
EXPENSIVE = frozenset({
    "mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm", "_grouped_mm", "expert_linear",
    "experts_forward", "gated_delta_rule",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
})  # fmt: skip

#: Operators that write over the products that they make inside (gates, in place): of these nothing inside is kept.
WRITE_OVER_PRODUCTS = frozenset(
    f"{kind}{form}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for form in ("", "_cell")
)


def attention_kernel(kernels: str) -> Callable[..., torch.Tensor]:
    """``scaled_dot_product_attention`` as it runs on ``kernels``."""
    return _ATTENTION[kernels]


def _gpu_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Flash without a mask, memory-efficient with one or for values of another width; with dropout our own.

    Ours forms the probabilities.
    """
    if dropout_p:
        return _formed(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)
    mask = _additive(attn_mask, query)
    if _has_one_width(query, key, value) and mask is None and query.dtype in _HALF:
        return _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)[0]
    if enable_gqa:  # no other kernel knows of groups: ``runtime.ops`` repeats the heads
        members = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(members, -3), value.repeat_interleave(members, -3)
        enable_gqa = False
    multiplies = query.dim() == 4 and query.shape[-1] == key.shape[-1]
    if multiplies and query.dtype in (*_HALF, torch.float32):
        result = _aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, True, 0.0, is_causal, scale=scale
        )
        return result[0]
    return _plain(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _cpu_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Flash, unless there is dropout, a mask that gets a gradient, or heads of unequal width."""
    grad_mask = attn_mask is not None and attn_mask.requires_grad
    if dropout_p or grad_mask or not _has_one_width(query, key, value):
        return _plain(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    kernel = _aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, key, value, 0.0, is_causal, attn_mask=_additive(attn_mask, query), scale=scale)[0]


def _plain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """torch's own choice for meta tensors: the attention that forms its probabilities."""
    return _aten.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _has_one_width(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the operands are [batch, heads, length, width] of one width."""
    return query.dim() == 4 and query.shape[-1] == key.shape[-1] == value.shape[-1]


def _additive(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """A boolean mask as the additive one that torch makes of it at each call."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.full((), -math.inf, dtype=query.dtype, device=mask.device))


def _formed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None,
) -> torch.Tensor:
    """The steps of ``runtime.ops.scaled_dot_product_attention``."""
    if key.shape[-3] != query.shape[-3]:
        members = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(members, -3), value.repeat_interleave(members, -3)
    scores = query @ key.transpose(-2, -1) * (1.0 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(later, -math.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return _masking_dropout(scores.softmax(-1), dropout_p, True) @ value


def _masking_dropout(source: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Dropout that keeps one byte an element, as fused kernels do and ``runtime.ops.dropout``."""
    return _aten.native_dropout(source, p, train)[0] if train and p else source


class _FusedRmsNorm(torch.autograd.Function):
    """What the fused kernel keeps: its input, the weight, and one statistic a row."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, weight: torch.Tensor | None, num_dims: int) -> torch.Tensor:
        rows = source.shape[: source.dim() - num_dims]
        statistic = torch.empty(rows, dtype=torch.float32, device=source.device)
        ctx.save_for_backward(source, weight, statistic)
        return torch.empty_like(source)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise NotImplementedError("shapes only")


def _rms_norm(
    source: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    return _FusedRmsNorm.apply(source, weight, len(normalized_shape))


class _FusedCrossEntropy(torch.autograd.Function):
    """What ``runtime.ops.cross_entropy`` keeps: logits, targets, and two numbers for each token."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        ctx.save_for_backward(logits, target, logits.new_empty((2, *target.shape), dtype=wide))
        return logits.new_empty(target.shape, dtype=dtype or logits.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise NotImplementedError("shapes only")


def _cross_entropy(logits: torch.Tensor, target: torch.Tensor, *options: Any, **more: Any) -> torch.Tensor:
    result: torch.Tensor = _FusedCrossEntropy.apply(logits, target, more.get("dtype"))
    return result


_ATTENTION: dict[str, Callable[..., torch.Tensor]] = {"gpu": _gpu_attention, "cpu": _cpu_attention}

#: Operators other than attention that run differently from what shapes alone choose.
REPLACEMENTS: dict[str, dict[str, Callable[..., torch.Tensor]]] = {
    "gpu": {
        "aten.dropout.default": _masking_dropout,
        "aten.rms_norm.default": _rms_norm,
        "meshwright.cross_entropy": _cross_entropy,
    },
    "cpu": {},
}
