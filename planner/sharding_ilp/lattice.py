"""The placements that a value may have, and the priced steps between them, of one axis or of several at once."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from passes.ir.conversions import Step
from passes.ir.graph import Value
from passes.ir.types import I, MeshShape, P, Placement, R, SpmdType, shard
from planner.sharding_ilp.options import placements_of
from planner.sharding_ilp.sharding_prices import Pricing
from planner.sharding_ilp.step_tables import StepTable, step_table

if TYPE_CHECKING:
    import numpy as np

    from planner.sharding_ilp.assignment import Conversion

#: For values with more placements than this, no placements between those of their ends are searched.
MAX_PLACEMENTS = 256
#: A path must be cheaper by this share to count as cheaper.
CHEAPER = 1e-9


class Arc(NamedTuple):
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

    @functools.cached_property
    def incidence(self) -> list[tuple[list[int], list[float]]]:
        """By node, the places of arcs that touch it, and 1 for those that lead to it, -1 for those that leave it."""
        incidence: list[tuple[list[int], list[float]]] = [([], []) for _ in self.placements]
        for place, arc in enumerate(self.arcs):
            for node, sign in ((arc.target, 1.0), (arc.source, -1.0)):
                incidence[node][0].append(place)
                incidence[node][1].append(sign)
        return incidence

    @functools.cached_property
    def keeps_copies(self) -> bool:
        """Whether some arc leaves a copy behind."""
        return any(arc.memory for arc in self.arcs)

    @functools.cached_property
    def form(self) -> tuple[object, ...]:
        """All that the rows of a program depend on: placements, and of each arc its ends and which costs are none."""
        arcs = ((arc.source, arc.target, not arc.forward, not arc.backward, not arc.memory) for arc in self.arcs)
        return self.placements, tuple(arcs)

    @functools.cached_property
    def seconds(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each arc, forward and backward."""
        import numpy as np

        forward, backward = (np.array([arc[phase] for arc in self.arcs], dtype=float) for phase in (3, 4))
        return forward, backward


def types_used(
    value: Value, placements: Iterable[Placement], *, settled: Collection[int] = ()
) -> tuple[tuple[SpmdType, ...], ...]:
    """Types on each axis that ends of a stream use, and those that cost nothing to pass: R, I if there is a gradient.

    On one axis no other is on a cheapest way, but for copies: every step to it and away from it costs at least the step
    past it. (An all-to-all to parts of the first dim may save copies; a search of such ways takes an eighth longer.) On
    several axes others may be, see ``Lattices``. On a ``settled`` axis a value that has one type at all its ends
    keeps it.
    """
    always = [R, I] if value.requires_grad else [R]
    used = [set(types) for types in zip(*placements)]
    for axis, types in enumerate(used):
        if axis not in settled or len(types) != 1:
            types.update(always)
    return tuple(tuple(sorted(types)) for types in used)


@dataclass(frozen=True)
class _Arcs:
    """The steps of a table with their seconds forward and backward; infinite seconds of what cannot be done."""

    table: StepTable
    forward: list[float]
    backward: list[float]

    @functools.cached_property
    def key(self) -> tuple[object, ...]:
        """The steps and their seconds, to tell others by that are the same."""
        return self.table, tuple(self.forward), tuple(self.backward)

    @property
    def seconds(self) -> list[float]:
        """Of all steps, forward and backward together."""
        return list(map(operator.add, self.forward, self.backward))

    def least(self, starts: Sequence[int]) -> np.ndarray:
        """Seconds of the cheapest ways from ``starts`` to all placements, by index: without the ways, and so sooner
        than by ``distances``."""
        import numpy as np

        order, source, first, targets = self.table.by_target
        lengths = np.array(self.seconds)[order]
        seconds = np.full((len(starts), self.table.num_placements), np.inf)
        seconds[range(len(starts)), starts] = 0.0
        while len(targets):
            arrivals = np.minimum.reduceat(seconds[:, source] + lengths, first, axis=1)
            before = seconds[:, targets]
            shorter = np.minimum(before, arrivals)
            if np.array_equal(shorter, before):
                break
            seconds[:, targets] = shorter
        return seconds


