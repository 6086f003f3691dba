"""Process groups of mesh axes: as patient as the group of the whole job."""

from __future__ import annotations

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from runtime.compat import default_group_timeout, set_group_timeout


def with_timeout_of_job(group: ProcessGroup) -> ProcessGroup:
    """``group``, which now waits for a peer as long as the default group (torch: 10 minutes on NCCL, 30 on gloo)."""
    timeout = default_group_timeout()
    if timeout is not None:
        set_group_timeout(timeout, group)
    return group


def axes_with_timeout_of_job(device_mesh: DeviceMesh) -> DeviceMesh:
    """``device_mesh``, whose groups now wait for a peer as long as the default group does."""
    for name in device_mesh.mesh_dim_names or ():
        with_timeout_of_job(device_mesh.get_group(name))
    return device_mesh


def flattened_group(device_mesh: DeviceMesh, name: str) -> ProcessGroup:
    """One group of all ranks along all axes of ``device_mesh`` that this rank is on, made once for each ``name``."""
    return with_timeout_of_job(device_mesh._flatten(name).get_group())
