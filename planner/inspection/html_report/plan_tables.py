"""Tables of the report that have no chart: collectives, runners-up, experts' layouts, break-evens."""

from __future__ import annotations

from collections.abc import Sequence

from passes.plan import Plan
from passes.plan.step_summary import not_told_apart
from passes.plan.text_tables import format_bytes, format_change, format_seconds
from planner.inspection.baseline_comparison import ComparedLayout
from planner.inspection.robustness import LARGEST, BreakEven


def collective_rows(plan: Plan) -> list[list[str]]:
    """Collectives of a step on one device: what, axis, phase, how often, bytes."""
    return [
        [item.collective, item.axis, item.phase, f"{item.count:,}", format_bytes(item.num_bytes)]
        for item in sorted(plan.collectives, key=lambda item: -item.num_bytes)
    ]


def runner_up_rows(plan: Plan) -> list[list[str]]:
    """Other plans that were solved: seconds, by how much they lose, memory."""
    costs = plan.step.costs
    return [
        [
            other.what,
            format_seconds(other.simulated),
            format_change(other.simulated, costs.simulated) + not_told_apart(other, costs.simulated),
            format_change(other.seconds, costs.seconds),
            format_bytes(other.memory),
        ]
        for other in plan.step.alternatives
    ]


def layout_rows(plan: Plan, layouts: Sequence[ComparedLayout]) -> list[list[str]]:
    """Experts' layouts and users' own: seconds, by how much they lose, memory, what they are or why they cannot run."""
    ours = plan.step.costs.simulated
    return [
        [layout.name, "—", "", "", layout.what]
        if layout.seconds is None
        else [
            layout.name,
            format_seconds(layout.seconds),
            format_change(layout.seconds, ours),
            format_bytes(layout.memory),
            layout.what,
        ]
        for layout in layouts
    ]


def break_even_rows(rows: Sequence[BreakEven]) -> list[list[str]]:
    """For each figure and direction: from which factor on another plan wins, which, and remarks."""
    return [
        [
            row.figure,
            "larger" if row.larger else "smaller",
            f"none up to × {LARGEST if row.larger else 1 / LARGEST:g}" if row.factor is None else f"× {row.factor:.3g}",
            row.rival,
            "; ".join(filter(None, (row.reason, _left_open(row)))),
        ]
        for row in rows
    ]


def _left_open(row: BreakEven) -> str:
    """What the searches for a break-even do not prove."""
    return "" if row.proved else f"nearer to 1, too, a plan may be faster by up to {row.proved_to:.1%}"
