"""Counting what a program really sends: every collective, by kind, mesh axis and phase, with its bytes."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from passes.ir.conversions import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from passes.plan import CollectivePlan
from passes.plan.plan_data import OVER_PIECES, OVER_REPLICAS
from passes.torch_compat.operators import TorchDispatchMode, schema
from runtime.torch_compat.autograd_engine import in_backward
from runtime.torch_compat.process_groups import group_named

#: Operator of torch → (collective, does its input hold only this rank's part?).
_COLLECTIVES = {
    "_c10d_functional::all_reduce": (ALL_REDUCE, False),
    "_c10d_functional::all_reduce_": (ALL_REDUCE, False),
    "_c10d_functional::all_gather_into_tensor": (ALL_GATHER, True),
    "_c10d_functional::reduce_scatter_tensor": (REDUCE_SCATTER, False),
    "_c10d_functional::all_to_all_single": (ALL_TO_ALL, True),
    "c10d::allreduce_": (ALL_REDUCE, False),
    "c10d::_allgather_base_": (ALL_GATHER, True),
    "c10d::allgather_": (ALL_GATHER, True),
    "c10d::_reduce_scatter_base_": (REDUCE_SCATTER, False),
    "c10d::alltoall_": (ALL_TO_ALL, True),
    "c10d::alltoall_base_": (ALL_TO_ALL, True),
}
#: Where the operator's own input stands among its arguments (0 unless said).
_INPUT_PLACE = {"c10d::_allgather_base_": 1, "c10d::allgather_": 1, "c10d::_reduce_scatter_base_": 1,
                "c10d::alltoall_": 1, "c10d::alltoall_base_": 1}  # fmt: skip


#: Whether what is issued counts as part of the backward pass before it: reductions that wait for its end.
ends_backward: ContextVar[bool] = ContextVar("ends_backward", default=False)


class CommunicationCounter(TorchDispatchMode):
    """Counts the collectives issued inside ``with CommunicationCounter(mesh) as counter``.

    Bytes are as in ``Step.num_bytes``: of the tensor as it is on one rank once it is whole on that axis. Works on
    real process groups and, entered inside it, under ``LocalTensorMode``. Groups of one rank send nothing.

    Args:
        data_axes, zero_ranks: over how many neighbours of the ranks of which axes the plan divides
            (``StepPlan.zero_ranks``), to tell the groups of hybrid sharding by.
    """

    def __init__(self, device_mesh: DeviceMesh, *, data_axes: Sequence[str] = (), zero_ranks: int = 0) -> None:
        super().__init__()
        self.mesh, self.data_axes, self.zero_ranks = device_mesh, data_axes, zero_ranks
        groups = {name: device_mesh.get_group(name) for name in device_mesh.mesh_dim_names or ()}
        #: What to call each group; None for those that are not counted.
        self.axes: dict[str, str | None] = {
            group.group_name: name if group.size() > 1 else None for name, group in groups.items()
        }
        self.counts: dict[tuple[str, str, str], list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = schema(func).name
        if name in _COLLECTIVES:
            self._count(name, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        collective, is_part = _COLLECTIVES[name]
        named = (group_name for group_name in map(_group_name, (*args, *kwargs.values())) if group_name is not None)
        group, axis = next(
            ((group_name, axis) for group_name in named for axis in [self._axis_of(group_name)] if axis), ("", "")
        )
        if not axis:
            return
        tensors = args[_INPUT_PLACE.get(name, 0)]
        num_bytes = _bytes_of_group(tensors, group_named(group)) if is_part else _num_bytes(tensors)
        backward = in_backward() or ends_backward.get()
        entry = self.counts.setdefault((collective, axis, "backward" if backward else "forward"), [0, 0])
        entry[0] += 1
        entry[1] += num_bytes

    def _axis_of(self, group: str) -> str | None:
        """The mesh axis of a group, axes side by side with ``_`` between them, or None for another group."""
        if group not in self.axes and group in ("sum", "max", "min", "avg", "product"):
            return None
        if group not in self.axes:
            ranks = dist.get_process_group_ranks(group_named(group))
            self.axes[group] = next((name for name, rows in self._joint if ranks in rows), None)
        return self.axes[group]

    @functools.cached_property
    def _joint(self) -> list[tuple[str, list[list[int]]]]:
        """Several axes side by side with the ranks of their groups; axes of one rank do not count."""
        names, ranks = self.mesh.mesh_dim_names or (), self.mesh.mesh
        several = [place for place, size in enumerate(ranks.shape) if size > 1]
        groups = []
        for first, end in itertools.combinations(range(len(several) + 1), 2):
            places = several[first:end]
            if len(places) > 1:
                rows = ranks.movedim(places, list(range(-len(places), 0))).flatten(-len(places))
                label = "_".join(names[place] for place in places)
                groups.append((label, rows.reshape(-1, rows.shape[-1]).tolist()))
        return [*groups, *self._of_pieces()] if self.zero_ranks else groups

    def _of_pieces(self) -> Iterator[tuple[str, list[list[int]]]]:
        """The groups of hybrid sharding: neighbours that hold all pieces together, and those that hold the same.

        Where there is an axis of experts, also the neighbours of one place on it; the others are the same.
        """
        names, ranks = self.mesh.mesh_dim_names or (), self.mesh.mesh
        places = [place for place, name in enumerate(names) if name in self.data_axes and ranks.shape[place] > 1]
        yield from self._divided(places, self.zero_ranks)
        beside = [place for place in places if names[place] != "ep"]
        if len(beside) < len(places):
            num_experts = math.prod(ranks.shape[place] for place in places if place not in beside)
            yield from self._divided(beside, self.zero_ranks // num_experts)

    def _divided(self, places: Sequence[int], size: int) -> Iterator[tuple[str, list[list[int]]]]:
        names, ranks = self.mesh.mesh_dim_names or (), self.mesh.mesh
        label = "_".join(names[place] for place in places)
        data = ranks.movedim(tuple(places), tuple(range(-len(places), 0))).flatten(-len(places)).reshape(-1, size)
        yield f"{label}{OVER_PIECES}", data.tolist()
        num_replicas = math.prod(ranks.shape[place] for place in places) // size
        same = data.reshape(-1, num_replicas, size).transpose(1, 2)
        yield f"{label}{OVER_REPLICAS}", same.reshape(-1, num_replicas).tolist()

    @property
    def collectives(self) -> tuple[CollectivePlan, ...]:
        """What was counted, in the form of ``Plan.collectives``, sorted."""
        return tuple(
            CollectivePlan(*key, count=count, num_bytes=num_bytes)
            for key, (count, num_bytes) in sorted(self.counts.items())
        )


def _group_name(argument: Any) -> str | None:
    """The name of a process group, in any of the forms in which torch passes one."""
    if isinstance(argument, str):
        return argument
    if isinstance(argument, ProcessGroup):
        return argument.group_name
    if isinstance(argument, torch.ScriptObject):
        try:
            return ProcessGroup.unbox(argument).group_name
        except (RuntimeError, TypeError):
            return None
    return None


def _bytes_of_group(tensors: Any, group: ProcessGroup) -> int:
    """Bytes of the tensors of all ranks of a group. A real rank knows its own, and takes the others' to be alike.

    Of virtual ranks those of the first group if its parts are alike: where another axis cuts unevenly, it has the
    longest, which are planned. Otherwise the mean over the groups of an axis, which send different rows to experts.
    """
    if not isinstance(tensors, torch.Tensor):
        return sum(_bytes_of_group(tensor, group) for tensor in tensors)
    if isinstance(tensors.numel(), int):
        return tensors.numel() * tensors.element_size() * group.size()
    parts = {rank: part.numel() for rank, part in _parts(tensors).items()}
    first = [parts[rank] for rank in dist.get_process_group_ranks(group)]
    if len(set(first)) == 1:
        return first[0] * tensors.element_size() * group.size()
    return sum(parts.values()) * tensors.element_size() * group.size() // len(parts)


def _num_bytes(tensors: Any) -> int:
    """Bytes of a tensor or of all tensors in nested lists; of virtual ranks those of the first."""
    if isinstance(tensors, torch.Tensor):
        return _elements(tensors) * tensors.element_size()
    return sum(map(_num_bytes, tensors))


def _elements(tensor: torch.Tensor) -> int:
    count = tensor.numel()
    return count if isinstance(count, int) else next(iter(_parts(tensor).values())).numel()


def _parts(tensor: torch.Tensor) -> dict[int, torch.Tensor]:
    """Each virtual rank's tensor, where these are of several sizes."""
    from runtime.torch_compat.local_tensors import parts_of_ranks

    return parts_of_ranks(tensor)
