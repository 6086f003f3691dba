"""Whether another plan pays for the rest of the training: predicted seconds, and nothing measured."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cost_models import Cluster
from passes.plan import Plan

#: Seconds assumed for making the programs of another plan, which nothing predicts: capture, search, compilation.
REPLAN_SECONDS = 30.0


@dataclass(frozen=True)
class ReplanPrice:
    """What the rest of the training takes in one way.

    Attributes:
        what: ``"stay"``, or the axes of the plan; the target where there is none.
        step_seconds: predicted of one step.
        remaining_steps: how many there are.
        moving_seconds, replan_seconds: of the state on its way, and of making the programs.
        moved_bytes: that all ranks send.
        obstacle: why there is no such plan, else empty.
    """

    what: str
    step_seconds: float
    remaining_steps: int
    moving_seconds: float = 0.0
    replan_seconds: float = 0.0
    moved_bytes: int = 0
    obstacle: str = ""

    @staticmethod
    def impossible(what: str, remaining_steps: int, obstacle: str) -> ReplanPrice:
        return ReplanPrice(what, math.inf, remaining_steps, obstacle=obstacle)

    @property
    def seconds(self) -> float:
        """Of all that is left."""
        return self.remaining_steps * self.step_seconds + self.moving_seconds + self.replan_seconds


@dataclass(frozen=True)
class ReplanDecision:
    """All ways to go on that were priced; the first is to stay."""

    prices: tuple[ReplanPrice, ...]

    @property
    def chosen(self) -> int:
        """The place of the fastest in ``prices``: the first of equals."""
        return min(range(len(self.prices)), key=lambda place: (self.prices[place].seconds, place))

    @property
    def moved(self) -> bool:
        """Whether training goes on under another plan."""
        return self.chosen != 0

    def summary(self) -> str:
        """A line for each way, the one that was chosen marked."""
        lines = []
        for place, price in enumerate(self.prices):
            mark = "*" if place == self.chosen else " "
            if price.obstacle:
                lines.append(f"{mark} {price.what}: no plan: {price.obstacle}")
                continue
            lines.append(
                f"{mark} {price.what}: {price.seconds:.4g} s = {price.remaining_steps} steps of "
                f"{price.step_seconds:.4g} s + {price.moving_seconds:.4g} s for {price.moved_bytes:,} bytes + "
                f"{price.replan_seconds:.4g} s for programs"
            )
        return "\n".join(lines) + "\n"


def check_question(targets: Sequence[Any], remaining_steps: int, replan_seconds: float) -> None:
    """Raise ValueError for what cannot be priced."""
    if isinstance(targets, str) or not targets:
        raise ValueError(
            f"targets={targets!r}: give a list of meshes, clusters or plans, such as ['pp=2,dp=2', 'dp=4']"
        )
    if isinstance(remaining_steps, bool) or not isinstance(remaining_steps, int) or remaining_steps < 1:
        raise ValueError(f"remaining_steps={remaining_steps!r}: give the number of steps that are left, 1 or more")
    if not 0 <= replan_seconds < math.inf:
        raise ValueError(f"replan_seconds={replan_seconds!r}: seconds of at least 0")


def step_seconds(plan: Plan) -> float:
    """Seconds of a step, as the simulator says.

    Raises:
        ValueError: for a plan without a predicted step.
    """
    if not plan.step.costs.simulated > 0:
        raise ValueError("the plan predicts no seconds of a step, so nothing says whether another pays: use replan")
    return plan.step.costs.simulated


def axes_of(plan: Plan) -> str:
    """The mesh of a plan in short: ``"pp=2,dp=2"``."""
    return ",".join(f"{axis}={size}" for axis, size in plan.step.axes.items() if size > 1) or "one device"


def seconds_of_moving(bytes_by_pair: Mapping[tuple[int, int], int], cluster: Cluster) -> float:
    """Seconds of a plan of transfers: those of the rank that sends or receives longest, one message after the other.

    A message goes over the innermost level that joins its two ranks, at the bandwidth of that level's slowest link.
    Sends and receives of a rank are at the same time; that others share a link with it is not counted.
    """
    busy: defaultdict[tuple[str, int], float] = defaultdict(float)
    for (source, destination), num_bytes in bytes_by_pair.items():
        level = next(each for each in cluster.levels if source // each.group_size == destination // each.group_size)
        _, bandwidth = level.slowest_link(cluster.num_devices)
        busy["sends", source] += num_bytes / bandwidth
        busy["receives", destination] += num_bytes / bandwidth
    return max(busy.values(), default=0.0)
