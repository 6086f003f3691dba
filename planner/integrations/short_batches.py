"""Batches with fewer samples than the plan's, where nothing tells a loss to ignore a sample: exact, in full batches.

A mean over samples that are each repeated as often is the mean over the samples; what does not divide a batch is cut
into pieces that do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from planner.trainer.trainer_batches import chunks


def pieces(batch: Mapping[str, Any], size: int) -> Iterator[tuple[dict[str, Any], int, float]]:
    """Full batches that are together ``batch``: each with how many samples it has, and their share of all.

    Args:
        size: samples in a full batch; a batch of as many, or more, is the only piece.
    """
    count = num_samples(batch)
    if count is None or count >= size:
        yield dict(batch), size, 1.0
        return
    for part in chunks(count, size, exact=True):
        rows = torch.tensor([part.first + index % part.num_samples for index in range(size)])
        yield (
            {name: value[rows.to(value.device)] if _has_rows(value, count) else value for name, value in batch.items()},
            part.num_samples,
            part.num_samples / count,
        )


def joined(outputs: list[tuple[Mapping[str, Any], int, float]], size: int) -> dict[str, Any]:
    """Outputs of ``pieces`` as those of the batch: numbers are means, tensors have its samples."""
    first = outputs[0][0]
    return {name: _joined([(one[name], count, share) for one, count, share in outputs], size) for name in first}


def num_samples(batch: Mapping[str, Any]) -> int | None:
    """Rows of the first tensor that has any."""
    return next((len(value) for value in batch.values() if isinstance(value, torch.Tensor) and value.dim()), None)


def _has_rows(value: Any, count: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == count


def _joined(parts: list[tuple[Any, int, float]], size: int) -> Any:
    value = parts[0][0]
    if isinstance(value, torch.Tensor) and not value.dim():
        return sum(part * share for part, _, share in parts)
    if _has_rows(value, size):
        return torch.cat([part[:count] for part, count, _ in parts])
    if isinstance(value, (tuple, list)):
        places = range(len(value))
        return type(value)(_joined([(part[at], count, share) for part, count, share in parts], size) for at in places)
    return value
