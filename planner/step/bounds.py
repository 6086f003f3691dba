"""Lower bounds of a candidate before its sharding is searched, from shardings with fewer axes.

They rest on two properties of the cost models (``cost_models.efficiency``, ``cost_models.collectives``): one of n
equal parts of an operator or a message never takes less than 1/n of its time, and never holds less than 1/n of its
bytes. So an axis of n devices saves at most a factor of n, and a micro-batch of fewer samples takes at least its share
of a larger one's time.
"""

from __future__ import annotations

import math
from itertools import pairwise

from cost_models.memory import zero_state_bytes
from cost_models.schedules import in_flight
from planner.step.candidates import Candidate
from planner.step.figures import UnitFigures
from planner.step.layout import divisors
from planner.step.level_one import LevelOne, Sharded
from planner.step.pricing import CONTEXT, TENSOR
from planner.step.sharding import Cut
from planner.step.training import Training

#: Relative slack for sums of bytes.
ROUNDING = 1e-9


class Bounds:
    """Bounds over the candidates of one search, remembered by cut."""

    def __init__(self, level_one: LevelOne, training: Training) -> None:
        self.level_one, self.training = level_one, training
        self.known: dict[tuple[int, int], dict[int, float]] = {}
        self.impossible: set[Cut] = set()
        self._fitting: dict[tuple[object, ...], float] = {}

    def whole(self, cut: Cut) -> float:
        """Seconds of one micro-batch, from the whole operators; infinite if nothing divides."""
        return self._alone(Cut(cut.pieces)) / (cut.context * cut.tensor)

    def fitting(self, candidate: Candidate, memory: float) -> float:
        """Seconds of one micro-batch with as much recomputed as ``memory`` bytes on each device make necessary.

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
        if key not in self._fitting:
            self._fitting[key] = self._knapsack(candidate, min(held), memory)
        return self._fitting[key]

    def _knapsack(self, candidate: Candidate, held: float, memory: float) -> float:
        layout, sharded = candidate.layout, self.level_one.alone(Cut(candidate.cut.pieces))
        if sharded is None:
            return math.inf
        ways = layout.context * layout.tensor
        room = memory * layout.pipeline - self._state(sharded) * layout.pipeline / layout.num_devices
        room -= max(min(policy.peak_bytes for policy in each.policies) for each in sharded.figures) / ways
        seconds, steps = 0.0, []
        for each in sharded.figures:
            hull = _hull([(policy.saved_bytes, policy.compute + policy.communication) for policy in each.policies])
            seconds += each.unit.count * (sum(each.compute) + sum(each.communication))
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
        return math.inf if room < -ROUNDING * memory else seconds / ways

    def scaled(self, cut: Cut) -> float:
        """The same from cuts into fewer parts on the same axes, as far as they are known.

        n ways are n/d ways of d: an axis of d devices does the work of one of n in n/d times its time at most.
        """
        least = 0.0
        for (context, tensor), known in self.known.items():
            if cut.context % context or cut.tensor % tensor:
                continue
            share = context * tensor / (cut.context * cut.tensor)
            for pieces, seconds in known.items():
                if cut.pieces % pieces == 0:
                    least = max(least, seconds * share * pieces / cut.pieces)
        return least

    def by_axis(self, cut: Cut, enough: float) -> float:
        """The same from each axis by itself, on the best links that it could have; ``enough`` is as good as infinite.

        With both axes the context axis does at every operator what it does alone (``planner.step.sharding``), so its
        conversions come on top of all that the tensor axis costs, each of at least 1/n of the bytes.
        """
        least = self.scaled(cut)
        for axis, size in ((TENSOR, cut.tensor), (CONTEXT, cut.context)):
            for part in divisors(size)[1:]:
                if least >= enough:
                    return least
                along = Cut(cut.pieces, 1, part) if axis == TENSOR else Cut(cut.pieces, part)
                if self._alone(along) == math.inf and part == size:
                    return math.inf
                least = max(least, self.scaled(cut))
        if cut.context == 1 or cut.tensor == 1:
            return least
        context = self.level_one.alone(Cut(cut.pieces, cut.context))
        assert context is not None  # else its bound is infinite
        tensor = self._alone(Cut(cut.pieces, 1, cut.tensor)) / cut.context
        along_context = context.communication - (context.seconds - context.without_samples)
        return max(least, tensor + along_context / cut.tensor)

    def learn(self, cut: Cut, seconds: float) -> None:
        """Remember what a cut takes on the best links, for cuts into more parts."""
        self.known.setdefault((cut.context, cut.tensor), {}).setdefault(cut.pieces, seconds)

    def memory(self, candidate: Candidate) -> float:
        """Bytes that the fullest device holds at least: state divided over all devices, one micro-batch in flight."""
        sharded = self.level_one.alone(Cut(candidate.cut.pieces))
        if sharded is None:
            return math.inf
        layout = candidate.layout
        ways = layout.context * layout.tensor
        state = self._state(sharded) / layout.num_devices
        kept = sum(each.unit.count * min(p.saved_bytes for p in each.policies) for each in sharded.figures)
        peak = max(_least_peak(each) for each in sharded.figures)
        return state + max(kept / layout.pipeline, peak) / ways

    def _state(self, sharded: Sharded) -> float:
        total = 0.0
        for each in sharded.figures:
            for weight in each.weights:
                if weight.trainable:
                    dtype = self.training.gradients(weight.dtype)
                    parts = zero_state_bytes(
                        weight.elements, weight.dtype, stage=3, group_size=1, gradient_dtype=dtype,
                        optimizer=self.training.optimizer,
                    )  # fmt: skip
                    shared = 1 if weight.shared else each.unit.count
                    total += shared * parts.total
        return total

    def _alone(self, cut: Cut) -> float:
        known = self.known.setdefault((cut.context, cut.tensor), {})
        if cut in self.impossible:
            return math.inf
        if cut.pieces not in known:
            sharded = self.level_one.alone(cut)
            if sharded is None:
                self.impossible.add(cut)
                return math.inf
            known[cut.pieces] = sharded.without_samples
        return known[cut.pieces]


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


def _least_peak(figures: UnitFigures) -> float:
    """The least that a unit holds while it runs, whatever is recomputed."""
    return min(policy.saved_bytes + policy.peak_bytes for policy in figures.policies)
