"""Entries at a place that weights decide: ``x[:, scores.argmax()]`` as a look-up, where torch reads the number.

An integer tensor without dims is to torch the number in it, which tracing has not. As a tensor of one entry it is an
index like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

IsSettled = Callable[[torch.Tensor], bool]


def look_up(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_settled: IsSettled) -> tuple[bool, Any]:
    """Whether ``name`` is a function that takes such an index, and what it gives then.

    Args:
        is_settled: whether inputs, buffers and constants decide a tensor: then its number is read.
    """
    form = _FORMS.get(name)
    if form is None or not args or not isinstance(args[0], torch.Tensor):
        return False, None

    def is_place(index: Any) -> bool:
        is_number = isinstance(index, torch.Tensor) and index.dim() == 0 and index.dtype in _INTEGERS
        return is_number and not is_settled(index)

    return form(is_place, *args, **kwargs)


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)
_Answer = tuple[bool, Any]


def _get(is_place: IsSettled, x: torch.Tensor, index: Any) -> _Answer:
    entries = _entries(index)
    if not any(map(is_place, entries)):
        return False, None
    for dim, entry in zip(_dims(x, entries), entries):
        if is_place(entry):
            x = x[_along(dim, entry.reshape(1))]
    return True, x[tuple(0 if is_place(entry) else entry for entry in entries)]


def _set(is_place: IsSettled, x: torch.Tensor, index: Any, values: Any) -> _Answer:
    entries = _entries(index)
    numbers = [number for number, entry in enumerate(entries) if is_place(entry)]
    others = [entry for number, entry in enumerate(entries) if number not in numbers]
    has_dims = isinstance(values, torch.Tensor) and values.dim() > 0
    if not numbers or not all(map(_is_basic, others)) or (has_dims and len(numbers) > 1):
        return False, None
    whole = x[tuple(slice(None) if number in numbers else entry for number, entry in enumerate(entries))]
    left_over = x.dim() - sum(map(_num_dims, entries))
    dims_given = [left_over if entry is Ellipsis else int(not isinstance(entry, int)) for entry in entries]
    at = {sum(dims_given[:number]): entries[number].reshape(1) for number in numbers}
    behind = whole.dim() - 1 - max(at)
    if has_dims and values.dim() > behind:
        values = values.unsqueeze(values.dim() - behind)
    whole[tuple(at.get(dim, slice(None)) for dim in range(max(at) + 1))] = values
    return True, None


def _is_basic(entry: Any) -> bool:
    """Whether an entry of an index gives a view."""
    is_number = isinstance(entry, int) and not isinstance(entry, bool)
    return entry is None or entry is Ellipsis or isinstance(entry, slice) or is_number


def _select(is_place: IsSettled, x: torch.Tensor, dim: int, index: Any) -> _Answer:
    if not is_place(index):
        return False, None
    return True, x[_along(dim % x.dim(), index.reshape(1))].squeeze(dim)


def _narrow(is_place: IsSettled, x: torch.Tensor, dim: int, start: Any, length: int) -> _Answer:
    if not is_place(start):
        return False, None
    return True, x[_along(dim % x.dim(), start + torch.arange(length, device=x.device))]


def _roll(is_place: IsSettled, x: torch.Tensor, shifts: Any, dims: Any = ()) -> _Answer:
    listed, along = (tuple(given) if isinstance(given, (tuple, list)) else (given,) for given in (shifts, dims))
    if not any(map(is_place, listed)) or (along and len(listed) != len(along)):
        return False, None
    if not along:
        return True, _rolled(x.flatten(), listed[0], 0).reshape(x.shape)
    for shift, dim in zip(listed, along):
        x = _rolled(x, shift, dim % x.dim()) if is_place(shift) else x.roll(shift, dim)
    return True, x


def _rolled(x: torch.Tensor, shift: torch.Tensor, dim: int) -> torch.Tensor:
    """Entry ``i`` is the one that was ``shift`` places before."""
    size = max(x.shape[dim], 1)
    return x[_along(dim, (torch.arange(x.shape[dim], device=x.device) - shift) % size)]


def _entries(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _along(dim: int, index: torch.Tensor) -> tuple[Any, ...]:
    return (*[slice(None)] * dim, index)


def _dims(x: torch.Tensor, entries: tuple[Any, ...]) -> list[int]:
    """The dim of ``x`` that each entry of an index begins at."""
    sizes = [_num_dims(entry) for entry in entries]
    left_over = x.dim() - sum(sizes)
    dims, dim = [], 0
    for entry, size in zip(entries, sizes):
        dims.append(dim)
        dim += left_over if entry is Ellipsis else size
    return dims


def _num_dims(entry: Any) -> int:
    if entry is None or entry is Ellipsis or isinstance(entry, bool):
        return 0
    is_mask = isinstance(entry, torch.Tensor) and entry.dtype in (torch.bool, torch.uint8)
    return entry.dim() if is_mask else 1


#: Names of functions and methods of torch → how they look up.
_FORMS: dict[str, Callable[..., _Answer]] = {
    "__getitem__": _get, "__setitem__": _set, "select": _select, "narrow": _narrow, "roll": _roll,
}  # fmt: skip
