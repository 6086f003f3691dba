"""Lower bounds of a candidate before its sharding is searched, from shardings with fewer axes.

They rest on two properties of the cost models (``cost_models.efficiency``, ``cost_models.collectives``): one of n
equal parts of an operator or a message never takes less than 1/n of its time, and never holds less than 1/n of its
bytes. So an axis of n devices saves at most a factor of n, and a micro-batch of fewer samples takes at least its share
of a larger one's time.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise

from cost_models.dtypes import item_size
from cost_models.memory import zero_state_bytes
from cost_models.schedules import in_flight
from planner.step.candidates import Candidate
from planner.step.layout import Layout, Links, divisors
from planner.step.level_one import LevelOne, Sharded
from planner.step.pricing import CONTEXT, DATA, TENSOR
from planner.step.sharding import Cut
from planner.step.training import Training

#: Relative slack for sums of bytes.
ROUNDING = 1e-9


#: Devices from which on so many tensor sizes stand beside a context axis that its conversions are worth pricing apart.
SHARED_FROM = 256


class Known:
    """Seconds of one micro-batch by cut, as far as they are known, and the largest share of them for any other cut."""

    def __init__(self) -> None:
        self.seconds: dict[Cut, float] = {}
        self._totals: list[tuple[Cut, float]] = []
        self._most: dict[Cut, tuple[int, float]] = {}

    def add(self, cut: Cut, seconds: float) -> None:
        """Take over what ``cut`` takes, if that is not known."""
        if cut not in self.seconds:
            self.seconds[cut] = seconds
            self._totals.append((cut, seconds * cut.parts))

    def most(self, cut: Cut) -> float:
        """The largest share of ``cut`` in what is known of cuts into no more parts; looks at what is new only."""
        looked_at, most = self._most.get(cut, (0, 0.0))
        if looked_at < len(self._totals):
            for known, total in itertools.islice(self._totals, looked_at, None):
                if not (cut.context % known.context or cut.tensor % known.tensor or cut.pieces % known.pieces):
                    most = max(most, total)
            self._most[cut] = (len(self._totals), most)
        return most / cut.parts


@dataclass(frozen=True)
class _Least:
    """Of the undivided model and one micro-batch: bytes of state; kept if all is recomputed; of the largest peak."""

    state: float
    kept: float
    peak: float


class Bounds:
    """Bounds over the candidates of one search, remembered by cut."""

    def __init__(self, level_one: LevelOne, training: Training) -> None:
        self.level_one, self.training = level_one, training
        self.known = Known()
        #: By the devices of the tensor axis beside it: what the context axis converts.
        self.conversions: defaultdict[int, Known] = defaultdict(Known)
        self.impossible: set[Cut] = set()
        self._zero: dict[Layout, tuple[tuple[float, float], ...]] = {}
        self._leasts: dict[int, _Least | None] = {}
        #: Bytes that lack on each device at least, after ``recompute`` or ``zero`` said that nothing fits.
        self.missing = 0.0
        self._missing: dict[tuple[object, ...], float] = {}
        self._recompute: dict[tuple[object, ...], float] = {}

    def whole(self, cut: Cut) -> float:
        """Seconds of one micro-batch, from the whole operators; infinite if nothing divides."""
        return self._alone(Cut(cut.pieces)) / (cut.context * cut.tensor)

    def zero(self, candidate: Candidate, links: Links, memory: float, stages: Collection[int]) -> float:
        """Seconds on the communication streams of all ranks together, for one micro-batch, that ZeRO takes at least.

        State must fit beside the least of activations; each layer takes the stage that frees most bytes a second, in
        fractions (as in ``recompute``). Infinite if it does not fit under any.
        """
        least = self._least(candidate.cut.pieces)
        assert least is not None  # the candidate has been bounded by it
        layout = candidate.layout
        ways = layout.context * layout.tensor
        activations = max(least.kept, least.peak) / ways
        if layout not in self._zero:
            self._zero[layout] = tuple(self._zero_costs(candidate, links, stages))
        hull = _hull([(held, seconds) for held, seconds in self._zero[layout]])
        room = memory * layout.pipeline - activations
        if room >= hull[0][0]:
            return hull[0][1]
        for (most, less), (fewer, more) in pairwise(hull):
            if room >= fewer:
                return less + (more - less) * (most - room) / (most - fewer)
        if room < hull[-1][0] * (1 - ROUNDING):
            self.missing = (hull[-1][0] - room) / layout.pipeline
            return math.inf
        return hull[-1][1]

    def _zero_costs(self, candidate: Candidate, links: Links, stages: Collection[int]) -> Iterator[tuple[float, float]]:
        """(bytes over one pipeline, seconds a micro-batch) of the whole model at every ZeRO stage."""
        layout, sharded = candidate.layout, self.level_one.alone(Cut(candidate.cut.pieces))
        assert sharded is not None  # the candidate has been bounded by it
        for stage in stages if layout.group > 1 else (0,):
            held = seconds = 0.0
            for each in sharded.figures:
                gathered = reduced = 0.0
                for weight in each.weights:
                    if not weight.trainable:
                        continue
                    elements = weight.elements // layout.tensor
                    dtype = self.training.gradients(weight.dtype)
                    parts = zero_state_bytes(
                        elements, weight.dtype, stage=stage, group_size=layout.group, gradient_dtype=dtype,
                        optimizer=self.training.optimizer,
                    )  # fmt: skip
                    held += (1 if weight.shared else each.unit.count) * parts.total
                    gathered += 0.0 if weight.shared else elements * item_size(weight.dtype)
                    reduced += 0.0 if weight.shared else elements * item_size(dtype)
                price = links.group.collective_seconds
                if stage == 3:
                    seconds += each.unit.count * 2 * price("all_gather", num_bytes=gathered, axis=DATA)
                if stage >= 2:
                    seconds += each.unit.count * price("reduce_scatter", num_bytes=reduced, axis=DATA)
            yield held, seconds

    def recompute(self, candidate: Candidate, memory: float) -> float:
        """Seconds that one micro-batch recomputes at least to fit in ``memory`` bytes on each device.

        They come on top of every bound of the rest: what is recomputed is run again, divided over no more devices.

        A relaxation: whole operators divided by all ways, the least state, the fewest micro-batches in flight anywhere,
        the memory of all ranks in one, and fractions of layers under each policy (the linear knapsack, solved by taking
        what saves most bytes a second first). Infinite if even the least does not fit.
        """
        layout = candidate.layout
        held = in_flight(
            candidate.schedule,
            num_ranks=layout.pipeline,
            num_microbatches=candidate.num_microbatches,
            num_chunks=candidate.num_chunks,
        )
        key = (candidate.cut, layout.pipeline, layout.num_devices, min(held))
        if key not in self._recompute:
            self._recompute[key] = self._knapsack(candidate, min(held), memory)
            self._missing[key] = self.missing
        self.missing = self._missing[key]
        return self._recompute[key]

    def _knapsack(self, candidate: Candidate, held: float, memory: float) -> float:
        layout, sharded = candidate.layout, self.level_one.alone(Cut(candidate.cut.pieces))
        if sharded is None:
            return math.inf
        ways = layout.context * layout.tensor
        least = self._least(candidate.cut.pieces)
        assert least is not None  # there is a sharding
        room = memory * layout.pipeline - least.state * layout.pipeline / layout.num_devices
        room -= max(min(policy.peak_bytes for policy in each.policies) for each in sharded.figures) / ways
        seconds, steps = 0.0, []
        for each in sharded.figures:
            hull = _hull([(policy.saved_bytes, policy.compute + policy.communication) for policy in each.policies])
            room -= each.unit.count * held * hull[0][0] / ways
            steps += [
                (
                    (cost - less) / max(1.0, kept - fewer),
                    each.unit.count * (kept - fewer),
                    each.unit.count * (cost - less),
                )
                for (kept, less), (fewer, cost) in pairwise(hull)
            ]
        for _, freed, cost in sorted(steps):
            if room >= 0:
                break
            share = min(1.0, -room * ways / (held * freed)) if freed else 0.0
            room += share * held * freed / ways
            seconds += share * cost
        if room < -ROUNDING * memory:
            self.missing = -room / layout.pipeline
            return math.inf
        return seconds / ways

    def scaled(self, cut: Cut) -> float:
        """The same from cuts into fewer parts on the same axes, as far as they are known.

        n ways are n/d ways of d: an axis of d devices does the work of one of n in n/d times its time at most. With
        both axes the context axis does at every operator what it does alone (``planner.step.sharding``), so its
        conversions come on top of all that the tensor axis costs, each of at least 1/n of the bytes.
        """
        least = self.known.most(cut)
        if cut.context == 1 or cut.tensor == 1:
            return least
        tensor = self.known.most(Cut(cut.pieces, 1, cut.tensor)) / cut.context
        along = Cut(cut.pieces, cut.context)
        between = max(self.conversions[beside].most(along) for beside in (1, cut.tensor))
        return max(least, tensor + between / cut.tensor)

    def by_axis(self, cut: Cut, enough: float) -> float:
        """The same from each axis by itself, on its best links; ``enough`` is as good as infinite."""
        least = self.scaled(cut)
        for axis, size in ((TENSOR, cut.tensor), (CONTEXT, cut.context)):
            for part in divisors(size)[1:]:
                if least >= enough:
                    return least
                along = Cut(cut.pieces, 1, part) if axis == TENSOR else Cut(cut.pieces, part)
                if self._alone(along) == math.inf and part == size:
                    return math.inf
                least = max(least, self.scaled(cut))
        if cut.context == 1 or cut.tensor == 1 or least >= enough or self.level_one.cluster.num_devices < SHARED_FROM:
            return least
        along = Cut(cut.pieces, cut.context)
        self.conversions[cut.tensor].add(along, self.level_one.beside(along, cut.tensor))
        return max(least, self.scaled(cut))

    def learn(self, cut: Cut, seconds: float) -> None:
        """Remember what a cut takes on the best links, for cuts into more parts."""
        self.known.add(cut, seconds)

    def memory(self, candidate: Candidate) -> float:
        """Bytes that the fullest device holds at least: state divided over all devices, one micro-batch in flight."""
        least = self._least(candidate.cut.pieces)
        if least is None:
            return math.inf
        layout = candidate.layout
        activations = max(least.kept / layout.pipeline, least.peak) / (layout.context * layout.tensor)
        return least.state / layout.num_devices + activations

    def _least(self, pieces: int) -> _Least | None:
        if pieces not in self._leasts:
            sharded = self.level_one.alone(Cut(pieces))
            self._leasts[pieces] = None if sharded is None else self._least_of(sharded)
        return self._leasts[pieces]

    def _least_of(self, sharded: Sharded) -> _Least:
        figures = sharded.figures
        return _Least(
            state=self._state(sharded),
            kept=sum(each.unit.count * min(policy.saved_bytes for policy in each.policies) for each in figures),
            peak=max(min(policy.saved_bytes + policy.peak_bytes for policy in each.policies) for each in figures),
        )

    def _state(self, sharded: Sharded) -> float:
        """Bytes of all parameters, gradients and optimizer state of the model."""
        total = 0.0
        for each in sharded.figures:
            for weight in each.weights:
                if weight.trainable:
                    dtype = self.training.gradients(weight.dtype)
                    parts = zero_state_bytes(
                        weight.elements, weight.dtype, stage=3, group_size=1, gradient_dtype=dtype,
                        optimizer=self.training.optimizer,
                    )  # fmt: skip
                    total += (1 if weight.shared else each.unit.count) * parts.total
        return total

    def _alone(self, cut: Cut) -> float:
        if cut in self.impossible:
            return math.inf
        if cut not in self.known.seconds:
            sharded = self.level_one.alone(cut)
            if sharded is None:
                self.impossible.add(cut)
                return math.inf
            self.known.add(cut, sharded.without_samples)
            if cut.context > 1:
                self.conversions[1].add(cut, sharded.between)
        return self.known.seconds[cut]


def _hull(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """(bytes, seconds) from most bytes to fewest, only those below every line between two others."""
    best: dict[float, float] = {}
    for kept, cost in points:
        best[kept] = min(cost, best.get(kept, math.inf))
    hull: list[tuple[float, float]] = []
    for kept, cost in sorted(best.items(), reverse=True):
        if hull and cost <= hull[-1][1]:
            hull.pop()
        while len(hull) > 1 and _steeper(hull[-2], hull[-1], (kept, cost)):
            hull.pop()
        hull.append((kept, cost))
    return hull


def _steeper(first: tuple[float, float], middle: tuple[float, float], last: tuple[float, float]) -> bool:
    """Whether ``middle`` is no better than a mixture of its neighbours."""
    freed, cost = first[0] - last[0], last[1] - first[1]
    return (middle[1] - first[1]) * freed >= cost * (first[0] - middle[0])
