"""Products of rows that are sorted by group with one matrix for each group: torch's grouped kernels for what they take,
else one product after the other. On a processor torch's do that, too, but do not come back to Python for each."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from runtime.kernels.dispatch import runs_triton
from runtime.kernels.expert_row_kernels import clear_rows_behind

#: The dtypes that torch's grouped kernels are quick for, by kind of device.
GROUPED = {"cuda": torch.bfloat16, "cpu": torch.float32}
#: Bytes that operands of torch's grouped kernels must begin at, and their rows be, a multiple of.
ALIGNMENT = 16


class ExpertGroups:
    """How many of the first rows belong to each group; rows behind all groups belong to none.

    Args:
        counts: rows of every group [E], int64.
    """

    def __init__(self, counts: torch.Tensor) -> None:
        self.counts = counts

    @functools.cached_property
    def ends(self) -> torch.Tensor:
        """Where every group ends, [E] int32."""
        return self.counts.cumsum(0).to(torch.int32)

    @functools.cached_property
    def slices(self) -> list[slice]:
        """Places of every group's rows; waits for the device."""
        ends = self.counts.cumsum(0).tolist()
        return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends)]


def cleared_behind(rows: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
    """``rows`` [R, N] with zeros, in place, from the one that ``end`` [1] says: grouped kernels do not write those."""
    if runs_triton(rows):
        clear_rows_behind(rows, end)
    elif rows.is_cpu:
        first = int(end)
        if first < len(rows):
            rows[first:].zero_()
    elif len(rows):
        places = torch.arange(len(rows), device=rows.device)
        rows.masked_fill_((places >= end).unsqueeze(1), 0.0)
    return rows


def products(rows: torch.Tensor, matrices: torch.Tensor, groups: ExpertGroups) -> torch.Tensor:
    """``rows @ matrices[group]`` of rows [R, K] and matrices [E, K, N]: [R, N], zero for rows of no group."""
    if _is_grouped(rows, matrices):
        grouped: torch.Tensor = F.grouped_mm(rows, matrices, offs=groups.ends)
        return cleared_behind(grouped, groups.ends[-1:])
    result = rows.new_zeros((len(rows), matrices.shape[-1]))
    for matrix, places in zip(matrices, groups.slices, strict=True):
        if places.start < places.stop:
            torch.mm(rows[places], matrix, out=result[places])
    return result


def outer_products(left: torch.Tensor, right: torch.Tensor, groups: ExpertGroups) -> torch.Tensor:
    """``left.T @ right`` of each group's rows, of [R, N] and [R, K]: [E, N, K], zero for groups without rows."""
    if _is_grouped(left, right):
        grouped: torch.Tensor = F.grouped_mm(left.t(), right, offs=groups.ends)
        return grouped
    result = left.new_zeros((len(groups.counts), left.shape[-1], right.shape[-1]))
    for matrix, places in zip(result, groups.slices, strict=True):
        if places.start < places.stop:
            torch.mm(left[places].t(), right[places], out=matrix)
    return result


def sums(rows: torch.Tensor, groups: ExpertGroups, of_row: torch.Tensor) -> torch.Tensor:
    """Sums of each group's rows [R, N], in at least float32: [E, N]. ``of_row``: each row's group; E for none."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    result = rows.new_zeros((len(groups.counts) + 1, rows.shape[-1]), dtype=dtype)
    return result.index_add_(0, of_row, rows.to(dtype))[:-1]


def _is_grouped(*operands: torch.Tensor) -> bool:
    """Whether torch's grouped kernels take these operands."""
    return all(
        operand.dtype is GROUPED.get(operand.device.type) and operand.numel() > 0 and _is_aligned(operand)
        for operand in operands
    )


def _is_aligned(operand: torch.Tensor) -> bool:
    """Whether one of the last two dims is dense, and the other's stride and the address multiples of the alignment."""
    strides = operand.stride()[-2:]
    lies_so = min(strides) == 1 and max(strides) * operand.element_size() % ALIGNMENT == 0
    return lies_so and operand.data_ptr() % ALIGNMENT == 0
