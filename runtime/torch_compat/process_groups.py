"""Process groups of ``torch.distributed``: their names, timeouts and backends, and the tables that hold them."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import _register_process_group, _unregister_all_process_groups
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName

from runtime.torch_compat.connections import recorded

__all__ = ["all_gather_along", "default_group_timeout", "device_type_of_default_group", "exchanges_lists", "flattened",
           "functional_collectives", "group_is_split_from_default", "group_named", "groups_stay",
           "new_group_of_members", "own_default_group", "reduce_scatter_along", "set_group_timeout"]  # fmt: skip

#: ``(tensor, dim, group)`` and ``(tensor, operation, dim, group)``: torch 2.13 has new names and warns of the old ones.
all_gather_along, reduce_scatter_along = (
    getattr(functional_collectives, f"{name}_single", None) or getattr(functional_collectives, f"{name}_tensor")
    for name in ("all_gather", "reduce_scatter")
)

#: Held by the thread that empties the tables of process groups, or that needs them as they are.
_group_tables = threading.RLock()

#: Tables in which torch.distributed keeps its process groups.
_TABLES = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "tags_to_pg",
    "pg_to_tag",
    "pg_coalesce_state",
)


def group_named(name: str) -> dist.ProcessGroup:
    """The process group that torch calls ``name``."""
    return c10d._resolve_process_group(GroupName(name))


def flattened(device_mesh: DeviceMesh, name: str) -> dist.ProcessGroup:
    """The group of all ranks along all axes of a mesh, split off the groups that there are."""
    return device_mesh._flatten(name).get_group()


def exchanges_lists(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group's backend for ``device`` has an all-to-all of lists: gloo has none in torch 2.11."""
    if device.type not in {each.type for each in group._device_types}:
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


def set_group_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """How long collectives of a process group (default: that of the whole job) wait for a peer from now on."""
    c10d._set_pg_timeout(timeout, group)


def default_group_timeout() -> timedelta | None:
    """How long collectives of the default process group wait for a peer; None where its backend does not tell."""
    group = c10d._get_default_group()
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if timeout is not None:
            return timedelta(seconds=timeout.total_seconds())
    return None


def group_is_split_from_default() -> bool:
    """Whether torch splits new groups off the default one's communicators, for which all ranks must come together."""
    group = c10d._get_default_group()
    return group.bound_device_id is not None and torch.accelerator.is_available()


def new_group_of_members(
    ranks: tuple[int, ...], name: str, *, timeout: timedelta | None, backend: str | None
) -> dist.ProcessGroup:
    """A group that its members alone make, under a name that they agree on.

    torch would call it by how many groups the process is in, which may differ between members: they would wait for
    each other under several names. It takes no name until at least 2.13, so its function for that is stood in for.
    """
    naming = c10d._process_group_name
    c10d._process_group_name = lambda *args, **kwargs: name  # type: ignore[assignment]
    try:
        with recorded():
            group = dist.new_group(list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True)
    finally:
        c10d._process_group_name = naming
    assert isinstance(group, dist.ProcessGroup), "this rank is a member"
    return group


def device_type_of_default_group() -> str:
    """Where tensors of the default process group's collectives live: "cuda" if NCCL runs them, else "cpu"."""
    return "cuda" if "nccl" in str(dist.get_backend_config()) else "cpu"


@contextlib.contextmanager
def own_default_group() -> Iterator[None]:
    """Inside the block there is no process group until it makes one; those there were are put back after it.

    It waits for other threads that are inside ``groups_stay``; they wait for it.
    """
    with _group_tables:
        saved = _take_groups()
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            _give_back_groups(saved)


@contextlib.contextmanager
def groups_stay() -> Iterator[None]:
    """Inside the block, for collectives on a thread of their own, no other thread takes the process groups away."""
    with _group_tables:
        yield


def _take_groups() -> dict[str, Any]:
    """Empty torch.distributed's tables; returns what stood there."""
    world = c10d._world
    saved: dict[str, Any] = {name: dict(getattr(world, name)) for name in _TABLES if hasattr(world, name)}
    saved["default"] = world.default_pg, world.group_count, c10d._default_pg_init_method, sys.excepthook
    for name in _TABLES:
        if hasattr(world, name):
            getattr(world, name).clear()
    world.default_pg, world.group_count = None, 0
    _unregister_all_process_groups()
    return saved


def _give_back_groups(saved: dict[str, Any]) -> None:
    world = c10d._world
    world.default_pg, world.group_count, c10d._default_pg_init_method, sys.excepthook = saved.pop("default")
    for name, table in saved.items():
        getattr(world, name).clear()
        getattr(world, name).update(table)
    for group, name in world.pg_names.items():
        _register_process_group(name, group)
