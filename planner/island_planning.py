"""Synchronous training over slow links, or islands that meet every H steps (DiLoCo): which takes less time a token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cost_models import Cluster
from cost_models.island_cluster import IslandCluster
from passes.plan import Plan

#: What a larger H costs: from H = 50 to H = 1000 perplexity rises by 2.9% (Douillard et al. 2023, arXiv 2311.08105,
#: ablation of the communication frequency: 150 million parameters on C4, 8 islands). Assumed here: up to H = 50 nothing
#: to speak of, and between the two in proportion to the logarithm of H; beyond 1000 nothing is assumed.
FREQUENT, RARE, RISE = 50, 1000, 0.029
#: Relative rise of perplexity that is accepted unless said.
LOSS_BUDGET = 0.02
#: Bytes of an element by what differences are sent as, see ``runtime.islands.wire_formats``.
WIRE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0 + 4.0 / 256}


def largest_inner_steps(loss_budget: float) -> int:
    """The largest H whose rise of perplexity is within ``loss_budget`` (0.02: 2%); 1 for none at all.

    Raises:
        ValueError: for a budget below zero, or not a number.
    """
    if not 0 <= loss_budget < math.inf:
        raise ValueError(f"loss_budget={loss_budget}: it is a share of the perplexity, of at least 0 (0.02: 2% more)")
    if loss_budget == 0:
        return 1
    return math.floor(FREQUENT * (RARE / FREQUENT) ** min(1.0, loss_budget / RISE) + 1e-9)


@dataclass(frozen=True)
class IslandPlans:
    """Both ways to train, priced.

    Attributes:
        synchronous: the plan of all islands as one cluster, None if there is none: ``obstacle`` says why.
        islands: the plan of each island alone, for its share of the batch.
        batches: samples a step of each island.
        inner_steps: H.
        exchange_seconds: of one exchange of all parameters.
        wire_format: what it sends.
        loss_budget: that says H; None where H was given.
        synchronous_share: of all steps, the first, in which islands exchange gradients.
        gradient_seconds: of one exchange of all gradients, in float32.
    """

    cluster: IslandCluster
    synchronous: Plan | None
    obstacle: str
    islands: tuple[Plan, ...]
    batches: tuple[int, ...]
    inner_steps: int
    exchange_seconds: float
    wire_format: str
    loss_budget: float | None = None
    synchronous_share: float = 0.0
    gradient_seconds: float = 0.0

    @property
    def inner_seconds(self) -> float:
        """Seconds of an inner step of the slowest island, for which the others wait when they meet."""
        return max(map(step_seconds, self.islands))

    @property
    def seconds(self) -> float:
        """Seconds of a step of DiLoCo with its share of exchanges, the mean over the training; nothing hides them."""
        share = self.synchronous_share
        exchanges = share * self.gradient_seconds + (1 - share) * self.exchange_seconds / self.inner_steps
        return self.inner_seconds + exchanges

    @property
    def synchronous_seconds(self) -> float:
        """Seconds of a synchronous step; infinite if there is no plan."""
        return math.inf if self.synchronous is None else step_seconds(self.synchronous)

    @property
    def meets_rarely(self) -> bool:
        """Whether DiLoCo takes less time for as many samples."""
        return self.inner_steps > 1 and self.seconds < self.synchronous_seconds

    @property
    def chooses_none(self) -> bool:
        """Whether neither is possible: no synchronous plan, and no H above 1."""
        return not self.meets_rarely and self.synchronous is None

    def save(self, path: str | Path) -> list[Path]:
        """Save the plan to run, or one for each island (``plan.island0.json``, …); where they are.

        Raises:
            ValueError: if none of both ways is chosen, or as ``Plan.save``.
        """
        target = Path(path)
        if self.chooses_none:
            raise ValueError(
                f"no plan is saved: H = {self.inner_steps} is a synchronous step, of which there is no plan "
                f"({self.obstacle}); allow a larger loss budget or H"
            )
        if not self.meets_rarely and self.synchronous is not None:
            self.synchronous.save(target)
            return [target]
        paths = [target.with_suffix(f".island{index}{target.suffix}") for index in range(len(self.islands))]
        for each, plan in zip(paths, self.islands):
            plan.save(each)
        return paths

    def summary(self) -> str:
        """A few lines: both ways, and the choice."""
        samples = sum(self.batches)
        lines = [f"{self.cluster.name}: {len(self.islands)} islands, {samples} samples a step"]
        if self.synchronous is None:
            lines.append(f"synchronous: none: {self.obstacle}")
        else:
            lines.append(f"synchronous: {self.synchronous_seconds:.4g} s a step, {_axes(self.synchronous)}")
        lines.append(
            f"DiLoCo, H = {self.inner_steps}: {self.seconds:.4g} s a step, of which {self.exchange_seconds:.4g} s / "
            f"{self.inner_steps} for {self.wire_format} differences of all parameters"
        )
        first = f", the first {self.synchronous_share:.0%} of the steps synchronous" if self.synchronous_share else ""
        if first:
            lines.append(f"  {first[2:]}: in each of these {self.gradient_seconds:.4g} s for float32 gradients instead")
        if self.loss_budget is not None:
            lines.append(
                f"  H by a loss budget of {self.loss_budget:.2%}, as the DiLoCo paper has it of 150 million parameters "
                "on 8 islands: a small model from scratch loses more (docs/slow_links.md), so try yours"
            )
        for index, (plan, batch) in enumerate(zip(self.islands, self.batches)):
            lines.append(f"  island {index}: {batch} samples in {step_seconds(plan):.4g} s, {_axes(plan)}")
        chosen = f"DiLoCo with H = {self.inner_steps}{first}" if self.meets_rarely else "synchronous"
        if self.chooses_none:
            chosen = "none within the loss budget"
        return "\n".join([*lines, f"chosen: {chosen}"]) + "\n"


def plan_islands(
    model: Any,
    cluster: IslandCluster,
    *,
    global_batch: int,
    loss_budget: float = LOSS_BUDGET,
    inner_steps: int | None = None,
    wire_format: str = "float32",
    synchronous_share: float = 0.0,
    **options: Any,
) -> IslandPlans:
    """Plan all islands as one cluster, and each alone, and price both.

    Args:
        global_batch: samples a step over all islands; unlike islands get shares by their arithmetic in bfloat16.
        loss_budget: how much more perplexity than a synchronous run's is accepted, see ``largest_inner_steps``.
        inner_steps: H; None: the largest within the budget.
        wire_format: what DiLoCo sends.
        synchronous_share: of all steps, the first, that DiLoCo takes synchronously (its ``synchronous_steps``).
        options: of ``planner.plan``, for each of the plans.

    Raises:
        ValueError: as ``planner.plan`` for an island; for a global batch with less than a sample for each; for
            ``inner_steps`` below 1, a share that is none, and a format that there is not.
    """
    from planner.planning import plan
    from planner.whole_step.candidates.demands import check_count

    if wire_format not in WIRE_BYTES:
        raise ValueError(f"wire_format={wire_format!r}: it must be one of {', '.join(WIRE_BYTES)}")
    check_count("global_batch", global_batch)
    if inner_steps is not None and inner_steps < 1:
        raise ValueError(f"inner_steps={inner_steps}: it must be at least 1")
    if not 0 <= synchronous_share < 1:
        raise ValueError(
            f"synchronous_share={synchronous_share}: the share of all steps in which islands exchange gradients, of at "
            "least 0 and below 1 (0.25: the first quarter)"
        )
    allowed = largest_inner_steps(loss_budget) if inner_steps is None else inner_steps
    batches = shares_of(global_batch, [_arithmetic(island) for island in cluster.islands])
    alone: list[Plan] = []
    for index, (island, batch) in enumerate(zip(cluster.islands, batches)):
        before = [place for place in range(index) if (cluster.islands[place], batches[place]) == (island, batch)]
        alone.append(alone[before[0]] if before else plan(model, island, global_batch=batch, **options))
    synchronous, obstacle = None, ""
    try:
        synchronous = plan(model, cluster.joined(), global_batch=global_batch, **options)
    except ValueError as error:
        obstacle = str(error)
    elements = sum(math.prod(state.shape) for state in alone[0].states.values() if state.trainable)
    exchange = cluster.exchange_seconds if wire_format == "float32" else cluster.gather_seconds
    seconds = exchange(WIRE_BYTES[wire_format] * elements)
    budget = loss_budget if inner_steps is None else None
    plans = tuple(alone), tuple(batches)
    gradients = cluster.exchange_seconds(WIRE_BYTES["float32"] * elements)
    return IslandPlans(
        cluster, synchronous, obstacle, *plans, allowed, seconds, wire_format, budget, synchronous_share, gradients
    )


def step_seconds(plan: Plan) -> float:
    """Seconds of a step, as the simulator says."""
    return plan.step.costs.simulated


def shares_of(total: int, weights: Sequence[float]) -> list[int]:
    """``total`` samples in shares near ``weights``, in multiples of a power of two that leaves a choice of shares.

    Raises:
        ValueError: if there are fewer samples than shares.
    """
    count = len(weights)
    if total < count:
        raise ValueError(f"a global batch of {total} samples is less than one for each of {count} islands")
    unit = 1
    while total % (2 * unit) == 0 and total // (2 * unit) >= (count if len(set(weights)) == 1 else 8 * count):
        unit *= 2
    exact = [total // unit * weight / sum(weights) for weight in weights]
    units = [max(1, math.floor(share + 1e-9)) for share in exact]
    while sum(units) < total // unit:
        units[max(range(count), key=lambda index: exact[index] - units[index])] += 1
    while sum(units) > total // unit:
        units[units.index(max(units))] -= 1
    return [unit * share for share in units]


def _arithmetic(cluster: Cluster) -> float:
    return sum(group.count * group.device.peak_flops("bfloat16") for group in cluster.groups)


def _axes(plan: Plan) -> str:
    return " ".join(f"{axis}={size}" for axis, size in plan.step.axes.items() if size > 1) or "one device"
