"""Matrix products of rows that are sorted by group, each group with a matrix of its own (one group an expert)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from runtime.kernels.expert_products import cleared_behind

#: Dtypes that torch's own grouped product takes, and the bytes at which its rows must start.
_GROUPED = frozenset({torch.bfloat16, torch.float16, torch.float32})
_ALIGNMENT = 16


def rows_by_expert(expert_ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """How rows are sorted by expert.

    Args:
        expert_ids: integers, [rows]; rows of an expert outside of [0, num_experts) come last.

    Returns:
        ``order`` [rows]: the place of each sorted row, those of an expert in the order in which they stood; and
        ``offsets`` [num_experts] int32: where the rows of each expert end.
    """
    ids = torch.where((expert_ids < 0) | (expert_ids >= num_experts), num_experts, expert_ids)
    ordered, order = torch.sort(ids, stable=True)
    experts = torch.arange(num_experts, device=ids.device, dtype=ids.dtype)
    return order, torch.searchsorted(ordered, experts, right=True, out_int32=True)


def grouped_matmul(rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """``rows[start:end] @ weight[expert].T`` for the rows of each expert.

    Args:
        rows: [rows, in], sorted by expert.
        weight: [experts, out, in], of the same dtype, with any strides.
        offsets: [experts] int32, where the rows of each expert end.

    Returns:
        [rows, out]; zero behind the last expert's rows.
    """
    if _has_kernel(rows, weight):
        return cleared_behind(F.grouped_mm(rows, weight.transpose(1, 2), offs=offsets), offsets[-1:])
    product = rows.new_zeros((len(rows), weight.shape[1]))
    for expert, (start, end) in _groups(offsets):
        torch.mm(rows[start:end], weight[expert].T, out=product[start:end])
    return product


def grouped_weight_gradient(grad: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """``grad[start:end].T @ rows[start:end]`` for the rows of each expert: the gradient of ``grouped_matmul``'s weight.

    Args:
        grad: [rows, out], sorted by expert.
        rows: [rows, in].
        offsets: [experts] int32, where the rows of each expert end.

    Returns:
        [experts, out, in]; zero for experts without rows.
    """
    gradient = rows.new_zeros((len(offsets), grad.shape[1], rows.shape[1]))
    for expert, (start, end) in _groups(offsets):
        torch.mm(grad[start:end].T, rows[start:end], out=gradient[expert])
    return gradient


def _has_kernel(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether torch's grouped product takes these."""
    widths = (rows.shape[1], weight.shape[1])
    aligned = all(width * rows.element_size() % _ALIGNMENT == 0 for width in widths)
    packed = weight.stride(-1) == 1 or weight.stride(-2) == 1
    return rows.is_cuda and rows.dtype in _GROUPED and aligned and packed and len(rows) > 0


def _groups(offsets: torch.Tensor) -> Iterator[tuple[int, tuple[int, int]]]:
    """Each expert that has rows, and where they start and end."""
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            yield expert, (start, end)
        start = end
