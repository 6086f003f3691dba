"""What to say when no plan fits: what is missing, and the smallest relaxations that would help."""

from __future__ import annotations

from planner.step.search import Outcome, Search


def infeasible(search: Search, outcome: Outcome) -> ValueError:
    """The error for a search that found nothing."""
    if outcome.shortfalls:
        candidate = min(outcome.shortfalls, key=lambda each: outcome.shortfalls[each])
        missing = outcome.shortfalls[candidate]
        return ValueError(
            f"no plan fits in memory: the closest ({candidate}) lacks {missing / 2**30:.1f} GiB on each device of "
            f"{search.memory / 2**30:.1f} GiB; give more devices or a smaller batch"
        )
    return ValueError("no plan meets the demands: loosen fix and forbid")
