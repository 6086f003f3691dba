"""The report of ``planner.verify``."""

from __future__ import annotations

from dataclasses import dataclass, field

from cost_models.short_text import ShortRepr
from passes.ir.conversions import ALL_TO_ALL
from passes.pipeline_cut import DATA_AXES
from passes.plan import CollectivePlan, Plan
from passes.plan.plan_data import OVER_PIECES, OVER_REPLICAS
from passes.plan.text_tables import format_table, table_in_width
from passes.rules.expert_rules import EXPERTS
from planner.verification.comparison import Comparison
from planner.whole_step.result.unit_collectives import AFTER

#: Of the operator ``experts``: each rank has some of them; it has some of the tokens, which travel.
_CUT_EXPERTS, _CUT_TOKENS = "cut e", "cut p"


@dataclass(frozen=True, repr=False)
class VerifyReport(ShortRepr):
    """The result of a verification.

    Attributes:
        comparisons: loss, gradients and weights, each with its relative error.
        disagreement: largest difference between ranks that should hold equal values.
        counted: the collectives issued in the first step.
        note: deviations from the requested comparison.
        drops_tokens: whether experts dropped tokens beyond their capacity, which do not travel to them.
    """

    model: str
    plan: Plan
    tolerance: float
    comparisons: tuple[Comparison, ...]
    disagreement: float
    counted: tuple[CollectivePlan, ...]
    source: str = field(repr=False, default="")
    note: str = ""
    drops_tokens: bool = False

    @property
    def planned(self) -> tuple[CollectivePlan, ...]:
        """The collectives of a step as the plan predicts them, without those that one process with all ranks does not
        issue: sends between stages, and the loss at the end of the step."""
        return tuple(entry for entry in self.plan.collectives if entry.count and entry.axis != "pp")

    @property
    def largest_error(self) -> float:
        return max((comparison.error for comparison in self.comparisons), default=0.0)

    @property
    def collectives_as_planned(self) -> bool:
        """Whether the issued collectives are those of the plan.

        With a pipeline the axes on which units gather weights and reduce gradients are not compared: all stages run in
        one process, where they share tied weights. Blocks compiled by ``torch.compile`` choose themselves which
        collectives they repeat. Where experts drop tokens, their exchanges may carry less than planned.
        """
        return not self._different()

    @property
    def ok(self) -> bool:
        agrees = all(comparison.error <= max(self.tolerance, comparison.rounding) for comparison in self.comparisons)
        return agrees and self.disagreement <= self.tolerance and self.collectives_as_planned

    def __str__(self) -> str:
        return table_in_width(self.table)

    def table(self) -> str:
        """The worst tensor of each kind, and the verdict."""
        worst: dict[str, Comparison] = {}
        count: dict[str, int] = {}
        for comparison in self.comparisons:
            count[comparison.what] = count.get(comparison.what, 0) + 1
            if comparison.what not in worst or comparison.error > worst[comparison.what].error:
                worst[comparison.what] = comparison
        rows = [[what, str(count[what]), entry.name, f"{entry.error:.1e}"] for what, entry in worst.items()]
        stages = self.plan.step.axes.get("pp", 1)
        mesh = f"{f'pp={stages},' if stages > 1 else ''}{self.plan.mesh}"
        title = f"{self.model} on mesh {mesh}: every rank in one process, against one device"
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
        """Collectives that are planned but not issued, or issued but not planned."""
        planned, counted = set(self.planned), set(self.counted)
        routed = self._axes_of_uneven_exchanges()
        if self.drops_tokens or routed:
            bounds = {_exchange(entry): entry for entry in planned if entry.collective == ALL_TO_ALL}
            for entry in list(counted):
                bound = bounds.get(_exchange(entry))
                if bound is not None and (entry.axis in routed or entry.num_bytes <= bound.num_bytes):
                    planned.discard(bound)
                    counted.discard(entry)
        differing = sorted(planned ^ counted, key=lambda one: (one.collective, one.axis, one.phase))
        step = self.plan.step
        together = step.axes.get("pp", 1) > 1

        def is_judged(one: CollectivePlan) -> bool:
            axes = one.axis.removesuffix(OVER_PIECES).removesuffix(OVER_REPLICAS)
            is_of_weights = together and set(axes.split("_")) <= set(DATA_AXES)
            return one.phase != AFTER and not is_of_weights and not (step.compiled and one.phase == "backward")

        return [one for one in differing if is_judged(one)]

    def _axes_of_uneven_exchanges(self) -> set[str]:
        """Axes on which ranks with the same tokens each send those of their own experts: as many as routing says, where
        the plan counts an even share."""
        strategies = [node.strategy for node in self.plan.nodes.values() if node.op == EXPERTS]
        return {
            axis
            for strategy in strategies
            if _CUT_EXPERTS in strategy
            for axis, choice in zip(self.plan.mesh.names, strategy, strict=True)
            if choice.startswith(_CUT_TOKENS)
        }


def _exchange(entry: CollectivePlan) -> tuple[str, str, str, int]:
    """What two entries that differ in bytes alone have in common."""
    return entry.collective, entry.axis, entry.phase, entry.count
