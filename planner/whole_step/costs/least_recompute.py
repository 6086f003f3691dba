r"""The least seconds that one micro-batch recomputes for its saved activations to fit in memory, under any sharding.

Rank r of M bytes holds σ(r) of state and peaks, and of each of its units' saved bytes at least h(r) micro-batches: the
fewest that any of its chunks has in flight when it holds most. So its units save at most (M - σ(r))/h(r), and all

    Σ_u saved(u) ≤ max Σ_r (M - σ(r))/h(r)     over  Σ_r σ(r) ≥ S,  0 ≤ σ(r) ≤ M                           (room)

where S is the least state of one pipeline and the largest of the units' least peaks: greatest where the ranks with most
micro-batches in flight hold S. For any λ ≥ 0 it is at most M·Σ_r max(1/h(r), λ) - λ·S, so that memory of one byte more
on each rank gives at most Σ_r max(1/h(r), λ) more, with λ = 1/h of the last rank that holds some of S.

Fractions of layers take each policy, those first that save most bytes a second. Operators and bytes are those of the
undivided model over the number of parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from planner.whole_step.costs.hulls import hull
from planner.whole_step.costs.unit_figures import UnitFigures

#: Relative slack for sums of bytes.
ROUNDING = 1e-9


class Room(NamedTuple):
    """Bytes that all units together may save of one micro-batch, and by how many they grow at most for each byte of
    memory more on every rank."""

    num_bytes: float
    growth: float


def room_to_save(held: Sequence[float], memory: float, occupied: float) -> Room:
    """(room): ``held`` are the micro-batches in flight on each rank, ``occupied``: bytes of state and peaks in all."""
    room, rest, least = 0.0, occupied, 0.0
    for in_flight in sorted(held, reverse=True):
        here = min(rest, memory)
        rest -= here
        least = 1.0 / in_flight if here else least
        room += (memory - here) / in_flight
    return Room(room - rest * least, sum(max(1.0 / in_flight, least) for in_flight in held))


@dataclass(frozen=True)
class Savings:
    """Of the undivided model: the largest of the units' least peaks; bytes that all units save at most; and (seconds a
    byte, bytes, seconds) of all steps from there to their leanest policies, least a byte first."""

    peak: float
    most: float
    steps: tuple[tuple[float, float, float], ...]

    @staticmethod
    def of(undivided: Sequence[UnitFigures]) -> Savings:
        most, steps = 0.0, []
        for figures in undivided:
            edge = hull([(policy.saved_bytes, policy.compute + policy.communication) for policy in figures.policies])
            count = figures.unit.count
            most += count * edge[0][0]
            steps += [
                ((cost - less) / max(1.0, saved_bytes - fewer), count * (saved_bytes - fewer), count * (cost - less))
                for (saved_bytes, less), (fewer, cost) in pairwise(edge)
            ]
        peak = max(min(policy.peak_bytes for policy in figures.policies) for figures in undivided)
        return Savings(peak, most, tuple(sorted(steps)))

    def least_recomputed(
        self, held: Sequence[float], memory: float, *, state: float, parts: int
    ) -> tuple[float, float]:
        """The least seconds, and 0; or infinite, and at least the bytes that each device lacks.

        Args:
            held: the fewest micro-batches in flight in any chunk of each rank.
            memory: bytes on each device.
            state: least bytes of one pipeline's state.
            parts: into how many parts the operators of a rank are divided.
        """
        room, growth = room_to_save(held, memory, state + self.peak / parts)
        room -= self.most / parts
        seconds = 0.0
        for _, freed, cost in self.steps:
            if room >= 0:
                break
            share = min(1.0, -room * parts / freed) if freed else 0.0
            room += share * freed / parts
            seconds += share * cost
        if room < -ROUNDING * memory * growth:
            return math.inf, -room / growth
        return seconds / parts, 0.0
