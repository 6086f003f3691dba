"""What ``planner.verify`` found."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from passes.plan import CollectivePlan, Plan
from passes.stages.build import DATA_AXES
from passes.step_plan import CHUNKED_LOSS
from passes.tables import format_table
from planner.comparison import Comparison


@dataclass(frozen=True)
class VerifyReport:
    """What ``verify`` found.

    Attributes:
        comparisons: loss, gradients and weights, each with its relative error.
        disagreement: largest difference between ranks that should hold the same.
        counted: the collectives of the first step, as issued.
        note: what was compared in another way than asked for.
    """

    model: str
    plan: Plan
    tolerance: float
    comparisons: tuple[Comparison, ...]
    disagreement: float
    counted: tuple[CollectivePlan, ...]
    source: str = field(repr=False, default="")
    note: str = ""

    @property
    def planned(self) -> tuple[CollectivePlan, ...]:
        """The collectives of a step as the plan predicts them (of a whole step: what all micro-batches send)."""
        times = self.plan.step.num_microbatches if self.plan.step is not None else 1
        return tuple(
            dataclasses.replace(entry, count=entry.count * times, num_bytes=entry.num_bytes * times)
            for entry in self.plan.collectives
            if entry.count
        )

    @property
    def largest_error(self) -> float:
        return max((comparison.error for comparison in self.comparisons), default=0.0)

    @property
    def collectives_as_planned(self) -> bool:
        """Whether what was issued is what the plan lists.

        Of a whole step, axes that units gather weights and reduce gradients on are not judged: the plan's list has
        the activations' collectives alone. More than planned may be sent backward where something is recomputed, and
        forward where several chunks compute the same for themselves (rotary tables), but nothing less.
        """
        return not self._different()

    @property
    def ok(self) -> bool:
        agrees = all(comparison.error <= max(self.tolerance, comparison.rounding) for comparison in self.comparisons)
        return agrees and self.disagreement <= self.tolerance and self.collectives_as_planned

    def table(self) -> str:
        """The worst tensor of each kind, and the verdict."""
        worst: dict[str, Comparison] = {}
        count: dict[str, int] = {}
        for comparison in self.comparisons:
            count[comparison.what] = count.get(comparison.what, 0) + 1
            if comparison.what not in worst or comparison.error > worst[comparison.what].error:
                worst[comparison.what] = comparison
        rows = [[what, str(count[what]), entry.name, f"{entry.error:.1e}"] for what, entry in worst.items()]
        title = f"{self.model} on mesh {self.plan.mesh}: every rank in one process, against one device"
        lines = [
            format_table(title, ("compared", "tensors", "worst", "relative error"), rows),
            f"largest relative error {self.largest_error:.1e} (allowed {self.tolerance:.0e}); ranks that should agree "
            f"differ by {self.disagreement:.1e}",
            *self._explained_by_rounding(),
            *([self.note] if self.note else []),
            f"collectives as planned: {'yes' if self.collectives_as_planned else self._collective_difference()}",
            "ok" if self.ok else "FAILED",
        ]
        return "\n".join(lines)

    def _explained_by_rounding(self) -> list[str]:
        explained = [one for one in self.comparisons if self.tolerance < one.error <= one.rounding]
        if not explained:
            return []
        worst = max(explained, key=lambda one: one.error)
        return [
            f"{len(explained)} differ by more, as they do on one device when last bits of weights change: "
            f"{worst.name} by {worst.error:.1e} (explained: {worst.rounding:.1e})"
        ]

    def _collective_difference(self) -> str:
        planned = set(self.planned)
        return "NO: " + "; ".join(
            f"{entry.collective} on {entry.axis} {entry.phase} ×{entry.count} {entry.num_bytes} B "
            f"{'planned' if entry in planned else 'issued'}"
            for entry in self._different()
        )

    def _different(self) -> list[CollectivePlan]:
        """What is planned and not issued, or the other way round."""
        found = sorted(set(self.planned) ^ set(self.counted), key=lambda one: (one.collective, one.axis, one.phase))
        step = self.plan.step
        if step is None:
            return found
        repeats = {"forward": len(step.chunks) > 1, "backward": not set(step.recompute) <= {"none", CHUNKED_LOSS}}
        issued = {_kind(one): one for one in self.counted}
        planned = {_kind(one): one for one in self.planned}

        def excused(one: CollectivePlan) -> bool:
            """A kind that is planned and issued, and issued more often where some are repeated."""
            ours, theirs = issued.get(_kind(one)), planned.get(_kind(one))
            if ours is None or theirs is None:
                # What is recomputed may send forward's collectives again.
                return theirs is None and repeats["backward"] and one.phase == "backward"
            return repeats[one.phase] and ours.count >= theirs.count and ours.num_bytes >= theirs.num_bytes

        judged = {name for name, size in zip(self.plan.mesh.names, self.plan.mesh.sizes) if size > 1} - set(DATA_AXES)
        return [one for one in found if one.axis in judged and not excused(one)]


def _kind(entry: CollectivePlan) -> tuple[str, str, str]:
    return entry.collective, entry.axis, entry.phase
