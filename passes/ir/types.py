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
from collections.abc import Mapping
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


def local_shape(shape: tuple[int, ...], placement: Placement, mesh: MeshShape) -> tuple[int, ...]:
    """Shape of one rank's part of a tensor of global ``shape``.

    Raises:
        ValueError: if an axis does not divide the dim it shards.
    """
    local = list(shape)
    for name, size, spmd_type in zip(mesh.names, mesh.sizes, placement):
        dim = shard_dim(spmd_type)
        if dim is None:
            continue
        if local[dim] % size:
            raise ValueError(f"dim {dim} of a tensor of shape {shape} cannot be divided over mesh axis {name}={size}")
        local[dim] //= size
    return tuple(local)


def describe(placement: Placement, mesh: MeshShape) -> str:
    """``{dp: S(0), tp: R}``, for comments and tables."""
    return "{" + ", ".join(f"{name}: {spmd_type}" for name, spmd_type in zip(mesh.names, placement)) + "}"
