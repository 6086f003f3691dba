"""What differs between versions of torch, or that torch and spmd_types have but do not export: all of it here."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from spmd_types import _state
from torch._C._dynamo import guards
from torch.utils._python_dispatch import _disable_current_modes

_dict_version: Callable[[dict[str, Any]], Any] | None = getattr(guards, "dict_version", None)


def without_dispatch_modes() -> contextlib.AbstractContextManager[Any]:
    """What runs inside is no part of what the dispatch modes of this thread look at (a counter of collectives)."""
    return _disable_current_modes()


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


def has_saved_tensors_hooks(node: torch.autograd.graph.Node) -> bool:
    """Whether ``node`` holds a tensor behind ``saved_tensors_hooks``; True where torch does not tell."""
    return any(getattr(saved, "unpack_hook", True) is not None for saved in _saved_tensors(node))


_SAVED_NAMES: dict[type, tuple[str, ...]] = {}


def _saved_tensors(node: torch.autograd.graph.Node) -> Iterator[Any]:
    kind = type(node)
    if kind not in _SAVED_NAMES:
        _SAVED_NAMES[kind] = tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
    for name in _SAVED_NAMES[kind]:
        saved = getattr(node, name)
        yield from (one for one in (saved if isinstance(saved, (tuple, list)) else (saved,)) if one is not None)


def is_alone_in_memory(tensor: torch.Tensor, *, besides: int = 0) -> bool:
    """Whether no other tensor shares the memory of ``tensor`` besides so many; False where torch does not tell."""
    count_users = getattr(torch._C, "_storage_Use_Count", None)
    if count_users is None or type(tensor) is not torch.Tensor:
        return False
    alone, given = (count_users(one.untyped_storage()._cdata) for one in (torch.empty(1), tensor))
    return bool(given <= alone + besides)


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


@contextlib.contextmanager
def unseen_by_checkpoints() -> Iterator[None]:
    """Operators that a selective checkpoint around them neither counts nor keeps, so that they may differ again."""
    if not torch._C._len_torch_dispatch_stack():  # type: ignore[attr-defined]
        yield
        return
    from torch.utils import _python_dispatch as modes
    from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

    hidden = []
    while isinstance(modes._get_current_dispatch_mode(), (_CachingTorchDispatchMode, _CachedTorchDispatchMode)):
        hidden.append(modes._pop_mode())
    try:
        yield
    finally:
        for mode in reversed(hidden):
            modes._push_mode(mode)


def are_operators_observed() -> bool:
    """Whether a dispatch mode of this thread, other than those of selective checkpoints, is to see every operator."""
    from torch.utils import _python_dispatch as modes
    from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

    own = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)
    return any(not isinstance(mode, own) for mode in modes._get_current_dispatch_mode_stack())


@contextlib.contextmanager
def as_one_operator() -> Iterator[None]:
    """What runs inside is one operator to modes around it: function modes and checkpoints see none of its parts.

    Dynamo of torch 2.13 fails in a function mode that reads attributes, and compiles nothing in a dispatch mode.
    """
    from torch import overrides

    hidden = []
    while torch._C._len_torch_function_stack():
        hidden.append(overrides._pop_mode())
    try:
        with unseen_by_checkpoints():
            yield
    finally:
        for mode in reversed(hidden):
            overrides._push_mode(mode)


def exchanges_lists(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group's backend for ``device`` has an all-to-all of lists: gloo has none in torch 2.11."""
    if device.type not in {known.type for known in group._device_types}:
        return True  # meta tensors, of which nothing is sent
    return group._get_backend(device).name() != "gloo" or _gloo_exchanges_lists()


@functools.cache
def _gloo_exchanges_lists() -> bool:
    """Asked of a group of this process alone, where no call waits for others."""
    alone: Any = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)  # type: ignore[call-arg]
    received, sent = torch.zeros(1, device="cpu"), torch.zeros(1, device="cpu")
    try:
        alone.alltoall([received], [sent]).wait()
    except RuntimeError as error:
        if "alltoall" not in str(error):
            raise
        return False
    return True


def issue_transfers(operations: list[dist.P2POp]) -> list[dist.Work]:
    """Start sends or receives as torch's own pipeline schedules do: 2.11 in a batch, 2.13 one by one.

    NCCL has another communicator for what is in a batch, so both sides of a transfer must start it in the same way.
    """
    from torch.distributed.pipelining import schedules

    works: list[dist.Work] = schedules._batch_p2p(operations)
    return works


def set_group_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """How long collectives of a process group (default: that of the whole job) wait for a peer from now on."""
    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(timeout, group)


def default_group_timeout() -> timedelta | None:
    """How long collectives of the default process group wait for a peer; None where its backend does not tell."""
    group = dist.distributed_c10d._get_default_group()
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if timeout is not None:
            return timedelta(seconds=timeout.total_seconds())
    return None


def group_is_split_from_default() -> bool:
    """Whether torch splits new groups off the default one's communicators, for which all ranks must come together."""
    group = dist.distributed_c10d._get_default_group()
    return group.bound_device_id is not None and torch.accelerator.is_available()


def new_group_of_members(
    ranks: tuple[int, ...], name: str, *, timeout: timedelta | None, backend: str | None
) -> dist.ProcessGroup:
    """A group that its members alone make, under a name that they agree on.

    torch would call it by how many groups the process is in, which may differ between members: they would wait for
    each other under several names. It takes no name until at least 2.13, so its function for that is stood in for.
    """
    c10d = dist.distributed_c10d
    naming = c10d._process_group_name
    c10d._process_group_name = lambda *args, **kwargs: name  # type: ignore[assignment]
    try:
        group = dist.new_group(list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True)
    finally:
        c10d._process_group_name = naming
    assert isinstance(group, dist.ProcessGroup), "this rank is a member"
    return group


def device_type_of_default_group() -> str:
    """Where tensors of the default process group's collectives live: "cuda" if NCCL runs them, else "cpu"."""
    return "cuda" if "nccl" in str(dist.get_backend_config()) else "cpu"


def has_hooks(leaf: torch.Tensor) -> bool:
    """Whether something is called when a gradient is added to a leaf."""
    return bool(leaf._backward_hooks or getattr(leaf, "_post_accumulate_grad_hooks", None))
