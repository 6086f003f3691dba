"""Rows that a mask places, sample by sample: ``embeddings.masked_scatter(ids == image_token, features)``.

``masked_scatter`` hands its source out over all samples in one go, so that where a sample's rows begin depends on the
samples before it. Where every sample has as many places, which is read from the example and guarded, sample ``i`` gets
the i-th part of the source: a look-up in the sample's own part, with the same result and gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from passes.capture.shorten import NotRepeated
from passes.capture.value_reads import ValueReads
from passes.ir.errors import CaptureError, MissingValues


def placed_rows(reads: ValueReads, function: str, args: tuple[Any, ...]) -> torch.Tensor | None:
    """What ``masked_scatter``, ``masked_scatter_`` or ``x[mask] = rows`` gives; None for calls of another form.

    Args:
        args: x of [samples, places…, features…], the mask of its places (or spread over the features), the rows.
    """
    if function not in _FORMS or len(args) != 3 or not all(isinstance(arg, torch.Tensor) for arg in args):
        return None
    tensor, mask, rows = args
    if mask.dtype != torch.bool:
        return None
    places = mask if function == "__setitem__" else _before_features(mask, tensor)
    if places is None or places.dim() < 2 or places.shape != tensor.shape[: places.dim()] or tensor.shape[0] < 2:
        return None
    samples, features = tensor.shape[0], tensor.shape[places.dim() :]
    if rows.numel() == 0 or rows.dtype != tensor.dtype or rows.numel() % (samples * features.numel()):
        return None
    count = rows.numel() // samples // features.numel()
    if not _each_picks(reads, places, count):
        return None
    result = _placed(tensor, places, rows.reshape(samples, count, features.numel()))
    return _FORMS[function](tensor, result)


_FORMS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "masked_scatter": lambda tensor, result: result,
    "masked_scatter_": torch.Tensor.copy_,
    "__setitem__": torch.Tensor.copy_,
}


def _before_features(mask: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor | None:
    """The mask without its last dims along which it is spread; None if it is of another shape than ``tensor``."""
    if mask.dim() != tensor.dim():
        return None
    while mask.dim() and (mask.stride(-1) == 0 or mask.shape[-1] == 1):
        mask = mask.select(-1, 0)
    return mask


def _each_picks(reads: ValueReads, places: torch.Tensor, count: int) -> bool:
    """Whether the example's values say that each sample has ``count`` places: then a guard demands it."""
    try:
        return reads.each_row_picks(places, count)
    except (CaptureError, MissingValues, NotRepeated):
        return False


def _placed(tensor: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``tensor`` with ``rows`` [samples, count, features] at the places of each sample, in order."""
    flat = places.flatten(1)
    number = (flat.cumsum(1) - 1).clamp(min=0)
    placed = rows.gather(1, number.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))
    spread = places.reshape(places.shape + (1,) * (tensor.dim() - places.dim()))
    return torch.where(spread, placed.reshape(tensor.shape), tensor)
