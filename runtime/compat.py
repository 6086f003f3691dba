"""What differs between versions of torch, or that torch and spmd_types have but do not export: all of it here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from spmd_types import _state


def saved_tensors_hooks_of_thread() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
    """The innermost ``torch.autograd.graph.saved_tensors_hooks``: (pack, unpack)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def mesh_of_thread() -> Any:
    """The mesh of ``spmd_types.set_current_mesh`` on this thread, for ``use_mesh``; None if there is none."""
    return _state._current_mesh_entry()


@contextlib.contextmanager
def use_mesh(mesh: Any) -> Iterator[None]:
    """``set_current_mesh`` with what ``mesh_of_thread`` gave, on any thread."""
    if mesh is None:
        yield
        return
    _state._push_mesh(mesh.axes, mesh.all_names, mesh.pgs, local_axes=mesh.local_axes)
    try:
        yield
    finally:
        _state._pop_mesh()
