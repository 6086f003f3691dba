"""Prices of a byte in the sharding ILP, and how long gradients are reduced under a sharding.

The sharding ILP sees one micro-batch. What is fastest there may keep parameters whole along the tensor axis, where the
sums of their gradients over data ranks, once a step, take that many times longer than of parameters that are cut. A
higher price of a byte cuts them.
"""

from __future__ import annotations

from collections.abc import Iterable

from cost_models.dtypes import item_size
from planner.whole_step.candidates.mesh_layout import Links, MeshLayout
from planner.whole_step.candidates.training_options import TrainingOptions
from planner.whole_step.costs.step_prices import DATA
from planner.whole_step.costs.unit_figures import UnitFigures

#: Prices of a byte, as multiples of (seconds / bytes of the fastest sharding); later ones if memory binds.
BYTE_WEIGHTS = (0.0, 0.25)
#: Prices beyond those, tried one after the other while reductions take longer than they must.
STATE_WEIGHTS = (1.0, 4.0, 16.0)
ALL_WEIGHTS = (*BYTE_WEIGHTS, *STATE_WEIGHTS)
#: How much longer that is, as a share of what the gap lets a plan be slower than the best.
LONGER = 0.25


def reducing_seconds(
    figures: Iterable[UnitFigures], layout: MeshLayout, links: Links, training: TrainingOptions
) -> float:
    """Seconds in which a step sums all gradients over data ranks, those of a unit together, with nothing beside."""
    total = 0.0
    for each in figures:
        reduced = [0.0, 0.0]  # of experts on an axis of their own, behind the rest
        for weight in each.weights:
            if weight.trainable and not weight.shared:
                group = int(weight.expert and layout.expert > 1)
                reduced[group] += weight.elements * item_size(training.gradients(weight.dtype))
        prices, several = (links.group, links.expert_group), (layout.group > 1, layout.expert_group > 1)
        for num_bytes, price, is_several in zip(reduced, prices, several, strict=True):
            if num_bytes and is_several:
                total += each.unit.count * price.collective_seconds("all_reduce", num_bytes=num_bytes, axis=DATA)
    return total
