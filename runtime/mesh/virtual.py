"""A mesh of ranks that are not there: for checking and for running every rank in one process.

A fake process group takes the place of the default one for a while; whatever was there before, with all its groups,
is put back afterwards. Nothing is sent: on a fake group collectives return at once, and ``LocalTensorMode``
computes them inside the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from passes.ir.types import MeshShape
from runtime.mesh.joint_axes import forget, remember
from runtime.torch_compat.process_groups import own_default_group


@contextmanager
def virtual_mesh(mesh: MeshShape) -> Iterator[DeviceMesh]:
    """A ``DeviceMesh`` of ``mesh`` on a fake process group, seen from rank 0."""
    from runtime.torch_compat.local_tensors import FakeStore

    with own_default_group():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=mesh.num_devices)
        device_mesh = init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names)
        remember(device_mesh)
        try:
            yield device_mesh
        finally:
            forget(device_mesh)
