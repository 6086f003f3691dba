"""Conversions between types on one mesh axis, and the collectives that each one issues.

The backward collective follows from the forward one: the gradient of S(d) is S(d), of P is R, of R is P, of I is I.
Types and semantics are those of the ``spmd_types`` package.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from passes.ir.types import (
    I,
    MeshShape,
    P,
    Placement,
    R,
    SpmdType,
    can_cut,
    largest_local_shape,
    largest_part,
    shard_dim,
    sharding_axes,
)

ALL_REDUCE = "all_reduce"
ALL_GATHER = "all_gather"
REDUCE_SCATTER = "reduce_scatter"
ALL_TO_ALL = "all_to_all"
COLLECTIVES = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL)

#: (source, target) → (forward collective, backward collective); "S" stands for any S(d).
CONVERSIONS: dict[tuple[str, str], tuple[str | None, str | None]] = {
    ("S", R): (ALL_GATHER, REDUCE_SCATTER),
    ("S", I): (ALL_GATHER, None),  # backward: each rank slices the whole gradient
    ("S", "S"): (ALL_TO_ALL, ALL_TO_ALL),
    (P, R): (ALL_REDUCE, ALL_REDUCE),
    (P, I): (ALL_REDUCE, None),
    (P, "S"): (REDUCE_SCATTER, ALL_GATHER),
    (R, I): (None, None),  # backward: rank 0 keeps the gradient, the others zero
    (R, "S"): (None, None),  # forward slices, backward pads with zeros
    (R, P): (None, None),  # forward: rank 0 keeps the value
    (I, R): (None, ALL_REDUCE),
    (I, "S"): (None, ALL_GATHER),
    (I, P): (None, None),
}


def _letter(spmd_type: SpmdType) -> str:
    return spmd_type if shard_dim(spmd_type) is None else "S"


#: What several axes may change from and to at once, over the group of their ranks.
JOINT = frozenset({("S", R), ("S", I), ("S", "S"), (P, R), (P, I), (P, "S")})


@dataclass(frozen=True)
class Step:
    """One change of type, on one mesh axis; a conversion of a placement is a sequence of them.

    A *joint* step changes the same type to the same other on several axes side by side, in one collective over the
    group of all their ranks; ``axis`` is then the outermost of them.
    """

    axis: int
    source: Placement
    target: Placement

    @functools.cached_property
    def axes(self) -> tuple[int, ...]:
        """All axes that change, outermost first."""
        return tuple(index for index, (a, b) in enumerate(zip(self.source, self.target)) if a != b) or (self.axis,)

    @property
    def is_joint(self) -> bool:
        return len(self.axes) > 1

    def axis_name(self, mesh: MeshShape) -> str:
        """The axis that changes; of a joint step all, with ``_`` between them."""
        return mesh.names[self.axis] if len(self.axes) == 1 else "_".join(mesh.names[axis] for axis in self.axes)

    @property
    def source_type(self) -> SpmdType:
        return self.source[self.axis]

    @property
    def target_type(self) -> SpmdType:
        return self.target[self.axis]

    @functools.cached_property
    def collectives(self) -> tuple[str | None, str | None]:
        """Forward and backward collective (None: no communication)."""
        return CONVERSIONS[_letter(self.source_type), _letter(self.target_type)]

    @functools.cached_property
    def laid_out_dims(self) -> tuple[int | None, int | None]:
        """The dims of which the collectives, forward and backward, send or bring ranks' parts (None: of no dim).

        An all-to-all's is the one that it cuts.
        """
        source, target = shard_dim(self.source_type), shard_dim(self.target_type)
        if source is not None and target is not None:
            return target, source
        dim = target if source is None else source
        forward, backward = (
            dim if collective in (ALL_GATHER, REDUCE_SCATTER) else None for collective in self.collectives
        )
        return forward, backward

    @functools.cached_property
    def whole(self) -> Placement:
        """The placement of the tensor once it is whole on this step's axes."""
        return tuple(R if axis in self.axes else where for axis, where in enumerate(self.source))

    def num_bytes(self, shape: tuple[int, ...], item_size: int, mesh: MeshShape) -> int:
        """Bytes of the tensor as it is on one rank once it is whole on this step's axis.

        It is what an all-reduce reduces, what an all-gather gives, what a reduce-scatter takes; an all-to-all
        holds 1/n of it on each rank. Forward and backward move the same. Unequal parts are sent as the largest.
        """
        return self.num_bytes_of(largest_local_shape(shape, self.whole, mesh), item_size, mesh)

    def num_bytes_of(self, whole: tuple[int, ...], item_size: int, mesh: MeshShape) -> int:
        """The same by the shape that the tensor has on one rank once it is whole on this step's axis."""
        count = mesh.sizes[self.axis] if len(self.axes) == 1 else math.prod(mesh.sizes[axis] for axis in self.axes)
        num_bytes = item_size * math.prod(whole)
        if all(whole[dim] % count == 0 for dim in self.moved_dims):
            return num_bytes
        local = list(whole)
        for dim in self.moved_dims:
            local[dim] = count * largest_part(local[dim], count)
        return item_size * math.prod(local)

    def copied_bytes(self, whole: tuple[int, ...], num_bytes: int, mesh: MeshShape, *, outer: int) -> float:
        """Bytes that programs copy beside a collective of ``num_bytes`` that sends or brings parts of a dim.

        Ranks' parts lie one behind the other in memory, as parts of the first dim do, or of one outside of which all
        dims have one element. Of another dim they are laid out, before they are scattered or once they are gathered.
        An all-to-all lays out what it sends, and joins what it brings in any case. Unequal parts are padded before,
        and trimmed behind.

        Args:
            whole: the shape on one rank of the tensor once it is whole on this step's axes.
            outer: elements of the dims outside of that dim (``laid_out_dims``).
        """
        count = math.prod(mesh.sizes[axis] for axis in self.axes)
        uneven = sum(whole[moved] % count > 0 for moved in self.moved_dims)
        copies = int(outer > 1)
        if len(self.moved_dims) > 1:
            return (copies + 1 + 2 * uneven) * num_bytes / count
        return (copies + uneven * (1 + 1 / count)) * num_bytes

    @functools.cached_property
    def moved_dims(self) -> frozenset[int]:
        """The dims that are sharded on this step's axis before or behind it."""
        dims = (shard_dim(self.source_type), shard_dim(self.target_type))
        return frozenset(dim for dim in dims if dim is not None)


