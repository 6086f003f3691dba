"""Chunks of hand-made plans: groups of units that share given seconds."""

from __future__ import annotations

from cost_models.step import ChunkCosts, LayerCosts, LayerSeconds
from passes.plan.step_plan import ChunkPlan, GroupPlan


def chunk_plan(rank: int, groups: tuple[GroupPlan, ...], *, forward: float = 0.0, backward: float = 0.0) -> ChunkPlan:
    """A chunk that takes ``forward`` and ``backward`` seconds, the same for each of its units."""
    units = sum(group.count for group in groups)
    layer = LayerCosts(forward=forward / units, backward=backward / units)
    parts = LayerSeconds(compute_forward=layer.forward, compute_backward=layer.backward)
    costs = ChunkCosts(layers=tuple((layer, group.count) for group in groups))
    return ChunkPlan(rank, groups, costs, (parts,) * len(groups))
