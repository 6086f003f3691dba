"""Groups of the ranks along several axes of a mesh, for programs that send over them as one axis."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from passes.torch_compat.tensor_fields import DisableTorchFunction
from runtime.launch.groups import flattened_group, mesh_along
from runtime.torch_compat.dispatcher import without_dispatch_modes
from runtime.torch_compat.spmd_internals import group_of_axis

#: Group of an axis → its mesh, and the joint groups that were made of it. Programs know their mesh by its groups.
_meshes: WeakKeyDictionary[ProcessGroup, tuple[DeviceMesh, dict[Sequence[str], ProcessGroup]]] = WeakKeyDictionary()


def remember(device_mesh: DeviceMesh) -> None:
    """Let programs on ``device_mesh`` ask for joint groups."""
    for name in device_mesh.mesh_dim_names or ():
        _meshes.setdefault(device_mesh.get_group(name), (device_mesh, {}))


def forget(device_mesh: DeviceMesh) -> None:
    """Forget the joint groups of ``device_mesh``: its groups are destroyed."""
    for name in device_mesh.mesh_dim_names or ():
        _meshes.pop(device_mesh.get_group(name), None)


def joint(*names: str) -> ProcessGroup:
    """The group of all ranks along several axes of the current mesh, in the order of the mesh.

    All ranks of the mesh must call this for the same axes the first time.
    """
    device_mesh, groups = _meshes[group_of_axis(names[0])]
    if names not in groups:
        # Making a group is not part of the program: dispatch modes must not see it.
        with DisableTorchFunction(), without_dispatch_modes():
            groups[names] = flattened_group(mesh_along(device_mesh, names), "_".join(names))
    return groups[names]
