"""Thin adapters over faults of the versions of ``spmd_types`` that we support."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from spmd_types import _collectives

_applied = False


def apply_adapters() -> None:
    """Apply all adapters, once a process."""
    global _applied
    if _applied:
        return
    _applied = True
    _accept_any_stride_in_all_reduce()
    # It calls functions under the names they have in torch 2.11; later versions warn at each call.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"spmd_types(\.|$)")


def _accept_any_stride_in_all_reduce() -> None:
    """An all-reduce asserts a contiguous tensor, but gradients often are expanded or transposed views."""
    original = _collectives._AllReduce.forward

    def forward(ctx: Any, x: torch.Tensor, axis: Any, dst: Any, inplace: bool, dtype_options: Any) -> torch.Tensor:
        return original(ctx, x if inplace else x.contiguous(), axis, dst, inplace, dtype_options)

    _collectives._AllReduce.forward = staticmethod(forward)  # type: ignore[method-assign]
