"""``LocalTensor``: one tensor that is the parts of all ranks, in one process. Imported where there are such ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.distributed._local_tensor import LocalIntNode, LocalTensor, LocalTensorMode, maybe_disable_local_tensor_mode
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["FakeStore", "LocalIntNode", "LocalTensor", "LocalTensorMode", "maybe_disable_local_tensor_mode",
           "parts_of_ranks", "size_on_ranks"]  # fmt: skip


def parts_of_ranks(tensor: torch.Tensor, ranks: Iterable[int] = ()) -> dict[int, torch.Tensor]:
    """The part of each rank; a plain tensor is the same one on all of ``ranks``."""
    return tensor._local_tensors if isinstance(tensor, LocalTensor) else dict.fromkeys(ranks, tensor)


def size_on_ranks(sizes: Mapping[int, int]) -> int:
    """One size for all ranks: a plain number where they agree."""
    first = next(iter(sizes.values()))
    return first if all(size == first for size in sizes.values()) else torch.SymInt(LocalIntNode(dict(sizes)))  # type: ignore[return-value]
