"""The placements that a value may have, and the priced single-axis steps between them."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from passes.ir.conversions import Step, steps_from
from passes.ir.graph import Value
from passes.ir.types import I, MeshShape, Placement, R, SpmdType
from planner.search.options import placements_of
from planner.search.pricing import Pricing


@dataclass(frozen=True)
class Arc:
    """A conversion step between two placements of a lattice (indices), in seconds and bytes of one copy."""

    source: int
    target: int
    step: Step
    forward: float
    backward: float
    memory: int


@dataclass(frozen=True)
class Lattice:
    """Nodes are placements, arcs are steps."""

    placements: tuple[Placement, ...]
    index: dict[Placement, int]
    arcs: tuple[Arc, ...]


def types_used(
    value: Value, placements: Iterable[Placement], *, settled: Collection[int] = ()
) -> tuple[tuple[SpmdType, ...], ...]:
    """Types worth considering on each axis: R, I if there is a gradient, and whatever the ends of a stream use.

    A shard of a dim that no producer gives and no consumer takes, or a partial sum that neither has, is never on a
    cheapest way: every step to it and away from it costs at least the step past it. On a ``settled`` axis
    a value that has one type at all its ends keeps it.
    """
    always = [R, I] if value.requires_grad else [R]
    used = [set(types) for types in zip(*placements)]
    for axis, types in enumerate(used):
        if axis not in settled or len(types) != 1:
            types.update(always)
    return tuple(tuple(sorted(types)) for types in used)


class Lattices:
    """Makes lattices, one for all values of the same shape, dtype and types."""

    def __init__(self, pricing: Pricing, forbidden: frozenset[str] = frozenset()) -> None:
        self.pricing = pricing
        self.forbidden = forbidden
        self._known: dict[tuple[object, ...], Lattice] = {}

    def of(
        self,
        value: Value,
        types: tuple[tuple[SpmdType, ...], ...],
        *,
        live: bool = True,
        saved: bool = False,
        detours: bool = False,
    ) -> Lattice:
        """The lattice of ``value``; ``live``: a gradient comes back, ``saved``: copies are kept for it.

        ``detours`` keeps also the arcs that others replace at no more cost.
        """
        key = (value.shape, value.dtype, value.requires_grad, types, live, saved, self.pricing.family(value))
        if (*key, detours) not in self._known:
            placements = tuple(placements_of(value, types, self.pricing.mesh))
            arcs = self._arcs(value, placements, types, live=live, saved=saved)
            index = {placement: position for position, placement in enumerate(placements)}
            self._known[*key, True] = Lattice(placements, index, tuple(arcs.values()))
            self._known[*key, False] = Lattice(placements, index, _without_detours(arcs))
        return self._known[*key, detours]

    def _arcs(
        self,
        value: Value,
        placements: tuple[Placement, ...],
        types: tuple[tuple[SpmdType, ...], ...],
        *,
        live: bool,
        saved: bool,
    ) -> dict[tuple[int, int], Arc]:
        mesh = self.pricing.mesh
        divided = MeshShape(mesh.names, tuple(min(size, 2) for size in mesh.sizes))
        arcs: dict[tuple[int, int], Arc] = {}
        for source, target, step in _steps_between(placements, divided, types):
            if self.forbidden and self._is_forbidden(step, value, live):
                continue
            forward, backward = self.pricing.step(step, value)
            memory = self.pricing.step_memory(step, value, saved=saved) if saved else 0
            arcs[source, target] = Arc(source, target, step, forward, backward if live else 0.0, memory)
        return arcs

    def _is_forbidden(self, step: Step, value: Value, live: bool) -> bool:
        forward, backward = step.collectives
        return forward in self.forbidden or (live and value.requires_grad and backward in self.forbidden)


@functools.lru_cache(maxsize=4096)
def _steps_between(
    placements: tuple[Placement, ...], mesh: MeshShape, types: tuple[tuple[SpmdType, ...], ...]
) -> tuple[tuple[int, int, Step], ...]:
    """Every step from one of ``placements`` to another: their indices and the step (the same for all sizes above 1)."""
    index = {placement: position for position, placement in enumerate(placements)}
    return tuple(
        (position, index[step.target], step)
        for position, placement in enumerate(placements)
        for step in steps_from(placement, mesh, types)
        if step.target in index
    )


def _without_detours(arcs: dict[tuple[int, int], Arc]) -> tuple[Arc, ...]:
    """Drop every arc that two others (still there) replace at no more cost: all distances stay the same."""
    out: dict[int, dict[int, Arc]] = {}
    for arc in arcs.values():
        out.setdefault(arc.source, {})[arc.target] = arc
    for arc in arcs.values():
        forward, backward, memory = arc.forward, arc.backward, arc.memory
        for middle, first in out[arc.source].items():
            if first.forward > forward or first.backward > backward:
                continue
            second = out.get(middle, {}).get(arc.target)
            if (
                second is not None
                and first.forward + second.forward <= forward
                and first.backward + second.backward <= backward
                and first.memory + second.memory <= memory
            ):
                del out[arc.source][arc.target]
                break
    return tuple(arc for arc in arcs.values() if arc.target in out[arc.source])
