"""The pattern pass: what models spell out in many operators becomes calls of the fused ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from passes.fuse.check import EXACT, ROUNDED
from passes.fuse.fuse import Rewriter, already_fused
from passes.fuse.patterns import ACTIVATIONS, OPERATORS
from passes.fuse.registered_fusions import registered_rows
from passes.fuse.report import Match, NearMiss
from passes.fuse.residuals import Folded, fold_residuals
from passes.fuse.rotary_pairs import pair_rotaries, share_angles
from passes.ir.graph import Graph
from passes.plan.plan_data import PlanData

__all__ = ["Fused", "Match", "NearMiss", "as_planned", "fuse", "pair_rotaries"]


@dataclass(frozen=True)
class Fused:
    """A graph with fused operators: what was matched, what nearly was, and by how much the two may differ."""

    graph: Graph
    matches: tuple[Match, ...]
    near_misses: tuple[NearMiss, ...]
    tolerance: float
    registered: tuple[str, ...] = ()


def fuse(graph: Graph, *, tolerance: float | None = None, registered: Sequence[str] | None = None) -> Fused:
    """``graph`` with every known pattern as the operator that computes it at once.

    Every match is checked: the operators found and the fused one run on small random tensors, with gradients, and must
    agree. The operators must be registered with torch (``runtime.kernels`` does that); patterns of others are left out.

    Args:
        tolerance: largest relative difference; None: what float64 explains if the graph computes in float64, else what
            constants written with few digits do.
        registered: the patterns of others to look for, by ``registered_fusions``; None for all that are registered.

    Raises:
        ValueError: if one of ``registered`` is not.
    """
    rows = registered_rows(registered)
    if tolerance is None:
        exact = any(value.dtype == "float64" for value in graph.values.values())
        tolerance = EXACT if exact else ROUNDED
    first = Rewriter(graph, ACTIVATIONS, tolerance=tolerance)
    named = first.run()
    second = Rewriter(named, (*rows.values(), *OPERATORS), tolerance=tolerance)
    fused = share_angles(second.run())
    folded = fold_residuals(fused, tolerance=tolerance)
    matches = [
        *(Match(each.row.name, each.root.module_path) for each in reversed(second.replaced.values())),
        *already_fused(fused),
    ]
    misses = [miss for name, miss in first.near_misses.items() if name not in second.taken]
    misses += reversed(second.near_misses.values())
    near_misses = (*misses, *folded.near_misses)
    return Fused(folded.graph, _with_sums(matches, folded), near_misses, tolerance, tuple(rows))


def as_planned(graph: Graph, plan: PlanData) -> Graph:
    """A captured graph as the one that ``plan`` was made of: with fused operators if that had them.

    Raises:
        ValueError: if the plan was made with a registered pattern that this process lacks.
    """
    if plan.fusion is None:
        return graph
    return fuse(graph, tolerance=plan.fusion.tolerance, registered=plan.fusion.registered).graph


def _with_sums(matches: list[Match], folded: Folded) -> tuple[Match, ...]:
    """Norms that took a residual addition in are reported as what they became."""
    num_folded = Counter(folded.norms.values())
    matches_of_sums = []
    for match in matches:
        of_sum = Match(f"add_{match.pattern}", match.module_path)
        is_folded = num_folded[of_sum] > 0
        num_folded[of_sum] -= is_folded
        matches_of_sums.append(of_sum if is_folded else match)
    return tuple(matches_of_sums)
