"""The target that a model is compiled for (a mesh, a plan or a cluster) and its device mesh."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cost_models import Cluster
from cost_models.fields import suggest
from passes.ir.types import MeshShape
from passes.plan import Plan
from planner.planning import as_mesh_shape
from planner.whole_step.candidates.demands import asks_for_step, check_time_limit, fixed_axes
from planner.whole_step.candidates.mesh_layout import AXES
from runtime.launch.groups import axes_in_rank_order, mesh_of_axes
from runtime.launch.place import find_place
from runtime.launch.process import init, leave_at_exit

#: What ``planner.compile`` takes to say where a model runs.
Target = DeviceMesh | MeshShape | Mapping[str, int] | Plan | Cluster | str | Path


def read_target(target: Target) -> DeviceMesh | MeshShape | Plan | Cluster:
    """Read a mesh, a plan or a cluster.

    The form of a text decides, in this order: a name ending in ``.toml`` is a cluster file, one ending in ``.json`` a
    plan file (as is any other ``Path``); a text with ``=`` gives axis sizes (``"dp=2,tp=2"``); any other text is a
    cluster's short form (``"dgx-h100:1"``).

    Raises:
        ValueError: if a file cannot be read, text has none of these forms, or the ranks of a ``DeviceMesh`` do not
            ascend along its axes.
    """
    if isinstance(target, Mapping):
        return as_mesh_shape(target)
    if isinstance(target, DeviceMesh) and target.mesh_dim_names:
        axes_in_rank_order(target)
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


def num_devices_of(target: Target) -> int:
    """How many devices a target names.

    Raises:
        ValueError: as ``read_target``.
    """
    target = read_target(target)
    if isinstance(target, DeviceMesh):
        return target.mesh.numel()
    return target.step.num_devices if isinstance(target, Plan) else target.num_devices


def as_device_mesh(
    mesh: DeviceMesh | MeshShape | Plan, ranks: Sequence[int] | None = None
) -> tuple[DeviceMesh, MeshShape]:
    """A device mesh and its shape; sizes are laid over ``ranks``, or the default process group, made if need be.

    Consecutive ranks are neighbours on the last axis.

    Raises:
        ValueError: if there are not as many ranks as the product of the sizes, or a ``DeviceMesh`` has no axis names.
    """
    if isinstance(mesh, DeviceMesh):
        if not mesh.mesh_dim_names:
            raise ValueError("the mesh has no axis names: pass mesh_dim_names=('dp', 'tp') to init_device_mesh")
        if mesh.get_coordinate() is None:
            raise ValueError(f"rank {dist.get_rank()} is not part of the mesh: call compile on the mesh's ranks only")
        leave_at_exit()
        return mesh, MeshShape(tuple(mesh.mesh_dim_names), tuple(mesh.mesh.shape))
    shape = mesh.mesh if isinstance(mesh, Plan) else mesh
    device = join_process_group(shape.num_devices, needed_by=f"mesh {shape}", ranks=ranks)
    return mesh_of_axes(device, _numbers(ranks, shape.num_devices).reshape(shape.sizes), shape.names), shape


def _numbers(ranks: Sequence[int] | None, num_devices: int) -> torch.Tensor:
    return torch.arange(num_devices, device="cpu") if ranks is None else torch.tensor(list(ranks), device="cpu")


def process_group_as_cluster(ranks: Sequence[int] | None = None) -> Cluster:
    """The devices of ``ranks``, or of all of the default process group, which is joined if need be."""
    process = init()
    everyone = mesh_of_axes(process.device.type, _numbers(ranks, process.world_size), ("ranks",))
    return Cluster.from_device_mesh(everyone)


#: Parameters of ``planner.plan`` and ``planner.sharding_ilp.search`` that ``compile`` fills in itself.
_OF_COMPILE = {"model", "cluster", "mesh", "batch_size", "global_batch", "seq_len", "example_inputs", "loss_fn",
               "dtype", "training", "memory_limit", "constraints", "fuse", "graph", "cost_model", "cluster_info",
               "pinned", "rules", "flops"}  # fmt: skip


def plans_step(target: DeviceMesh | MeshShape | Cluster | Plan, options: Mapping[str, Any]) -> bool:
    """Whether a whole step is to be planned: on a cluster, with a pipeline axis, or where options are about steps."""
    return not isinstance(target, Plan) and (isinstance(target, Cluster) or asks_for_step(axis_sizes(target), options))


def axis_sizes(target: DeviceMesh | MeshShape) -> dict[str, int]:
    """Axis → size."""
    if isinstance(target, DeviceMesh):
        return dict(zip(target.mesh_dim_names or (), target.mesh.shape))
    return target.as_dict()


def check_options(options: Mapping[str, Any], *, step: bool | None, of: str = "compile") -> None:
    """Raise ValueError for an option that ``compile`` (or what ``of`` names) does not have.

    Args:
        step: whether a whole step is planned, or how tensors are split over a given mesh; None for either.
    """
    check_time_limit(options.get("time_limit", 0.0))
    from planner.planning import plan
    from planner.sharding_ilp import search

    of_step, of_mesh = (set(inspect.signature(function).parameters) - _OF_COMPILE for function in (plan, search))
    allowed = of_step | of_mesh if step is None else of_step if step else of_mesh
    for name in options:
        if name in allowed:
            continue
        if name in of_step | of_mesh:
            other = "on a given mesh alone" if step else "of a whole step (on a cluster, or with fix=)"
            raise ValueError(f"{name} is an option of plans {other}, which this is not: drop it")
        raise ValueError(f"{of} has no option {name!r}{suggest(name, allowed)}: it has {', '.join(sorted(allowed))}")


def step_device_mesh(plan: Plan, target: Target, ranks: Sequence[int] | None = None) -> DeviceMesh:
    """The mesh of a step over all its axes (``AXES``), with ranks numbered in the order of the plan's axes.

    So each axis runs on the links that it was planned for. A given ``DeviceMesh`` says which rank stands where, else
    ``ranks``, or all of them.

    Raises:
        ValueError: if there is another number of processes, or the given mesh has other sizes.
    """
    axes = plan.step.axes
    if isinstance(target, DeviceMesh):
        leave_at_exit()
        device = target.device_type
        sizes = fixed_axes(axis_sizes(target))
        if {axis: sizes.get(axis, 1) for axis in AXES} != {axis: axes.get(axis, 1) for axis in AXES}:
            raise ValueError(f"the plan is for axes {axes}, the mesh has {sizes}: plan again for it")
        names = list(target.mesh_dim_names or ())
        numbers = target.mesh.permute([names.index(axis) for axis in axes if axis in names])
    else:
        device = join_process_group(plan.step.num_devices, needed_by=f"the plan's mesh {axes}", ranks=ranks)
        numbers = _numbers(ranks, plan.step.num_devices)
    order, placed_axes = list(axes), tuple(axis for axis in AXES if axis in axes)
    placed = numbers.reshape(tuple(axes.values())).permute([order.index(axis) for axis in placed_axes])
    return mesh_of_axes(device, placed, placed_axes)


def join_process_group(num_devices: int, *, needed_by: str, ranks: Sequence[int] | None = None) -> str:
    """The device type of the default process group; joins the group as the environment says if not done yet.

    Raises:
        ValueError: if ``ranks``, or all of them, are not ``num_devices`` processes; ``needed_by`` says what needs them.
    """
    if ranks is not None:
        if len(ranks) != num_devices:
            raise ValueError(f"{needed_by} needs {num_devices} processes, but ranks={list(ranks)} are {len(ranks)}")
        return init().device.type
    world_size = dist.get_world_size() if dist.is_initialized() else find_place(os.environ).world_size
    if world_size != num_devices:
        raise ValueError(
            f"{needed_by} needs {num_devices} processes, but the world size is {world_size}: start that many "
            f"(planner run --nproc {num_devices}, or torchrun) or choose another mesh or cluster"
        )
    return init().device.type
