"""Least seconds by which ZeRO prolongs the compute of one micro-batch: what it lays out whole, and what slows down.

While parameters are gathered and gradients reduced compute slows down (``planner.whole_step.costs.unit_choices``): by a
share of the shorter of the two in every micro-batch, and of what is reduced once a step in one of m. Both grow with the
seconds of compute and of communication, which a sharding of n parts has at least 1/n of.

State must fit beside the least activations. A relaxation: fractions of every unit take each stage over each group of
data ranks, those first that free most bytes a second.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cost_models.dtypes import item_size
from cost_models.memory import zero_state_bytes
from planner.whole_step.candidates.mesh_layout import Links, MeshLayout
from planner.whole_step.candidates.training_options import TrainingOptions
from planner.whole_step.costs.hulls import hull, steps_along
from planner.whole_step.costs.parameter_passes import LEAST_UNPACKED
from planner.whole_step.costs.step_prices import DATA
from planner.whole_step.costs.unit_figures import UnitFigures


@dataclass(frozen=True)
class StageSeconds:
    """Of all copies of a unit under one ZeRO stage over one group: bytes held over one pipeline; seconds of one copy to
    lay out parameters in each direction, to gather them, to reduce gradients each micro-batch and once a step."""

    held: float
    unpack: float
    gather: float
    reduce: float
    reduce_step: float


def stage_seconds(
    figures: UnitFigures,
    links_of: Mapping[MeshLayout, Links],
    stages: Collection[int],
    training: TrainingOptions,
) -> Iterator[StageSeconds]:
    """The least of a unit at every stage over every group of ``links_of``, undivided but for the batch."""
    for layout, links in links_of.items():
        weights = [weight for weight in figures.weights if weight.trainable]
        parts = [weight.elements // layout.tensor // (layout.expert if weight.expert else 1) for weight in weights]
        gathered, reduced = [0.0, 0.0], [0.0, 0.0]  # of experts on an axis of their own, behind the rest
        for weight, elements in zip(weights, parts):
            if not weight.shared:
                group = int(weight.expert and layout.expert > 1)
                gathered[group] += elements * item_size(weight.dtype)
                reduced[group] += elements * item_size(training.gradients(weight.dtype))
        several = (layout.group > 1, layout.expert_group > 1)
        for stage in stages if layout.group > 1 else (0,):
            held = sum(
                (1 if weight.shared else figures.unit.count)
                * zero_state_bytes(
                    elements, weight.dtype, stage=stage, group_size=layout.piece_ranks(expert=weight.expert),
                    gradient_dtype=training.gradients(weight.dtype), optimizer=training.optimizer,
                    offloaded=training.offload,
                ).total
                for weight, elements in zip(weights, parts)
            )  # fmt: skip
            whole = (links.group, links.expert_group) if not stage else (links.pieces, links.expert_pieces)
            gather = reduce = 0.0
            for each, is_several, sent, summed in zip(whole, several, gathered, reduced):
                if not is_several or not sent:
                    continue
                collective = "reduce_scatter" if stage else "all_reduce"
                reduce += each.collective_seconds(collective, num_bytes=summed, axis=DATA)
                gather += each.collective_seconds("all_gather", num_bytes=sent, axis=DATA) if stage == 3 else 0.0
            copied = LEAST_UNPACKED * sum(gathered) if stage == 3 else 0.0
            unpack = links.axes.compute_seconds(flops=0.0, num_bytes=copied, dtype="float32", kind="list_copy")
            yield StageSeconds(
                held, unpack if copied else 0.0, gather, reduce if stage >= 2 else 0.0, 0.0 if stage >= 2 else reduce
            )


def least_beside(
    undivided: Sequence[UnitFigures],
    of_units: Sequence[Sequence[StageSeconds]],
    *,
    parts: int,
    num_microbatches: int,
    slowdown: float,
    room: float,
) -> float:
    """Lower bound of those seconds, over all units and ranks, where state has ``room`` bytes over one pipeline."""
    total, steps = 0.0, []
    for figures, choices in zip(undivided, of_units, strict=True):
        forward, backward = (seconds / parts for seconds in figures.compute)
        points = []
        for each in choices:
            every_time = min(backward, each.gather + each.reduce)
            once = min(backward - every_time, each.reduce_step) / num_microbatches
            slower = slowdown * (min(forward, each.gather) + every_time + once)
            points.append((each.held, figures.unit.count * (2 * each.unpack + slower)))
        edge = hull(points)
        room, total = room - edge[0][0], total + edge[0][1]
        steps += steps_along(edge)
    for _, freed, cost in sorted(steps):
        if room >= 0:
            break
        share = min(1.0, -room / freed) if freed else 0.0
        room, total = room + share * freed, total + share * cost
    return total if math.isfinite(total) else 0.0
