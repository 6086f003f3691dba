"""Shardings and their figures for any cut, found when first asked for, and bounds from those already known."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

from cost_models import Cluster, CostModel
from cost_models.hardware import crossed_levels
from planner.step.figures import KeptSpace, UnitFigures, unit_figures
from planner.step.following import batch_size_of
from planner.step.layout import Layout, Links
from planner.step.pricing import CONTEXT, DATA, TENSOR, BatchPrices
from planner.step.sharding import Cut, ShardingSpace, Variant, find_variant

_REST = "rest"


@dataclass(frozen=True)
class Sharded:
    """One variant with what every unit costs under it."""

    space: ShardingSpace
    kept: KeptSpace
    variant: Variant

    @property
    def seconds(self) -> float:
        """Of one micro-batch, forward and backward, all units."""
        return self.variant.assignment.seconds

    @functools.cached_property
    def communication(self) -> float:
        """Seconds of those on collectives."""
        return self.seconds - sum(
            element.copies * sum(self.variant.assignment.options[name].compute)
            for name, element in self.variant.problem.elements.items()
        )

    @functools.cached_property
    def figures(self) -> tuple[UnitFigures, ...]:
        """Of every unit, in model order."""
        return unit_figures(self.space, self.kept, self.variant)


@dataclass
class LevelOne:
    """Level 1 of one model on one cluster. ``solved`` counts the sharding ILPs."""

    cluster: Cluster
    space: ShardingSpace
    kept: KeptSpace
    solved: int = 0
    _sharded: dict[tuple[object, ...], Sharded | None] = field(default_factory=dict)

    @property
    def global_batch(self) -> int:
        return batch_size_of(self.space.graph)

    @property
    def micro_batches(self) -> bool:
        """Whether the model can be run on parts of a batch one after the other."""
        return not self.space.followed.mixing

    def sharded(self, cut: Cut, layout: Layout, links: Links, *, weight: float = 0.0) -> Sharded | None:
        """The sharding for ``cut`` on the links of ``layout``, None if nothing divides; ``weight``: of bytes."""
        latency, bandwidth = links.group.link(DATA) if layout.group > 1 else (0.0, math.inf)
        places = [self._place(layout.sizes[axis], layout.stride(axis)) for axis in (CONTEXT, TENSOR)]
        mixes = cut.pieces == layout.data
        key = (cut, *places, latency, weight, mixes and not self.micro_batches)
        if key not in self._sharded:
            prices = BatchPrices(links.axes, sample_latency=latency, sample_bandwidth=bandwidth, mixes=mixes)
            self._sharded[key] = self._solve(cut, prices, weight)
        return self._sharded[key]

    def alone(self, cut: Cut) -> Sharded | None:
        """The fastest sharding for a cut of the batch and at most one other axis, on the best links there are."""
        size = cut.context * cut.tensor
        if self.cluster.num_devices % size:
            return None
        context, tensor = (size, 1) if cut.context > 1 else (1, size)
        layout = Layout(1, self.cluster.num_devices // size, context, tensor)
        places = [self._place(layout.sizes[axis], layout.stride(axis)) for axis in (CONTEXT, TENSOR)]
        key = (cut, *places, "alone")
        if key not in self._sharded:
            prices = BatchPrices(
                CostModel(self.cluster, layout.sizes), sample_latency=0.0, sample_bandwidth=math.inf, mixes=True
            )
            self._sharded[key] = self._solve(cut, prices, 0.0)
        return self._sharded[key]

    def _solve(self, cut: Cut, prices: BatchPrices, weight: float) -> Sharded | None:
        self.solved += 1
        variant = find_variant(self.space, cut, prices, weight=weight)
        return None if variant is None else Sharded(self.space, self.kept, variant)

    def _place(self, size: int, stride: int) -> tuple[object, ...]:
        if size == 1:
            return ()
        crossed = crossed_levels(self.cluster.levels, stride=stride, size=size)
        return tuple((level.name, level.group_size // stride) for level in crossed)
