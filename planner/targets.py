"""What a model is compiled for: a mesh, a plan or a cluster, told apart, and the device mesh that each one means."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cost_models import Cluster
from passes.ir.types import MeshShape
from passes.plan import Plan
from planner.planning import as_mesh_shape
from runtime.launch.place import find_place
from runtime.launch.process import init

#: What ``planner.compile`` takes to say where a model runs.
Target = DeviceMesh | MeshShape | Mapping[str, int] | Plan | Cluster | str | Path


def read_target(target: Target) -> DeviceMesh | MeshShape | Plan | Cluster:
    """A mesh, a plan or a cluster.

    Text is told apart by its form, in this order: what ends in ``.toml`` is a cluster's file and what ends in ``.json``
    a plan's (any other ``Path`` is a plan's too); what has an ``=`` in it is axis sizes (``"dp=2,tp=2"``); all else is
    a cluster's short form (``"dgx-h100:1"``).

    Raises:
        ValueError: if a file cannot be read, or text has none of these forms.
    """
    if isinstance(target, Mapping):
        return as_mesh_shape(target)
    if not isinstance(target, (str, Path)):
        return target
    text = str(target)
    if text.endswith(".toml"):
        return Cluster.from_toml(text)
    if text.endswith(".json") or isinstance(target, Path):
        return Plan.load(text)
    if "=" in text:
        return as_mesh_shape(text)
    try:
        return Cluster.parse(text)
    except ValueError as error:
        raise ValueError(f"{error} (axis sizes are written 'dp=2,tp=2', the path of a plan ends in .json)") from error


def as_device_mesh(mesh: DeviceMesh | MeshShape | Plan) -> tuple[DeviceMesh, MeshShape]:
    """A device mesh and its shape; sizes are laid over the default process group, which is made if need be.

    Consecutive ranks are neighbours on the last axis. A plan of a whole step says itself which axis is the innermost
    one, so that each axis runs on the links that it was planned for.

    Raises:
        ValueError: if the world size is not the product of the sizes, or a ``DeviceMesh`` has no axis names.
    """
    if isinstance(mesh, DeviceMesh):
        if not mesh.mesh_dim_names:
            raise ValueError("the mesh has no axis names: pass mesh_dim_names=('dp', 'tp') to init_device_mesh")
        if mesh.get_coordinate() is None:
            raise ValueError(f"rank {dist.get_rank()} is not part of the mesh: call compile on the mesh's ranks only")
        return mesh, MeshShape(tuple(mesh.mesh_dim_names), tuple(mesh.mesh.shape))
    shape = mesh.mesh if isinstance(mesh, Plan) else mesh
    device = join_process_group(shape.num_devices, needed_by=f"mesh {shape}")
    if isinstance(mesh, Plan) and mesh.step is not None:
        return DeviceMesh(device, planned_ranks(mesh), mesh_dim_names=shape.names), shape
    return init_device_mesh(device, shape.sizes, mesh_dim_names=shape.names), shape


def planned_ranks(plan: Plan) -> torch.Tensor:
    """Ranks by their place on the axes of ``plan.mesh``, numbered in the order of the step's axes; int tensor."""
    assert plan.step is not None
    axes = {name: size for name, size in plan.step.axes.items() if name in plan.mesh.names}
    outer_to_inner = list(axes)
    ranks = torch.arange(plan.mesh.num_devices).reshape(tuple(axes.values()))
    return ranks.permute([outer_to_inner.index(name) for name in plan.mesh.names]).contiguous()


def join_process_group(num_devices: int, *, needed_by: str) -> str:
    """The device type of the default process group, which is joined as the environment says if need be.

    Raises:
        ValueError: if it does not have ``num_devices`` processes; ``needed_by`` says what needs them.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else find_place(os.environ).world_size
    if world_size != num_devices:
        raise ValueError(
            f"{needed_by} needs {num_devices} processes, but the world size is {world_size}: start that many "
            f"(planner run --nproc {num_devices}, or torchrun) or choose another mesh or cluster"
        )
    return init().device.type


def runnable_fix(fix: Mapping[str, Any] | None, forbid: Mapping[str, Any] | None) -> dict[str, Any]:
    """``fix`` narrowed to what the emitted program does today.

    Raises:
        ValueError: if ``fix`` or ``forbid`` rules that out; the message names what clashes.
    """
    from passes.plan_checks import RUNNABLE

    narrowed = dict(fix or {})
    for name, value in RUNNABLE.items():
        if value not in _values(narrowed.get(name, value)):
            raise ValueError(
                f"fix: {name!r} must allow {value!r} in compile(), got {narrowed[name]!r}: nothing else is run yet "
                "(planner.plan plans it)"
            )
        if value in _values((forbid or {}).get(name, ())):
            raise ValueError(
                f"forbid: {name!r} must not rule out {value!r} in compile(): nothing else is run yet (planner.plan "
                "plans it)"
            )
        narrowed[name] = value
    return narrowed


def _values(given: Any) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, (list, tuple, set, frozenset)) else (given,)
