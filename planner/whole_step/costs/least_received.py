"""Least seconds in which the chunks of a pipeline receive one micro-batch from other ranks, under any sharding.

A value that crosses a boundary is divided over no more devices than a stage has, and a message of one of n equal parts
takes at least 1/n of the whole one's seconds. Each boundary lies before another unit than the model's first.
"""

from __future__ import annotations

from collections.abc import Sequence

from cost_models import CostModel
from cost_models.schedules import SCHEDULES
from planner.pipeline_ilp.crossings import cheapest_units
from planner.whole_step.candidates.candidates import Candidate
from planner.whole_step.candidates.mesh_layout import MeshLayout
from planner.whole_step.costs.step_prices import PIPELINE
from planner.whole_step.costs.unit_figures import UnitFigures


def seconds_to_receive(
    undivided: Sequence[UnitFigures], layout: MeshLayout, prices: CostModel
) -> tuple[tuple[float, int], ...]:
    """(seconds, places) of boundaries before the copies of every unit, activations and their gradients together."""
    bytes_of_units = [(figures.entering_bytes, figures.returning_bytes) for figures in undivided]
    return tuple(
        (sum(_sending(each / layout.num_parts, prices) for each in sizes), figures.unit.count - (place == 0))
        for place, (figures, sizes) in enumerate(zip(undivided, bytes_of_units, strict=True))
    )


def least_received(candidate: Candidate, boundaries: Sequence[tuple[float, int]]) -> float:
    """Lower bound of the seconds of all chunks, where ``boundaries`` may lie."""
    return cheapest_units(boundaries, _num_crossings(candidate))


def _num_crossings(candidate: Candidate) -> int:
    """Chunks that are on another rank than the one before them: in a V, the lowest rank holds both at its foot."""
    is_vee = SCHEDULES[candidate.schedule].placement == "vee"
    return candidate.num_chunks - 1 - is_vee


def _sending(num_bytes: float, prices: CostModel) -> float:
    return prices.p2p_seconds(num_bytes=num_bytes, axis=PIPELINE) if num_bytes else 0.0