def is_legal(step: Step, shape: tuple[int, ...], mesh: MeshShape) -> bool:
    """Whether a step exists, can cut the tensor so, and touches only the innermost axis that shards a dim."""
    return exists(step) and cuts(step.target, shape, mesh)


def exists(step: Step) -> bool:
    """Whether there is such a conversion, and it touches only the innermost axis that shards a dim.

    Where several axes shard one dim the outer axis comes first in the mesh, so an axis may begin or stop to shard a
    dim only while no later axis shards it.
    """
    source, target = step.source_type, step.target_type
    if (_letter(source), _letter(target)) not in CONVERSIONS or source == target:
        return False
    if step.is_joint:
        return _exists_jointly(step)
    later = step.source[step.axis + 1 :]
    return not any(spmd_type in later for spmd_type in (source, target) if shard_dim(spmd_type) is not None)


def _exists_jointly(step: Step) -> bool:
    """Whether all axes of a joint step change alike, and no axis further in than the outermost shares their dims."""
    pair = (step.source_type, step.target_type)
    if (_letter(pair[0]), _letter(pair[1])) not in JOINT:
        return False
    if any((step.source[axis], step.target[axis]) != pair for axis in step.axes):
        return False
    others = [where for axis, where in enumerate(step.source) if axis > step.axes[0] and axis not in step.axes]
    return not any(spmd_type in others for spmd_type in pair if shard_dim(spmd_type) is not None)


def step_between(source: Placement, target: Placement) -> Step:
    """The step, of one axis or of several, from one placement to another."""
    axis = next(index for index, (a, b) in enumerate(zip(source, target)) if a != b)
    return Step(axis, source, target)


def divides(placement: Placement, shape: tuple[int, ...], mesh: MeshShape) -> bool:
    """Whether every axis evenly divides the dim that it shards."""
    pieces: dict[int, int] = {}
    for size, spmd_type in zip(mesh.sizes, placement):
        dim = shard_dim(spmd_type)
        if dim is not None:
            pieces[dim] = pieces.get(dim, 1) * size
    return all(dim < len(shape) and shape[dim] % count == 0 for dim, count in pieces.items())


def cuts(placement: Placement, shape: tuple[int, ...], mesh: MeshShape) -> bool:
    """Whether the axes can cut every dim that they shard, evenly or not (``can_cut``)."""
    return divides(placement, shape, mesh) or all(
        dim < len(shape) and can_cut(shape[dim], [mesh.sizes[axis] for axis in axes])
        for dim, axes in sharding_axes(placement).items()
    )


def steps_from(placement: Placement, mesh: MeshShape, types: Sequence[Sequence[SpmdType]]) -> Iterator[Step]:
    """Every step out of ``placement`` to one of an axis's ``types`` (axes of size 1 excluded).

    Whether the target divides a tensor is for the caller to check.
    """
    for axis, size in enumerate(mesh.sizes):
        if size == 1:
            continue
        for spmd_type in types[axis]:
            step = Step(axis, placement, (*placement[:axis], spmd_type, *placement[axis + 1 :]))
            if exists(step):
                yield step


def joint_steps_from(placement: Placement, mesh: MeshShape, types: Sequence[Sequence[SpmdType]]) -> Iterator[Step]:
    """Every joint step out of ``placement``, over axes side by side (those of size 1 between them do not count)."""
    several = [axis for axis, size in enumerate(mesh.sizes) if size > 1]
    for first in range(len(several)):
        for end in range(first + 2, len(several) + 1):
            axes = several[first:end]
            if len({placement[axis] for axis in axes}) > 1:
                break
            for spmd_type in sorted(set.intersection(*(set(types[axis]) for axis in axes))):
                target = tuple(spmd_type if axis in axes else where for axis, where in enumerate(placement))
                step = Step(axes[0], placement, target)
                if target != placement and exists(step):
                    yield step
