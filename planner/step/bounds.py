"""Lower bounds of a candidate before its sharding is searched, from shardings with fewer axes.

They rest on two properties of the cost models (``cost_models.efficiency``, ``cost_models.collectives``): one of n equal
parts of an operator or a message never takes less than 1/n of its time, and never holds less than 1/n of its bytes. So
an axis of n devices saves at most a factor of n; and a micro-batch of fewer samples takes at least its share of a larger
one's time.
"""

from __future__ import annotations

import math

from cost_models.memory import zero_state_bytes
from planner.step.candidates import Candidate
from planner.step.figures import UnitFigures
from planner.step.level_one import LevelOne, Sharded
from planner.step.sharding import Cut
from planner.step.training import Training


class Bounds:
    """Bounds over the candidates of one search, remembered by cut."""

    def __init__(self, level_one: LevelOne, training: Training) -> None:
        self.level_one, self.training = level_one, training
        self.known: dict[tuple[int, int], dict[int, float]] = {}

    def whole(self, cut: Cut) -> float:
        """Seconds of one micro-batch, from the whole operators; infinite if nothing divides."""
        return self._alone(Cut(cut.pieces)) / (cut.context * cut.tensor)

    def scaled(self, cut: Cut) -> float:
        """The same from cuts on the same axes into fewer pieces, as far as they are known."""
        known = self.known.get((cut.context, cut.tensor), {})
        alone = max(
            (seconds * pieces / cut.pieces for pieces, seconds in known.items() if pieces <= cut.pieces), default=0.0
        )
        for axes in ((1, cut.tensor, cut.context), (cut.context, 1, cut.tensor)):
            for pieces, seconds in self.known.get(axes[:2], {}).items():
                if pieces <= cut.pieces:
                    alone = max(alone, seconds * pieces / cut.pieces / axes[2])
        return alone

    def by_axis(self, cut: Cut) -> float:
        """The same from each axis by itself, on the best links that it could have.

        With both axes the context axis does at every operator what it does alone (``planner.step.sharding``), so its
        conversions come on top of all that the tensor axis costs, each of at least 1/n of the bytes.
        """
        least = max(self.whole(cut), self._alone(Cut(cut.pieces, 1, cut.tensor)) / cut.context)
        if cut.context == 1:
            return least
        context = self._alone(Cut(cut.pieces, cut.context, 1))
        if context == math.inf:
            return math.inf
        along = self.level_one.alone(Cut(cut.pieces, cut.context))
        assert along is not None
        return max(least + along.communication / cut.tensor, context / cut.tensor)

    def learn(self, cut: Cut, seconds: float) -> None:
        """Remember what a cut takes on the best links, for cuts into more pieces."""
        known = self.known.setdefault((cut.context, cut.tensor), {})
        known.setdefault(cut.pieces, seconds)

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
        if cut.pieces not in known:
            sharded = self.level_one.alone(cut)
            known[cut.pieces] = math.inf if sharded is None else sharded.seconds
        return known[cut.pieces]


def _least_peak(figures: UnitFigures) -> float:
    """The least that a unit holds while it runs, whatever is recomputed."""
    return min(policy.saved_bytes + policy.peak_bytes for policy in figures.policies)
