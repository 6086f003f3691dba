"""The ranks that share a unit's state, and the collectives among them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from runtime.launch.groups import flattened_group

#: Asynchronous and seen by dispatch modes on every backend; a result may be read after ``wait``.
_COLLECTIVES = torch.ops._c10d_functional


@dataclass(frozen=True)
class StateGroup:
    """A process group by name, its size and this rank's place in it. Without arguments: one rank alone.

    Attributes:
        replicas: the ranks of other groups that hold the same pieces as this one (hybrid sharding): what a group has
            reduced is summed over them once a step. None: this is the only group.
    """

    name: str = ""
    size: int = 1
    rank: int = 0
    replicas: StateGroup | None = None

    @staticmethod
    def of(group: ProcessGroup | None, replicas: ProcessGroup | None = None) -> StateGroup:
        """The state group of a process group; None for one rank alone."""
        if group is None:
            return StateGroup()
        others = None if replicas is None else StateGroup.of(replicas)
        return StateGroup(group.group_name, group.size(), group.rank(), others)

    def all_gather(self, row: torch.Tensor) -> Any:
        return _COLLECTIVES.all_gather_into_tensor(row, self.size, self.name) if self.size > 1 else row

    def reduce_scatter(self, rows: torch.Tensor) -> Any:
        return _COLLECTIVES.reduce_scatter_tensor(rows, "sum", self.size, self.name) if self.size > 1 else rows

    def all_reduce(self, buffer: torch.Tensor, operation: str = "sum") -> Any:
        """Reduce ``buffer`` in place; it may be read after ``wait``."""
        return _COLLECTIVES.all_reduce_(buffer, operation, self.name) if self.size > 1 else buffer

    def wait(self, result: Any) -> Any:
        return _COLLECTIVES.wait_tensor(result) if self.size > 1 else result


def sum_over(owners: Iterable[nn.Parameter], group: StateGroup) -> None:
    """Add up the gradients of parameters that several ranks hold copies of (tied across pipeline stages), in place.

    All ranks of ``group`` must pass the same parameters in the same order; a gradient that one lacks counts as zero.
    """
    if group.size == 1:
        return
    running = []
    for owner in owners:
        if owner.grad is None:
            owner.grad = torch.zeros_like(owner)
        contiguous = owner.grad if owner.grad.is_contiguous() else owner.grad.contiguous()
        running.append((owner.grad, contiguous, group.all_reduce(contiguous)))
    for gradient, contiguous, result in running:
        group.wait(result)
        if contiguous is not gradient:
            gradient.copy_(contiguous)


def everyone_of(device_mesh: DeviceMesh) -> StateGroup:
    """All ranks of a mesh as one group, made at the first call (which all of them must make)."""
    if device_mesh.mesh.numel() == 1:
        return StateGroup()
    if device_mesh.mesh.ndim == 1:
        return StateGroup.of(device_mesh.get_group())
    return StateGroup.of(flattened_group(device_mesh, "ranks"))
