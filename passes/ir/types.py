"""SPMD types of a tensor, one per mesh axis.

On every mesh axis a tensor has one type, written as in the ``spmd_types`` package:

* ``"S(d)"``: sharded along tensor dim ``d``; its gradient is sharded the same way.
* ``"P"``: partial sums, the value is the sum over ranks; its gradient is ``"R"``.
* ``"R"``: the same value on all ranks; its gradient is partial (``"P"``).
* ``"I"``: the same value on all ranks; its gradient is the same on all ranks too.

A tensor that carries no gradient is never typed ``"I"``: for it, ``"R"`` says all there is to say.
The types are plain strings so that plans are readable JSON and the search can use them as keys.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

R = "R"
I = "I"  # noqa: E741  (the field's name for it)
P = "P"

SpmdType = str
#: One type per mesh axis, in mesh order.
Placement = tuple[SpmdType, ...]


def shard(dim: int) -> SpmdType:
    """The type of a tensor sharded along ``dim`` (non-negative)."""
    return f"S({dim})"


@functools.cache
@functools.lru_cache(maxsize=1024)
def shard_dim(spmd_type: SpmdType) -> int | None:
    """The dim that ``spmd_type`` shards, or None if it is R, I or P."""
    return int(spmd_type[2:-1]) if spmd_type.startswith("S(") else None


def parse_type(text: str) -> SpmdType:
    """Check a type written by a person (``"S(0)"``, ``"R"``, ``"I"``, ``"P"``).

    Raises:
        ValueError: if ``text`` is none of them.
    """
    stripped = text.replace(" ", "")
    if stripped in (R, I, P):
        return stripped
    if re.fullmatch(r"S\([0-9]{1,3}\)", stripped):
        return stripped
    raise ValueError(f"unknown type {text!r}: expected 'R', 'I', 'P' or 'S(dim)' with dim a non-negative integer")


#: What a mesh axis may be called. Names of axes stand in emitted source.
AXIS_NAME = r"[A-Za-z_][A-Za-z0-9_.-]{0,63}"


@dataclass(frozen=True)
class MeshShape:
    """Names and sizes of the mesh axes, outermost first."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sizes) or not self.names:
            raise ValueError(f"a mesh needs one size per axis name, got names {self.names} and sizes {self.sizes}")
        for name in self.names:
            if not isinstance(name, str) or not re.fullmatch(AXIS_NAME, name):
                raise ValueError(
                    "a mesh axis is named by a letter and up to 63 letters, digits, '_', '.' or '-', such as 'dp', got "
                    f"{str(name)[:80]!r}"
                )
        if any(isinstance(size, bool) or not isinstance(size, int) for size in self.sizes):
            raise ValueError(f"mesh axis sizes must be integers, got {dict(zip(self.names, self.sizes))}")
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"mesh axis names must differ, got {self.names}")
        if any(size < 1 for size in self.sizes):
            raise ValueError(f"mesh axis sizes must be at least 1, got {dict(zip(self.names, self.sizes))}")

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes)

    def size(self, name: str) -> int:
        return self.sizes[self.names.index(name)]

    def as_dict(self) -> dict[str, int]:
        return dict(zip(self.names, self.sizes))

    @staticmethod
    def from_dict(axes: Mapping[str, int]) -> MeshShape:
        return MeshShape(tuple(axes), tuple(axes.values()))

    @staticmethod
    def parse(text: str) -> MeshShape:
        """Read ``"dp=2,tp=4"``.

        Raises:
            ValueError: if the text is not a comma-separated list of ``name=size``.
        """
        axes: dict[str, int] = {}
        for part in text.split(","):
            name, equals, size = part.strip().partition("=")
            if not equals or not re.fullmatch(AXIS_NAME, name) or not re.fullmatch(r"[0-9]{1,18}", size):
                raise ValueError(f"cannot read mesh {text!r}: expected name=size pairs such as 'dp=2,tp=4'")
            if name in axes:
                raise ValueError(f"cannot read mesh {text!r}: axis {name!r} is named twice")
            axes[name] = int(size)
        return MeshShape.from_dict(axes)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in zip(self.names, self.sizes))


#: An uneven cut may add this share of a dim as padding: collectives send it, and the first ranks compute as much more.
MOST_PADDING = 1 / 8
#: The last rank of an uneven cut holds at least so much: a dim of 1 would broadcast.
LEAST_LAST_PART = 2


def largest_part(extent: int, count: int) -> int:
    """What the first of ``count`` ranks holds of a dim."""
    return -(-extent // count)


def part_of_dim(extent: int, count: int, index: int) -> tuple[int, int]:
    """Offset and length of what rank ``index`` of ``count`` holds of a dim, as ``torch.chunk`` and DTensor cut it."""
    largest = largest_part(extent, count)
    offset = min(index * largest, extent)
    return offset, min(largest, extent - offset)


def can_cut(extent: int, counts: Sequence[int]) -> bool:
    """Whether axes of these sizes may cut a dim together: they divide it, or one alone cuts it with little padding."""
    count = math.prod(counts)
    if extent % count == 0:
        return True
    largest = largest_part(extent, count)
    return (
        sum(size > 1 for size in counts) == 1
        and count * largest - extent <= MOST_PADDING * extent
        and extent - (count - 1) * largest >= LEAST_LAST_PART
    )


def largest_local_shape(shape: tuple[int, ...], placement: Placement, mesh: MeshShape) -> tuple[int, ...]:
    """Shape of the first rank's part of a tensor of global ``shape``, whether or not it may be cut so."""
    local = list(shape)
    for size, spmd_type in zip(mesh.sizes, placement):
        dim = shard_dim(spmd_type)
        if dim is not None:
            local[dim] = largest_part(local[dim], size)
    return tuple(local)


def local_shape(shape: tuple[int, ...], placement: Placement, mesh: MeshShape) -> tuple[int, ...]:
    """Shape of the first rank's part of a tensor of global ``shape``; of an uneven dim the last ranks hold less.

    Raises:
        ValueError: if axes shard a dim that they cannot cut (``can_cut``).
    """
    for dim, axes in sharding_axes(placement).items():
        if not can_cut(shape[dim], [mesh.sizes[axis] for axis in axes]):
            names = ", ".join(f"{mesh.names[axis]}={mesh.sizes[axis]}" for axis in axes)
            raise ValueError(f"dim {dim} of a tensor of shape {shape} cannot be divided over mesh axis {names}")
    return largest_local_shape(shape, placement, mesh)


def sharding_axes(placement: Placement) -> dict[int, tuple[int, ...]]:
    """The axes, by index, that shard each dim."""
    axes: dict[int, tuple[int, ...]] = {}
    for axis, spmd_type in enumerate(placement):
        dim = shard_dim(spmd_type)
        if dim is not None:
            axes[dim] = (*axes.get(dim, ()), axis)
    return axes


def uneven_dims(shape: tuple[int, ...], placement: Placement, mesh: MeshShape) -> dict[int, int]:
    """The dims of a tensor that ``placement`` cuts into unequal parts, with the axis (by index) that cuts each."""
    return {
        dim: next(axis for axis in axes if mesh.sizes[axis] > 1)
        for dim, axes in sharding_axes(placement).items()
        if dim < len(shape) and shape[dim] % math.prod(mesh.sizes[axis] for axis in axes)
    }


def describe(placement: Placement, mesh: MeshShape) -> str:
    """``{dp: S(0), tp: R}``, for comments and tables."""
    return "{" + ", ".join(f"{name}: {spmd_type}" for name, spmd_type in zip(mesh.names, placement)) + "}"
