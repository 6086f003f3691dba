"""Attention that drops probabilities, or is causal with cut queries, on sharded tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from runtime.ops.mesh_types import first_of_shard, groups_of
from runtime.ops.random import Shards, dropout
from runtime.programs.program import Block
from runtime.torch_compat.spmd_internals import local_tensor_mode_of


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
    draw: int = 0,
    of: Block | None = None,
    shards: Shards | None = None,
    length_axes: Sequence[str] = (),
    head_axes: Sequence[str] = (),
) -> torch.Tensor:
    """``F.scaled_dot_product_attention`` that knows how its output is sharded.

    Shapes as there: query [..., heads, length, width], key and value [..., heads, keys, width], these whole along keys.
    With ``dropout_p`` the probabilities are formed (memory is length × keys).

    Args:
        is_causal: query i sees the keys up to i, counted over the whole length, of which this rank may have a part.
        draw, of, shards: as in ``dropout``, of the probabilities.
        length_axes: the mesh axes that cut the queries, outermost first.
        enable_gqa: consecutive query heads share a head of keys and values, whether or not the fused kernels know it.
        head_axes: the mesh axes that cut the heads of the queries, but not those of the keys, outermost first.
    """
    if head_axes:
        key, value = _heads_of_shard(query.shape[-3], (key, value), head_axes)
    if enable_gqa and not _kernels_group(query, attn_mask):
        key, value = (repeated.repeat_interleave(query.shape[-3] // key.shape[-3], -3) for repeated in (key, value))
        enable_gqa = False
    if is_causal and length_axes and not dropout_p and query.is_cuda and local_tensor_mode_of(query) is None:
        return causal_without_mask(query, key, value, length_axes, scale=scale, enable_gqa=enable_gqa)
    if is_causal and (length_axes or dropout_p):
        attn_mask, is_causal = _causal_mask(query, key, length_axes), False
    if not dropout_p:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        members = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(members, -3), value.repeat_interleave(members, -3)
    scores = query @ key.transpose(-2, -1) * (1.0 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return dropout(scores.softmax(-1), dropout_p, draw=draw, of=of, shards=shards) @ value


def grouped_query_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention whose consecutive query heads share a head of keys and values, whether or not fused kernels know it.

    Shapes as in ``scaled_dot_product_attention``; what is cut is cut alike in all three. ``torch.compile`` traces it.
    """
    grouped = _kernels_group(query, attn_mask)
    if not grouped:
        key, value = (repeated.repeat_interleave(query.shape[-3] // key.shape[-3], -3) for repeated in (key, value))
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=grouped
    )


def _kernels_group(query: torch.Tensor, attn_mask: torch.Tensor | None) -> bool:
    """Whether a fused kernel takes fewer heads of keys than of queries: any on a processor, flash alone on a GPU."""
    return not query.is_cuda or (attn_mask is None and query.dtype in (torch.float16, torch.bfloat16))


def _heads_of_shard(heads: int, tensors: Sequence[torch.Tensor], axes: Sequence[str]) -> tuple[torch.Tensor, ...]:
    """The heads of keys and values, [..., heads, keys, width], that this rank's ``heads`` query heads read.

    ``axes`` cut the query heads that belong to them. Each head comes once where its group is not torn apart, else once
    for every query head.
    """
    ranks = math.prod(dist.get_world_size(group) for group in groups_of(axes))
    members = heads * ranks // tensors[0].shape[-3]
    first = first_of_shard(heads * ranks, axes, tensors[0].device)
    if members % heads == 0:
        picked = first // members
    elif heads % members == 0:
        picked = first // members + torch.arange(heads // members, device=first.device)
    else:
        picked = (first + torch.arange(heads, device=first.device)) // members
    return tuple(tensor.index_select(-3, picked) for tensor in tensors)


def _causal_mask(query: torch.Tensor, key: torch.Tensor, length_axes: Sequence[str]) -> torch.Tensor:
    """Which keys this rank's queries see, [length, keys]."""
    rows, keys = query.shape[-2], key.shape[-2]
    positions = torch.arange(rows, device=query.device)
    if length_axes:
        whole = rows * math.prod(dist.get_world_size(group) for group in groups_of(length_axes))
        positions = positions + first_of_shard(whole, length_axes, query.device)
    return torch.arange(keys, device=query.device) <= positions.unsqueeze(-1)


def causal_without_mask(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    length_axes: Sequence[str],
    *,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Causal attention of cut queries as flash kernels know it: aligned at the end, keys after the last query left out.

    Only where every rank runs its own process, since ranks see different numbers of keys.
    """
    place = 0
    for group in groups_of(length_axes):
        place = place * dist.get_world_size(group) + dist.get_rank(group)
    rows = query.shape[-2]
    num_keys = min((place + 1) * rows, key.shape[-2])
    mask = causal_lower_right(rows, num_keys)
    return F.scaled_dot_product_attention(
        query,
        key[..., :num_keys, :],
        value[..., :num_keys, :],
        attn_mask=mask,
        scale=scale,
        enable_gqa=enable_gqa,
    )
