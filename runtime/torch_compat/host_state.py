"""Memory of tensors on the host, work on lists of tensors, and how often a dict was changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import _foreach_add_ as add_all
from torch import _foreach_copy_ as copy_into_all
from torch import _foreach_mul_ as scale_all
from torch import _foreach_norm as norm_of_all
from torch._C._dynamo import guards

from passes.torch_compat.tensor_fields import storage_id

__all__ = ["add_all", "copy_into_all", "copy_tensors", "dict_version", "is_alone_in_memory", "norm_of_all",
           "num_writes", "pinned_like", "scale_all"]  # fmt: skip

_dict_version: Callable[[dict[str, Any]], Any] | None = getattr(guards, "dict_version", None)
_count_users: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def is_alone_in_memory(tensor: torch.Tensor, *, besides: int = 0) -> bool:
    """Whether no other tensor shares the memory of ``tensor`` besides so many; False where torch does not tell."""
    if _count_users is None or type(tensor) is not torch.Tensor:
        return False
    alone = torch.empty(1)  # by name: its storage must be there when it is asked
    return _count_users(storage_id(tensor)) <= _count_users(storage_id(alone)) + besides


def num_writes(tensor: torch.Tensor) -> int:
    """A number that grows with each write to ``tensor`` that autograd sees; 0 where it counts none."""
    return 0 if tensor.is_inference() else tensor._version


def pinned_like(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors on the host in pinned memory, of the shapes and dtypes of ``tensors``, with any values."""
    from torch.distributed._state_dict_utils import _create_cpu_state_dict

    pinned: dict[str, torch.Tensor] = _create_cpu_state_dict(tensors, pin_memory=True)
    return pinned


def copy_tensors(sources: dict[str, torch.Tensor], targets: dict[str, torch.Tensor]) -> None:
    """Start to copy tensors into others of the same names; between a device and pinned memory without waiting."""
    from torch.distributed._state_dict_utils import _copy_state_dict

    _copy_state_dict(sources, targets, non_blocking=True)


def dict_version(table: dict[str, Any]) -> Any:
    """A number that is another one after every change of ``table``'s entries (not of what they hold)."""
    return _dict_version(table) if _dict_version is not None else tuple(map(id, table.values()))
