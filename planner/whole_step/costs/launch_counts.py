"""How many kernels and collectives the host launches for a unit under one sharding.

A device cannot be faster than its host launches what it runs: one copy of a unit takes at least the launches of a
micro-batch times the host's seconds for one (``cost_models.hardware.Device.host_seconds``), forward and backward each.
Launches are what the prices count: a kernel for each price of an operator (none for views, nor for what compiled code
computes inside of another kernel), and a collective for each that takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from passes.repeats.model_units import ModelUnit
from planner.sharding_ilp.assignment import Conversion
from planner.whole_step.costs.sharding import ShardingSpace, Variant

#: Launches forward and backward.
Launches = tuple[float, float]


class LaunchCounts:
    """Launches of operators and conversions under one sharding."""

    def __init__(self, space: ShardingSpace, variant: Variant) -> None:
        self.space, self.variant = space, variant
        self.options = variant.assignment.options

    def operators(self, names: Iterable[str]) -> Launches:
        """Kernels of the operators ``names``."""
        counts = [self._operator(name) for name in names if name in self.options]
        return float(sum(forward for forward, _ in counts)), float(sum(backward for _, backward in counts))

    def _operator(self, name: str) -> tuple[int, int]:
        node, option = self.variant.problem.elements[name].node, self.options[name]
        if node is None:
            return 0, 0
        _, flops = self.space.offers.facts(node)
        values, live = self.space.offers.values, name in self.space.live
        return self.variant.pricing.launches(node, values, option.inputs, option.outputs, flops=flops, live=live)

    def collectives(
        self, unit: ModelUnit, conversions: Sequence[Conversion], *, names: Iterable[str] | None = None
    ) -> Launches:
        """Collectives of one copy of a unit: those of the conversions that all copies pay for, and those that its
        operators issue themselves (or of these ``names`` alone)."""
        operators = unit.nodes if names is None else names
        issued = [item for name in operators if name in self.options for item in self.options[name].collectives]
        own = [item.phase == "forward" for item in issued if item.seconds]
        forward = sum(item.copies for item in conversions if item.arc.forward) / unit.count
        backward = sum(item.backward_copies for item in conversions if item.arc.backward) / unit.count
        return forward + sum(own), backward + len(own) - sum(own)
