"""Attention that drops probabilities, on sharded tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from runtime.ops.random import dropout


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    axes: Sequence[str] = (),
) -> torch.Tensor:
    """``F.scaled_dot_product_attention`` whose dropped probabilities follow the sharding of the output.

    Shapes as there: query [..., heads, length, width], key and value [..., heads, keys, width]. ``axes`` are the mesh
    axes that shard the output (see ``runtime.ops.random``). The probabilities are formed: memory is length × keys.
    """
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        members = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(members, -3), value.repeat_interleave(members, -3)
    scores = query @ key.transpose(-2, -1) * (1.0 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return dropout(scores.softmax(-1), dropout_p, axes=axes) @ value
