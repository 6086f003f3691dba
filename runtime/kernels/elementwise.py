"""Launching kernels that treat every element alike."""

from __future__ import annotations

from typing import Any

import torch

from runtime.kernels.language import tl, triton

#: Elements that one program of an elementwise kernel handles.
BLOCK = 1024


@triton.jit
def offsets_of(num_elements, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's elements (64-bit, since tensors may have more than 2^31), and which of them exist."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return offsets, offsets < num_elements


def grid_of(num_elements: int) -> tuple[int]:
    """One program for each block."""
    return (triton.cdiv(num_elements, BLOCK),)


def contiguous(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors laid out in the order of their dims, copied where they are not."""
    return tuple(tensor.contiguous() for tensor in tensors)


def wide_type(tensor: torch.Tensor) -> Any:
    """The type in which kernels compute: at least float32."""
    return tl.float64 if tensor.dtype == torch.float64 else tl.float32
