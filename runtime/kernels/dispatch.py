"""Which implementation of a fused operator runs: Triton on a GPU, ATen elsewhere, or what the environment says."""

from __future__ import annotations

import os
from typing import Any

import torch

from runtime.kernels.language import has_triton, interprets_triton

#: Environment variable that forces one implementation, ``aten`` or ``triton``; empty or unset to choose by device.
VARIABLE = "MESHWRIGHT_KERNELS"
_CHOICES = ("aten", "triton")
#: The table behind ``os.environ``, whose own ``get`` takes as long as an operator on a small tensor.
_table: Any = getattr(os.environ, "_data", os.environ)
_KEY: Any = VARIABLE if _table is os.environ else os.environ.encodekey(VARIABLE)


def is_forced() -> bool:
    """Whether the environment forces one implementation."""
    return bool(_table.get(_KEY))


def runs_triton(tensor: torch.Tensor) -> bool:
    """Whether an operator on ``tensor`` runs as a Triton kernel.

    Raises:
        ValueError: if the environment asks for something unknown, or for Triton where it cannot run.
    """
    forced = _table.get(_KEY)
    if not forced:
        return tensor.is_cuda and has_triton()
    forced = os.environ[VARIABLE]
    if forced not in _CHOICES:
        raise ValueError(
            f"{VARIABLE}={forced!r}: expected one of {', '.join(_CHOICES)}, or nothing to choose by device"
        )
    on_gpu = tensor.is_cuda
    if forced == "triton":
        _check_triton(tensor, on_gpu=on_gpu)
        return True
    return False


def _check_triton(tensor: torch.Tensor, *, on_gpu: bool) -> None:
    if not has_triton():
        raise ValueError(f"{VARIABLE}=triton, but Triton is not installed: `pip install triton`, or unset {VARIABLE}")
    if not on_gpu and not interprets_triton():
        raise ValueError(
            f"{VARIABLE}=triton, but the tensors are on {tensor.device.type}, where Triton does not run: move them "
            f"to a GPU, unset {VARIABLE}, or set TRITON_INTERPRET=1 to run the kernels slowly in Python"
        )
