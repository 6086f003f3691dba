"""Weights of the mesh's first rank on every rank, one tensor at a time, as DDP does when it wraps a model.

Ranks that build a model without the same seed have other weights each: cut as they are, the shards would belong to no
model at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from runtime.agreement.ranks_together import Ranks


def from_first_rank(
    tensors: Iterable[torch.Tensor], device_mesh: DeviceMesh, device: torch.device
) -> Iterator[torch.Tensor]:
    """Each of ``tensors`` as the mesh's first rank has it; every rank of the mesh must read to the end.

    What the first rank has on the meta device stays there on all ranks. Besides what the caller keeps, a rank holds one
    whole tensor at a time; its own tensors are not changed.
    """
    own_tensors = list(tensors)
    if device_mesh.mesh.numel() == 1:
        yield from own_tensors
        return
    message: list[Any] = [[tensor.is_meta for tensor in own_tensors]]
    route = _Route(device_mesh)
    route.objects(message)
    for tensor, meta in zip(own_tensors, message[0], strict=True):
        yield torch.empty_like(tensor, device="meta") if meta else route.tensor(tensor, device)


class FirstRanksState(Mapping[str, torch.Tensor]):
    """A state dict as the mesh's first rank has it, of which a rank holds one whole tensor at a time.

    Every rank must make one, and go through ``items()`` in their order; what other ranks pass is not looked at.

    Raises:
        ValueError: on every rank, if the first one's holds something else than whole tensors with values.
    """

    def __init__(
        self, state: Mapping[str, torch.Tensor], device_mesh: DeviceMesh, device: torch.device, ranks: Ranks
    ) -> None:
        self._own, self._route, self._device = state, _Route(device_mesh), device
        message: list[Any] = [ranks.together(lambda: _described(state) if self._route.is_first else None)]
        self._route.objects(message)
        self._described: dict[str, tuple[torch.Size, torch.dtype]] = message[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._described)

    def __len__(self) -> int:
        return len(self._described)

    def __getitem__(self, name: str) -> torch.Tensor:
        """The first rank's tensor; all ranks must ask for it at the same time."""
        shape, dtype = self._described[name]
        tensor = self._own[name] if self._route.is_first else torch.empty(shape, dtype=dtype, device="meta")
        return self._route.tensor(tensor, self._device)


def _described(state: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, DTensor) or tensor.is_meta:
            kind = "is on the meta device" if isinstance(tensor, torch.Tensor) and tensor.is_meta else "is a shard"
            kind = kind if isinstance(tensor, torch.Tensor) else f"is a {type(tensor).__name__}"
            raise ValueError(
                f"{name!r} of the state dict {kind}: load_full_state_dict takes whole tensors with values, as the "
                "original's state_dict() or full_state_dict() give them"
            )
    return {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}


class _Route:
    """How this rank hears from the first of a mesh; read once, because ``DeviceMesh.mesh`` computes at every access.

    Attributes:
        groups: those in which this rank hears from the first, or passes it on, with their source; one for each axis.
    """

    def __init__(self, device_mesh: DeviceMesh) -> None:
        ranks, coordinate = device_mesh.mesh, device_mesh.get_coordinate() or ()
        self.is_first = is_first_rank(device_mesh)
        self.groups: list[tuple[dist.ProcessGroup, int]] = []
        for axis, size in enumerate(ranks.shape):
            # Ranks beyond the first on a later axis have not received yet.
            if size > 1 and not any(coordinate[axis + 1 :]):
                group = device_mesh.get_group(axis)
                self.groups.append((group, dist.get_process_group_ranks(group)[0]))

    def tensor(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A copy of the first rank's ``tensor``."""
        if self.is_first:
            copied = tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format)
        else:
            copied = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        # As bytes: backends do not know all dtypes.
        content = copied.reshape(-1).view(torch.uint8)
        for group, source in self.groups:
            dist.broadcast(content, src=source, group=group)
        return copied

    def objects(self, message: list[Any]) -> None:
        """Replace the contents of ``message`` by the first rank's (pickled)."""
        for group, source in self.groups:
            dist.broadcast_object_list(message, src=source, group=group)


def is_first_rank(device_mesh: DeviceMesh) -> bool:
    """Whether this is the mesh's first rank."""
    return device_mesh.mesh.numel() == 1 or dist.get_rank() == int(device_mesh.mesh.flatten()[0])


def broadcast_objects(message: list[Any], device_mesh: DeviceMesh) -> None:
    """Replace the contents of ``message`` by those of the mesh's first rank (pickled)."""
    _Route(device_mesh).objects(message)
