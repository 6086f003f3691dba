"""``LocalTensor``: one tensor that is the parts of all ranks, in one process. Imported where there are such ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed._local_tensor import LocalIntNode, LocalTensor, LocalTensorMode, maybe_disable_local_tensor_mode
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["FakeStore", "LocalIntNode", "LocalTensor", "LocalTensorMode", "maybe_disable_local_tensor_mode",
           "parts_of_ranks", "shapes_looked_up", "size_on_ranks"]  # fmt: skip


def parts_of_ranks(tensor: torch.Tensor, ranks: Iterable[int] = ()) -> dict[int, torch.Tensor]:
    """The part of each rank; a plain tensor is the same one on all of ``ranks``."""
    return tensor._local_tensors if isinstance(tensor, LocalTensor) else dict.fromkeys(ranks, tensor)


def size_on_ranks(sizes: Mapping[int, int]) -> int:
    """One size for all ranks: a plain number where they agree."""
    first = next(iter(sizes.values()))
    return first if all(size == first for size in sizes.values()) else torch.SymInt(LocalIntNode(dict(sizes)))  # type: ignore[return-value]


@contextlib.contextmanager
def shapes_looked_up() -> Iterator[None]:
    """Inside the block, a ``LocalTensor`` is asked for its sizes and strides without running an operator on each rank.

    torch asks thrice for each view, and enters a mode with a copy of every rank's random state each time: a third of
    a training step. And it is cut where ranks have other sizes (``x[:, :4]``), which fails. Needed up to torch 2.13.
    """
    original = vars(LocalTensor)["__torch_dispatch__"]

    def dispatch(cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        look_up = _OF_SHAPES.get(func)
        return original.__get__(None, cls)(func, types, args, kwargs) if look_up is None else look_up(args[0])

    LocalTensor.__torch_dispatch__ = classmethod(dispatch)  # type: ignore[assignment, method-assign]
    LocalTensor.__getitem__ = _indexed  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        LocalTensor.__torch_dispatch__ = original  # type: ignore[method-assign]
        del LocalTensor.__getitem__


def _indexed(tensor: LocalTensor, index: Any) -> torch.Tensor:
    """``tensor[index]``; of slices alone one after the other, without those of whole dims: torch cannot tell these."""
    entries = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(entry, slice) for entry in entries):
        return torch.Tensor.__getitem__(tensor, index)
    result: torch.Tensor = tensor
    for dim, entry in enumerate(entries):
        if entry != slice(None):
            step = 1 if entry.step is None else entry.step
            result = torch.ops.aten.slice.Tensor(result, dim, entry.start, entry.stop, step)
    return result.view_as(result) if result is tensor else result


def _sizes(tensor: LocalTensor) -> list[int]:
    return _of_each_dim(tensor, torch.Tensor.size)


def _strides(tensor: LocalTensor) -> list[int]:
    return _of_each_dim(tensor, torch.Tensor.stride)


def _of_each_dim(tensor: LocalTensor, look_up: Callable[[torch.Tensor], Iterable[int]]) -> list[int]:
    ranks = tensor._local_tensors.keys()
    per_rank = map(look_up, tensor._local_tensors.values())
    return [size_on_ranks(dict(zip(ranks, sizes))) for sizes in zip(*per_rank, strict=True)]


def _offset(tensor: LocalTensor) -> int:
    parts = tensor._local_tensors.items()
    return size_on_ranks({rank: part.storage_offset() for rank, part in parts})  # type: ignore[misc]


_OF_SHAPES: dict[Any, Callable[[LocalTensor], Any]] = {
    torch.ops.aten.sym_size.default: _sizes,
    torch.ops.aten.sym_stride.default: _strides,
    torch.ops.aten.sym_storage_offset.default: _offset,
}
