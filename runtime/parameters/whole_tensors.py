"""Operators that DTensor has no rule for, run on whole tensors, and writes through views that DTensor gathers.

DTensor raises where no rule says how an operator is cut (``torch.allclose``, ``renorm``, an optimizer's own kernel).
What one device computes is then computed by every rank on gathered tensors. A view of a dim that is cut
(``weight[3]``) is no view: DTensor gathers it, and what is written to it (``weight[3].zero_()``) is lost. Such a view
remembers what it is of, and a write to it is written there again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from passes.torch_compat.operators import schema, tree_leaves, tree_map
from runtime.torch_compat.dtensors import dtensor_over, dtensor_spec, local_part, spec_of


@dataclass(frozen=True)
class GatheredView:
    """What a view is of, where its memory is not that tensor's.

    Attributes:
        source: the tensor that was viewed.
        view: makes the view of a whole tensor.
    """

    source: DTensor
    view: Callable[[torch.Tensor], torch.Tensor]


def can_run_whole(operator: Any, tensors: list[Any]) -> bool:
    """Whether every rank gets the same from gathered tensors: not where memory is laid out."""
    return operator.name() != "aten::as_strided" or all(one.is_contiguous() for one in tensors)


def has_empty_parts(spec: Any) -> bool:
    """Whether some rank has no element of a tensor that has some; the same answer on all ranks."""
    if 0 in spec.shape:
        return False
    for dim, size in enumerate(spec.shape):
        parts = [size]
        for axis, placement in enumerate(spec.placements):
            if placement.is_shard(dim):
                parts = [part for whole in parts for part in _chunks(whole, spec.mesh.size(axis))]
        if 0 in parts:
            return True
    return False


def _chunks(size: int, count: int) -> list[int]:
    """Sizes of the parts that ``torch.chunk`` makes, with zeros for those that it leaves out."""
    largest = -(-size // count)
    return [max(0, min(largest, size - number * largest)) for number in range(count)]


def run_whole(operator: Any, args: Any, kwargs: Any, beside: DTensor) -> Any:
    """The operator on whole tensors, on every rank; what it writes to is cut again as it was.

    Args:
        args, kwargs: with DTensors, and plain tensors that are the same on all ranks.
        beside: a DTensor on the mesh of the results, which are whole on every rank.
    """
    whole_of: dict[int, torch.Tensor] = {}

    def whole(leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        if id(leaf) not in whole_of:
            whole_of[id(leaf)] = gathered_tensor(leaf)
        return whole_of[id(leaf)]

    whole_args, whole_kwargs = tree_map(whole, (args, kwargs))
    result = operator(*whole_args, **whole_kwargs)
    for tensor in written_tensors(operator, args, kwargs):
        if isinstance(tensor, DTensor):
            put_whole(tensor, whole_of[id(tensor)])
    inputs = {id(whole_of[id(leaf)]): leaf for leaf in tree_leaves((args, kwargs)) if id(leaf) in whole_of}
    return tree_map(lambda leaf: inputs.get(id(leaf), leaf), _on_mesh(result, beside, inputs))


def gathered_tensor(tensor: DTensor) -> torch.Tensor:
    """The whole tensor, in memory that is not the DTensor's."""
    plain: DTensor = dtensor_over(DTensor, local_part(tensor), spec_of(tensor))
    whole = plain.full_tensor().detach()
    return whole.clone() if whole.data_ptr() == local_part(tensor).data_ptr() else whole


def put_whole(tensor: DTensor, whole: torch.Tensor) -> None:
    """Write this rank's part of ``whole``, which all ranks have, into ``tensor``."""
    mesh = tensor.device_mesh
    spec = dtensor_spec(whole.shape, whole.dtype, mesh, [Replicate()] * mesh.ndim)
    cut: DTensor = dtensor_over(DTensor, whole, spec)
    local_part(tensor).copy_(local_part(cut.redistribute(placements=spec_of(tensor).placements)))


def written_tensors(operator: Any, args: Any, kwargs: Any) -> list[Any]:
    """The tensors that a call of ``operator`` writes to, by its schema."""
    written: list[Any] = []
    for place, argument in enumerate(schema(operator).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return written


def gathered_views(operator: Any, args: Any, kwargs: Any, results: list[Any], *, of_view: bool) -> list[Any]:
    """For each result of a view, what it is of; None where its memory is the viewed tensor's own.

    Args:
        of_view: whether the viewed tensor has memory of its own itself, so that all its views are written to both.
    """
    source = args[0]
    placements = spec_of(source).placements

    def entry(number: int, result: DTensor) -> GatheredView | None:
        is_gathered = any(
            before.is_partial() or (before.is_shard() and not after.is_shard())
            for before, after in zip(placements, spec_of(result).placements, strict=True)
        )
        if not (is_gathered or of_view):
            return None

        def view(whole: torch.Tensor) -> torch.Tensor:
            viewed = operator(whole, *args[1:], **kwargs)
            chosen: torch.Tensor = viewed if isinstance(viewed, torch.Tensor) else viewed[number]
            return chosen

        return GatheredView(source, view)

    return [entry(number, result) for number, result in enumerate(results)]


def write_back(tensor: DTensor, origin: GatheredView) -> None:
    """Write what ``tensor`` is to the tensor that it is a view of."""
    whole = gathered_tensor(origin.source)
    origin.view(whole).copy_(gathered_tensor(tensor))
    put_whole(origin.source, whole)


def _on_mesh(result: Any, beside: DTensor, inputs: dict[int, Any]) -> Any:
    """Tensors that an operator made as DTensors that are whole on every rank."""
    mesh = beside.device_mesh

    def on_mesh(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or id(leaf) in inputs:
            return leaf
        spec = dtensor_spec(leaf.shape, leaf.dtype, mesh, [Replicate()] * mesh.ndim)
        return dtensor_over(DTensor, leaf.contiguous(), spec)

    return tree_map(on_mesh, result)
