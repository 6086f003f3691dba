"""Groups of the ranks along several axes of a mesh, for programs that send over them as one axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from passes.torch_compat.tensor_fields import DisableTorchFunction
from runtime.launch.groups import flattened_group, mesh_along
from runtime.torch_compat.dispatcher import without_dispatch_modes
from runtime.torch_compat.spmd_internals import group_of_axis


class _KnownMesh:
    """A mesh that programs run on, and the joint groups that were made of its axes."""

    def __init__(self, device_mesh: DeviceMesh) -> None:
        self.mesh = device_mesh
        self.group_names = _group_names(device_mesh)
        self._along: dict[Sequence[str], DeviceMesh] = {}
        self.joint_groups: dict[Sequence[str], ProcessGroup] = {}

    def has(self, group_names: Mapping[str, str]) -> bool:
        """Whether these axes are its own, with these groups."""
        return all(self.group_names.get(axis) == name for axis, name in group_names.items())

    def ranks(self, axes: Sequence[str]) -> list[int]:
        """Ascending ranks along these axes that this rank is among."""
        return sorted(self._slice(axes).mesh.flatten().tolist())

    def joint(self, axes: Sequence[str]) -> ProcessGroup:
        if axes not in self.joint_groups:
            self.joint_groups[axes] = flattened_group(self._slice(axes), "_".join(axes))
        return self.joint_groups[axes]

    def _slice(self, axes: Sequence[str]) -> DeviceMesh:
        if axes not in self._along:
            self._along[axes] = mesh_along(self.mesh, axes)
        return self._along[axes]


#: The default process group → the meshes on it that programs know. They know their own by the groups of its axes.
_meshes: WeakKeyDictionary[ProcessGroup, list[_KnownMesh]] = WeakKeyDictionary()


def remember(device_mesh: DeviceMesh) -> None:
    """Let programs on ``device_mesh`` ask for joint groups."""
    known, names = _of_job(), _group_names(device_mesh)
    if not any(each.mesh == device_mesh and each.group_names == names for each in known):
        known.append(_KnownMesh(device_mesh))


def forget(device_mesh: DeviceMesh) -> None:
    """Forget the joint groups of ``device_mesh``: its groups are destroyed."""
    names, known = _group_names(device_mesh), _of_job()
    known[:] = [each for each in known if each.group_names != names]


def joint(*names: str) -> ProcessGroup:
    """The group of all ranks along several axes of the current mesh, in the order of the mesh.

    All ranks of the mesh must call this for the same axes the first time. Models on several meshes share the groups of
    axes that have the same ranks: an axis alone does not tell which mesh a program is on.
    """
    group_names = {name: group_of_axis(name).group_name for name in names}
    own = [known for known in _of_job() if known.has(group_names)]
    if len(own) > 1 or names not in own[0].joint_groups:
        # Making a group is not part of the program: dispatch modes must not see it.
        with DisableTorchFunction(), without_dispatch_modes():
            return _one_of(own, names)
    return own[0].joint(names)


def _one_of(meshes: Sequence[_KnownMesh], names: Sequence[str]) -> ProcessGroup:
    ranks = [known.ranks(names) for known in meshes]
    if any(each != ranks[0] for each in ranks):
        raise ValueError(
            f"two meshes have the same ranks along each of {', '.join(names)} here, but not along all of them "
            f"({ranks[0]} and {next(each for each in ranks if each != ranks[0])}): lay them over ranks that agree"
        )
    return meshes[0].joint(names)


def _of_job() -> list[_KnownMesh]:
    world: ProcessGroup = dist.group.WORLD  # type: ignore[assignment]
    return _meshes.setdefault(world, [])


def _group_names(device_mesh: DeviceMesh) -> dict[str, str]:
    return {name: device_mesh.get_group(name).group_name for name in device_mesh.mesh_dim_names or ()}