@dataclass(frozen=True)
class _Ways:
    """All placements that a value may have, and the arcs between them."""

    placements: tuple[Placement, ...]
    index: dict[Placement, int]
    arcs: _Arcs

    @functools.cached_property
    def distances(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of the cheapest way between each two placements, and the placement before its end, by index."""
        return distances(len(self.placements), self.arcs)

    @property
    def seconds(self) -> np.ndarray:
        return self.distances[0]

    @property
    def before(self) -> np.ndarray:
        return self.distances[1]

    def between(self, ends: Sequence[Placement], arcs: _Arcs) -> tuple[Placement, ...]:
        """Placements that the cheapest ways between ``ends`` pass and no end has (``arcs``: the steps between ends)."""
        if not self.placements:
            return ()
        places = [self.index[end] for end in ends]
        if not (self.arcs.least(places)[:, places] < arcs.least(range(len(ends))) * (1 - CHEAPER / 2)).any():
            return ()
        direct, _ = distances(len(ends), arcs)
        cheaper = self.seconds[places][:, places] < direct * (1 - CHEAPER)
        passed: set[int] = set()
        for source, target in zip(*cheaper.nonzero()):
            first, node = places[source], int(self.before[places[source], places[target]])
            while node != first:
                passed.add(node)
                node = int(self.before[first, node])
        return tuple(self.placements[node] for node in sorted(passed - set(places)))


class LatticePool:
    """Lattices, and the cheapest ways between placements, by the prices of their steps.

    Values of other cuts whose parts have as many bytes often have the same.

    Attributes:
        ways: by the prices of all steps.
        between: placements between ends, by the prices of the steps of both.
        trees: cheapest trees of conversions, by all that they depend on (``planner.sharding_ilp.assignment``); the
            lattice, which is named by its id there, is kept beside them.
    """

    def __init__(self) -> None:
        self._lattices: dict[tuple[object, ...], tuple[Lattice, Lattice]] = {}
        self.ways: dict[tuple[object, ...], _Ways] = {}
        self.between: dict[tuple[object, ...], tuple[Placement, ...]] = {}
        self.trees: dict[tuple[object, ...], tuple[Lattice, tuple[Conversion, ...] | None]] = {}

    def lattices(
        self, placements: tuple[Placement, ...], arcs: _Arcs, copies: Sequence[int]
    ) -> tuple[Lattice, Lattice]:
        """The lattice of these steps, with detours and without; ``copies``: bytes that a step to each placement leaves
        behind."""
        key = (*arcs.key, tuple(copies))
        if key not in self._lattices:
            index = {placement: position for position, placement in enumerate(placements)}
            possible = _possible(arcs, copies)
            self._lattices[key] = (
                Lattice(placements, index, possible), Lattice(placements, index, _without_detours(possible))
            )  # fmt: skip
        return self._lattices[key]


class Lattices:
    """Makes lattices, one for all values of the same shape, dtype and types.

    A lattice has all placements of the types of its ends, and on several axes those that a cheapest way between two of
    them passes (a tree to three or more might pass others). Steps that would take infinite seconds are left out.
    """

    def __init__(
        self, pricing: Pricing, forbidden: frozenset[str] = frozenset(), *, pool: LatticePool | None = None
    ) -> None:
        self.pricing = pricing
        self.forbidden = forbidden
        self.pool = LatticePool() if pool is None else pool
        self._cache: dict[tuple[object, ...], Lattice] = {}
        self._ways: dict[tuple[object, ...], _Ways] = {}

    def of(
        self,
        value: Value,
        types: tuple[tuple[SpmdType, ...], ...],
        *,
        settled: Collection[int] = (),
        live: bool = True,
        saved: bool = False,
        detours: bool = False,
    ) -> Lattice:
        """The lattice of ``value``; ``live``: a gradient comes back, ``saved``: copies are kept for it.

        On a ``settled`` axis no types but these are used.

        ``detours`` keeps also the arcs that others replace at no more cost.
        """
        open_axes = tuple(axis for axis, size in enumerate(self.pricing.mesh.sizes) if size > 1 and axis not in settled)
        kind = (value.shape, value.dtype, value.requires_grad, live, self.pricing.family(value))
        key = (kind, types, open_axes, saved)
        shared = self.pricing.shared_lattices(value, types)
        cache = self._cache if shared is None else shared
        if (*key, detours) not in cache:
            ends = tuple(placements_of(value, types, self.pricing.mesh))
            arcs = self._arcs(value, ends, live=live)
            between = self._between(value, kind, ends, arcs, open_axes, live=live) if len(open_axes) > 1 else ()
            if between:
                arcs = self._arcs(value, (*ends, *between), live=live)
            placements = (*ends, *between)
            copies = [self.pricing.local_bytes(value, where) if saved else 0 for where in placements]
            cache[*key, True], cache[*key, False] = self.pool.lattices(placements, arcs, copies)
        return cache[*key, detours]

    def _between(
        self,
        value: Value,
        kind: tuple[object, ...],
        ends: tuple[Placement, ...],
        arcs: _Arcs,
        open_axes: tuple[int, ...],
        *,
        live: bool,
    ) -> tuple[Placement, ...]:
        """Placements that the cheapest ways between ``ends`` pass though no end has such types (``arcs``: the others).

        There are some where axes meet: two that shard one dim can only be moved away one after the other, perhaps to a
        third dim in the meantime, and a slice by one axis makes what another reduces or gathers smaller.
        """
        closed = tuple(
            () if axis in open_axes else tuple(sorted(set(on_axis))) for axis, on_axis in enumerate(zip(*ends))
        )
        paths = self._ways.get((kind, closed))
        if paths is None:
            paths = self._ways[kind, closed] = self._all_ways(value, closed, live=live)
        key = (*arcs.key, *paths.arcs.key)
        if key not in self.pool.between:
            self.pool.between[key] = paths.between(ends, arcs)
        return self.pool.between[key]

    def _all_ways(self, value: Value, closed: tuple[tuple[SpmdType, ...], ...], *, live: bool) -> _Ways:
        """The cheapest ways between all placements with the types of ``closed``, any type where it has none."""
        gradient = [I] if value.requires_grad else []
        every = [R, P, *gradient, *(shard(dim) for dim in range(len(value.shape)))]
        placements = tuple(placements_of(value, [on_axis or every for on_axis in closed], self.pricing.mesh))
        if len(placements) > MAX_PLACEMENTS:
            placements = ()
        arcs = self._arcs(value, placements, live=live)
        if arcs.key not in self.pool.ways:
            index = {where: place for place, where in enumerate(placements)}
            self.pool.ways[arcs.key] = _Ways(placements, index, arcs)
        return self.pool.ways[arcs.key]

    def _arcs(self, value: Value, placements: tuple[Placement, ...], *, live: bool) -> _Arcs:
        mesh = self.pricing.mesh
        divided = MeshShape(mesh.names, tuple(min(size, 2) for size in mesh.sizes))
        table = step_table(placements, divided, joint=getattr(self.pricing.cost_model, "prices_joint_axes", False))
        forward, backward = self.pricing.steps(table, value)
        if not live:
            backward = [0.0] * len(backward)
        for place in table.joint:
            if table.axis_names[place] in mesh.names:
                forward[place] = math.inf  # the group of several axes is not called as one of them is
        if self.forbidden:
            for place, step in enumerate(table.steps):
                if self._is_forbidden(step, value, live):
                    forward[place] = math.inf
        return _Arcs(table, forward, backward)

    def _is_forbidden(self, step: Step, value: Value, live: bool) -> bool:
        forward, backward = step.collectives
        return forward in self.forbidden or (live and value.requires_grad and backward in self.forbidden)


def _possible(arcs: _Arcs, copies: Sequence[int]) -> tuple[Arc, ...]:
    """The arcs of finite seconds, with the bytes of the copies that they leave behind (``Pricing.step_memory``)."""
    steps = zip(arcs.table.ends, arcs.table.steps, arcs.forward, arcs.backward, arcs.table.forward)
    return tuple(
        Arc(source, target, step, forward, backward, copies[target] if collective else 0)
        for (source, target), step, forward, backward, collective in steps
        if forward + backward < math.inf
    )


def distances(count: int, arcs: _Arcs) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of the cheapest way between each two of ``count`` placements, and the placement before its end.

    Floyd and Warshall's algorithm.
    """
    import numpy as np

    seconds = np.full((count, count), np.inf)
    before = np.tile(np.arange(count)[:, None], (1, count))
    np.fill_diagonal(seconds, 0.0)
    if arcs.table.ends:
        seconds[tuple(zip(*arcs.table.ends))] = arcs.seconds
    through, shorter = np.empty_like(seconds), np.empty(seconds.shape, dtype=bool)
    largest = seconds * (1 - CHEAPER)
    for middle in range(count):
        np.add(seconds[:, middle, None], seconds[middle], out=through)
        np.less(through, largest, out=shorter)
        rows, columns = shorter.nonzero()
        if len(rows):  # in place: no way to or from the middle gets shorter by way of it
            new = through[rows, columns]
            seconds[rows, columns] = new
            largest[rows, columns] = new * (1 - CHEAPER)
            before[rows, columns] = before[middle, columns]
    return seconds, before


def _without_detours(arcs: Sequence[Arc]) -> tuple[Arc, ...]:
    """Drop every arc that two others (still there) replace at no more cost: all distances stay the same."""
    out: dict[int, dict[int, tuple[float, float, int]]] = {}
    for source, target, _, forward, backward, memory in arcs:
        out.setdefault(source, {})[target] = forward, backward, memory
    nothing: dict[int, tuple[float, float, int]] = {}
    for source, target, _, forward, backward, memory in arcs:
        leaving = out[source]
        for middle, (first_forward, first_backward, first_memory) in leaving.items():
            if first_forward > forward or first_backward > backward:
                continue
            second = out.get(middle, nothing).get(target)
            if (
                second is not None
                and first_forward + second[0] <= forward
                and first_backward + second[1] <= backward
                and first_memory + second[2] <= memory
            ):
                del leaving[target]
                break
    return tuple(arc for arc in arcs if arc.target in out[arc.source])
