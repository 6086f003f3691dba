"""Process groups of mesh axes: each made by its members alone, as patient as the group of the whole job.

``DeviceMesh`` makes all groups of an axis on every rank, one after the other: N calls for an axis of size 1 of N ranks.
Here a rank makes one group for each axis of several ranks, and one of itself for all others, however large the job is.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from runtime.torch_compat.process_groups import (
    default_group_timeout,
    flattened,
    group_is_split_from_default,
    new_group_of_members,
    set_group_timeout,
)


class _AxisGroups:
    """Groups of one job: how many there are of the same ranks, and those that models share, by purpose and ranks."""

    def __init__(self) -> None:
        self.counts: dict[tuple[int, ...], int] = {}
        self.shared: dict[tuple[str, tuple[int, ...]], ProcessGroup] = {}


_groups: weakref.WeakKeyDictionary[ProcessGroup, _AxisGroups] = weakref.WeakKeyDictionary()


def with_timeout_of_job(group: ProcessGroup) -> ProcessGroup:
    """``group``, which now waits for a peer as long as the default group (torch: 10 minutes on NCCL, 30 on gloo)."""
    timeout = default_group_timeout()
    if timeout is not None:
        set_group_timeout(timeout, group)
    return group


def group_of(ranks: Sequence[int], *, backend: str | None = None) -> ProcessGroup:
    """A new group of ``ranks``, this one among them; they alone must call this, in the same order as others of theirs.

    Args:
        ranks: ascending.
        backend: None for that of the whole job.
    """
    key, counts = tuple(ranks), _groups_of_job().counts
    counts[key] = counts.get(key, 0) + 1
    # All members must call it the same, whatever other groups each of them is in.
    name = f"meshwright-{hashlib.sha256(repr((key, counts[key])).encode()).hexdigest()[:24]}"
    timeout = default_group_timeout()
    return with_timeout_of_job(new_group_of_members(key, name, timeout=timeout, backend=backend))


def shared_group(purpose: str, ranks: Sequence[int], *, backend: str | None = None) -> ProcessGroup:
    """The group of ``ranks`` that all models use for a purpose, made by the first as ``group_of``.

    That of the whole job serves where it has all of them and this backend.
    """
    key = purpose, tuple(ranks)
    shared = _groups_of_job().shared
    if key not in shared:
        is_job = backend is None and list(ranks) == list(range(dist.get_world_size()))
        world: ProcessGroup = dist.group.WORLD  # type: ignore[assignment]
        shared[key] = world if is_job else group_of(ranks, backend=backend)
    return with_timeout_of_job(shared[key])


def mesh_of_axes(device_type: str, ranks: torch.Tensor, names: Sequence[str]) -> DeviceMesh:
    """A device mesh of ``ranks``, an axis each of ``names``; all of them must call this.

    Where the default group has NCCL communicators already, those of the axes are split off by ``DeviceMesh``: one call
    for each axis, without the store.
    """
    if group_is_split_from_default():
        return _with_timeouts(DeviceMesh(device_type, ranks, mesh_dim_names=tuple(names)))
    rank = dist.get_rank()
    place = (ranks == rank).nonzero()
    if len(place) != 1:
        raise ValueError(f"rank {rank} is in the mesh {ranks.tolist()} {len(place)} times: it must be once")
    groups = []
    for axis in range(ranks.ndim):
        index = tuple(slice(None) if other == axis else int(at) for other, at in enumerate(place[0]))
        # One group of this rank alone serves all axes of size 1.
        groups.append(shared_group("axis", sorted(ranks[index].tolist())))
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=tuple(names))
    return DeviceMesh.from_group(groups, device_type, mesh=ranks.contiguous(), mesh_dim_names=tuple(names))


def mesh_along(device_mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    """The mesh of some axes of ``device_mesh`` that this rank is on, in the order of ``names``.

    torch 2.11 slices a mesh in its own order alone; another order is then made of the groups that there are.
    """
    try:
        return device_mesh[tuple(names)]
    except KeyError:
        own = tuple(device_mesh.mesh_dim_names or ())
        places, coordinate = [own.index(name) for name in names], device_mesh.get_coordinate() or ()
    index = tuple(slice(None) if place in places else at for place, at in enumerate(coordinate))
    ranks = device_mesh.mesh[index].permute([sorted(places).index(place) for place in places])
    groups = [device_mesh.get_group(name) for name in names]
    return DeviceMesh.from_group(groups, device_mesh.device_type, mesh=ranks.contiguous(), mesh_dim_names=tuple(names))


def axes_in_rank_order(device_mesh: DeviceMesh) -> tuple[str, ...]:
    """Its axes, from the one that joins ranks furthest apart inwards: as groups, which sort them, number their ranks.

    Raises:
        ValueError: if ranks do not ascend along all axes together in any order of them.
    """
    ranks, names = device_mesh.mesh, device_mesh.mesh_dim_names or ()
    strides = [
        int(ranks.movedim(axis, 0).reshape(size, -1)[:2, 0].diff().sum()) for axis, size in enumerate(ranks.shape)
    ]
    order = sorted(range(ranks.ndim), key=lambda axis: -strides[axis])
    if bool((ranks.permute(order).flatten().diff() <= 0).any()):
        raise ValueError(
            f"the ranks of a mesh must ascend along its axes {', '.join(names)}, as process groups number them; these "
            f"are {ranks.tolist()}: sort them (torch.arange(…).reshape(…), its dims permuted as need be), and start "
            "processes on the devices that are to have these ranks"
        )
    return tuple(names[axis] for axis in order)


def flattened_group(device_mesh: DeviceMesh, name: str) -> ProcessGroup:
    """One group of all ranks along all axes of ``device_mesh`` that this rank is on, made once for each ``name``."""
    if group_is_split_from_default():
        return with_timeout_of_job(flattened(device_mesh, name))
    return shared_group(name, sorted(device_mesh.mesh.flatten().tolist()))


def _groups_of_job() -> _AxisGroups:
    world: ProcessGroup = dist.group.WORLD  # type: ignore[assignment]
    return _groups.setdefault(world, _AxisGroups())


def _with_timeouts(device_mesh: DeviceMesh) -> DeviceMesh:
    for name in device_mesh.mesh_dim_names or ():
        with_timeout_of_job(device_mesh.get_group(name))
    return device_mesh
