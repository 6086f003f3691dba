"""The tensors of a key-value cache: which module owns each, its shape, and how a plan's mesh cuts it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from passes.ir.types import MeshShape, Placement, R, local_shape, shard_dim
from passes.pipeline_cut import BATCH_AXIS
from passes.plan import Plan
from passes.plan.plan_data import TensorPlan

ROWS, HEADS = 0, 1


@dataclass(frozen=True)
class CacheTensor:
    """Keys or values of one attention layer.

    Attributes:
        owner: path of the module that computes them.
        layer: number that the model gives the layer.
        part: ``"keys"`` or ``"values"``; ``is_cross``: of what an encoder gave.
        shape: [rows, heads, length, size of a head].
    """

    owner: str
    layer: int
    part: str
    is_cross: bool
    shape: tuple[int, int, int, int]
    dtype: torch.dtype

    @property
    def path(self) -> str:
        """Its path in a model that has the cache as buffers."""
        return ".".join(filter(None, (self.owner, self.module, self.part)))

    @property
    def module(self) -> str:
        """Name of the module below ``owner`` that has it."""
        return "cross_attention_cache" if self.is_cross else "self_attention_cache"


def batch_axes(plan: Plan) -> tuple[str, ...]:
    """The mesh axes that cut samples: as the plan cuts inputs; ``dp``, too, where the plan cuts nothing by it."""
    axes = []
    for place, name in enumerate(plan.mesh.names):
        cuts_inputs = any(shard_dim(planned.placement[place]) == ROWS for planned in plan.inputs.values())
        cuts_weights = any(shard_dim(planned.placement[place]) is not None for planned in plan.states.values())
        if cuts_inputs or (name == BATCH_AXIS and not cuts_weights):
            axes.append(name)
    return tuple(axes)


def rows_divisor(plan: Plan) -> int:
    """Number of ranks that rows of a batch are divided over."""
    return _product(plan.mesh, batch_axes(plan))


def cache_placement(tensor: CacheTensor, plan: Plan) -> Placement:
    """Rows over the axes that cut samples, heads over each other axis that divides those that remain."""
    mesh, samples = plan.mesh, batch_axes(plan)
    heads, types = tensor.shape[HEADS], []
    for name, size in zip(mesh.names, mesh.sizes):
        if size == 1:
            types.append(R)
        elif name in samples:
            types.append(f"S({ROWS})")
        elif heads % size == 0:
            heads //= size
            types.append(f"S({HEADS})")
        else:
            types.append(R)
    return tuple(types)


def planned_buffers(tensors: Sequence[CacheTensor], plan: Plan) -> dict[str, TensorPlan]:
    """What a plan says of the buffers of a cache, by path."""
    return {
        tensor.path: TensorPlan(tensor.shape, str(tensor.dtype).removeprefix("torch."), cache_placement(tensor, plan))
        for tensor in tensors
    }


def bytes_of(tensors: Sequence[CacheTensor], plan: Plan) -> int:
    """Bytes that a rank holds of these tensors."""
    return sum(
        torch.Size(local_shape(tensor.shape, cache_placement(tensor, plan), plan.mesh)).numel() * tensor.dtype.itemsize
        for tensor in tensors
    )


def _product(mesh: MeshShape, axes: Sequence[str]) -> int:
    sizes: Mapping[str, int] = mesh.as_dict()
    product = 1
    for axis in axes:
        product *= sizes[axis]
    return product
