"""A mesh of ranks that are not there: for checking and for running every rank in one process.

A fake process group takes the place of the default one for a while; whatever was there before, with all its groups,
is put back afterwards. Nothing is sent: on a fake group collectives return at once, and ``LocalTensorMode``
computes them inside the process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import _register_process_group, _unregister_all_process_groups
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from passes.ir.types import MeshShape
from runtime.joint_axes import forget, remember

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


@contextmanager
def virtual_mesh(mesh: MeshShape) -> Iterator[DeviceMesh]:
    """A ``DeviceMesh`` of ``mesh`` on a fake process group, seen from rank 0."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    saved = _take_groups()
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=mesh.num_devices)
        device_mesh = init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names)
        remember(device_mesh)
        try:
            yield device_mesh
        finally:
            forget(device_mesh)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        _give_back_groups(saved)


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
