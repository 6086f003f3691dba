"""``torch.nn.functional.grouped_mm`` in float64, which torch has for narrower floats alone: for verification."""

from __future__ import annotations

from typing import Any

import torch

_LIBRARY = torch.library.Library("meshwright", "FRAGMENT")
_LIBRARY.define("grouped_products(Tensor rows, Tensor weight, Tensor offs) -> Tensor")


def grouped_products(rows: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """``rows[begin:end] @ weight[group]`` of every group, by products that autograd differentiates.

    Args:
        rows: [rows, in], sorted by group.
        weight: [groups, in, out].
        offs: where the rows of each group end.

    Returns:
        [rows, out], zero behind the last group.
    """
    ends = offs.tolist()
    begins = [0, *ends[:-1]]
    parts = [rows[begin:end] @ matrix for begin, end, matrix in zip(begins, ends, weight)]
    rest = rows.new_zeros((len(rows) - (ends[-1] if ends else 0), weight.shape[2]))
    return torch.cat([*parts, rest])


def _with_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    rows, weight, offs = ctx.saved_tensors
    by_rows = torch.ops.meshwright.grouped_products(gradient, weight.transpose(1, 2), offs)
    ends = offs.tolist()
    pairs = zip([0, *ends[:-1]], ends)
    return by_rows, torch.stack([rows[begin:end].T @ gradient[begin:end] for begin, end in pairs]), None


def _save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("grouped_products", grouped_products, _key)
torch.library.register_fake(
    "meshwright::grouped_products",
    lambda rows, weight, offs: rows.new_empty((rows.shape[0], weight.shape[2])),
    lib=_LIBRARY,
)
torch.library.register_autograd("meshwright::grouped_products", _with_gradient, setup_context=_save, lib=_LIBRARY)
