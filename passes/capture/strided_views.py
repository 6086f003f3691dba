"""``as_strided`` while tracing, as a choice of elements: strides of memory mean nothing to a tensor that is cut."""

from __future__ import annotations

from typing import Any

import torch

from passes.ir.errors import CaptureError
from passes.torch_compat.tensor_fields import storage_id


class StridedViews:
    """Answers ``tensor.as_strided(...)``; what is given back is a copy, so writes to it are refused."""

    def __init__(self) -> None:
        #: Memory of a result → the result, held so that its memory stays its own.
        self._results: dict[int, torch.Tensor] = {}

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """The elements that an ``as_strided`` views; None for any other call.

        Raises:
            CaptureError: for a tensor with gaps or repeats in memory, and for a write to what an earlier call gave.
        """
        if name == "as_strided" and args:
            result = _elements(*args, **kwargs)
            self._results[storage_id(result)] = result
            return result
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        written = args[0] if writes and self._results and args else None
        if isinstance(written, torch.Tensor) and storage_id(written) in self._results:
            raise CaptureError(
                f"{name} writes to a view by as_strided, which a tensor that is cut does not have: write to a copy, or "
                "take the view by unfold, diagonal or slices"
            )
        return None


def _elements(
    tensor: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], storage_offset: int | None = None
) -> torch.Tensor:
    strides = tensor.stride()
    dims = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    in_memory = tensor.permute(dims)
    if not in_memory.is_contiguous():
        raise CaptureError(
            f"as_strided is called on a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}, which is "
            "not dense in memory: call it on tensor.contiguous()"
        )
    offset = 0 if storage_offset is None else storage_offset - tensor.storage_offset()
    last = offset + sum((length - 1) * step for length, step in zip(size, stride))
    if offset < 0 or last >= tensor.numel():
        raise CaptureError(
            f"as_strided(size={tuple(size)}, stride={tuple(stride)}) reaches memory outside of its tensor of "
            f"{tensor.numel()} elements: call it on the tensor that has them"
        )
    places = torch.arange(tensor.numel(), device=tensor.device).as_strided(tuple(size), tuple(stride), offset)
    return in_memory.reshape(-1)[places]
