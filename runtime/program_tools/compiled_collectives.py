"""The conversions that a program writes as ``spmd.…(x, axis, src=, dst=)``, in a form that ``torch.compile`` can trace.

``spmd_types``' own functions look at a tensor's history, which dynamo does not allow. Here, types are letters (an int d
for S(d)), groups are names, and a conversion is one autograd function over ``torch.ops._c10d_functional``, so the
collectives, forward and backward, are nodes of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from passes.ir.types import I, P, R
from runtime import ops

_c10d = torch.ops._c10d_functional

#: A type on one axis: "R", "I", "P", "V", or d for S(d).
Type = str | int


def whole_gradient(spmd_type: Type) -> Type:
    """The type of the gradient of a tensor of ``spmd_type``."""
    return {R: P, P: R}.get(spmd_type, spmd_type)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Axis:
    """A mesh axis: the name of its group, how many ranks it has, and which this one is."""

    group: str
    size: int
    rank: int


def _gather(x: torch.Tensor, axis: _Axis, src: Any, dst: Any) -> torch.Tensor:
    whole = _c10d.wait_tensor(_c10d.all_gather_into_tensor(x.contiguous(), axis.size, axis.group))
    if _is_outermost(x, src):
        return whole.view(*x.shape[:src], axis.size * x.shape[src], *x.shape[src + 1 :])
    return torch.cat(whole.chunk(axis.size), src)


def _is_outermost(x: torch.Tensor, dim: int) -> bool:
    """Whether the dims outside of ``dim`` have one element: ranks' parts lie one behind the other in memory."""
    return all(size == 1 for size in x.shape[:dim])


def _reduce(x: torch.Tensor, axis: _Axis, src: Any, dst: Any) -> torch.Tensor:
    return _c10d.wait_tensor(_c10d.all_reduce(x.contiguous(), "sum", axis.group))


def _reduce_scatter(x: torch.Tensor, axis: _Axis, src: Any, dst: Any) -> torch.Tensor:
    parts = x if dst == 0 else _packed(x, axis, dst).flatten(0, 1)
    return _c10d.wait_tensor(_c10d.reduce_scatter_tensor(parts.contiguous(), "sum", axis.size, axis.group))


def _packed(x: torch.Tensor, axis: _Axis, dim: int) -> torch.Tensor:
    """Ranks' parts of ``dim`` one behind the other, along a first dim of their own."""
    if _is_outermost(x, dim):
        return x.reshape(axis.size, *x.shape[:dim], x.shape[dim] // axis.size, *x.shape[dim + 1 :])
    return torch.stack(x.chunk(axis.size, dim))


def _exchange(x: torch.Tensor, axis: _Axis, src: Any, dst: Any) -> torch.Tensor:
    split_sizes = [1] * axis.size
    parts = _c10d.all_to_all_single(_packed(x, axis, dst).contiguous(), split_sizes, split_sizes, axis.group)
    return torch.cat(_c10d.wait_tensor(parts).unbind(), src)


def _slice(x: torch.Tensor, axis: _Axis, src: Any, dst: Any) -> torch.Tensor:
    return x.chunk(axis.size, dst)[axis.rank].contiguous()


def _pad(x: torch.Tensor, axis: _Axis, src: Any, dst: Any) -> torch.Tensor:
    parts = [torch.zeros_like(x)] * axis.size
    parts[axis.rank] = x
    return torch.cat(parts, src)


def _on_first(x: torch.Tensor, axis: _Axis, src: Any, dst: Any) -> torch.Tensor:
    return x.clone() if axis.rank == 0 else torch.zeros_like(x)


def _same(x: torch.Tensor, axis: _Axis, src: Any, dst: Any) -> torch.Tensor:
    return x.view_as(x)


#: (source, target), "S" for any S(d) → the conversion's operation. The gradient is converted from the target's to the
#: source's.
_MOVES: dict[tuple[str, str], Callable[[torch.Tensor, _Axis, Any, Any], torch.Tensor]] = {
    ("S", R): _gather, ("S", I): _gather, ("S", "S"): _exchange, ("S", P): _pad,
    (P, R): _reduce, (P, I): _reduce, (P, "S"): _reduce_scatter,
    (R, I): _same, (R, "S"): _slice, (R, P): _on_first,
    (I, R): _same, (I, "S"): _slice, (I, P): _on_first,
}  # fmt: skip


def _move(x: torch.Tensor, axis: _Axis, src: Type, dst: Type) -> torch.Tensor:
    letters = tuple("S" if isinstance(spmd_type, int) else spmd_type for spmd_type in (src, dst))
    return _MOVES[letters](x, axis, src, dst)  # type: ignore[index]


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str, size: int, rank: int, src: Type, dst: Type) -> torch.Tensor:
        ctx.group, ctx.size, ctx.rank, ctx.src, ctx.dst = group, size, rank, src, dst
        return _move(x, _Axis(group, size, rank), src, dst)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        axis = _Axis(ctx.group, ctx.size, ctx.rank)
        return _move(grad, axis, whole_gradient(ctx.dst), whole_gradient(ctx.src)), None, None, None, None, None


def joint_axis(*names: str) -> tuple[str, int, int]:
    """``ops.joint``: the name of its group, how many ranks it has, and which this one is."""
    group = ops.joint(*names)
    return str(group.group_name), dist.get_world_size(group), dist.get_rank(group)


class Collectives:
    """What a program means by ``spmd`` while it is traced, on the axes of ``device_mesh``."""

    def __init__(self, device_mesh: DeviceMesh) -> None:
        names: Sequence[str] = device_mesh.mesh_dim_names or ()
        self.axes: Mapping[str, tuple[str, int, int]] = {
            name: (str(group.group_name), dist.get_world_size(group), dist.get_rank(group))
            for name in names
            for group in (device_mesh.get_group(name),)
        }

    def convert(
        self,
        x: torch.Tensor,
        axis: str | tuple[str, int, int],
        *,
        src: Type,
        dst: Type,
        expert_mode: bool = False,
        backward_options: Mapping[str, Any] | None = None,
    ) -> torch.Tensor:
        """As ``spmd.convert``; ``backward_options`` name the dtype that gradients have anyway.

        ``axis`` is a mesh axis, or what ``joint_axis`` gives.
        """
        group, size, rank = self.axes[axis] if isinstance(axis, str) else axis
        return x if src == dst or size == 1 else _Convert.apply(x, group, size, rank, src, dst)

    all_gather = all_reduce = reduce_scatter = all_to_all = redistribute = convert

    def reinterpret(self, x: torch.Tensor, axis: str, *, src: Type, dst: Type, expert_mode: bool = False) -> Any:
        """As ``spmd.reinterpret``: the tensor as it is; only from or to I its gradient is not."""
        if src == I:
            x = self.convert(x, axis, src=I, dst=R)
        return self.convert(x, axis, src=R, dst=I) if dst == I else x
