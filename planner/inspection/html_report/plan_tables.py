"""Tables of the report that have no chart: collectives and runners-up."""

from __future__ import annotations

from passes.plan import Plan
from passes.plan.text_tables import format_bytes, format_seconds


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
            f"{other.simulated / costs.simulated - 1.0:+.2%}",
            f"{other.seconds / costs.seconds - 1.0:+.2%}",
            format_bytes(other.memory),
        ]
        for other in plan.step.alternatives
    ]
