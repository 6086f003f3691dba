"""How many kernels and collectives the host launches for a unit under one sharding.

A device cannot be faster than its host launches what it runs: one copy of a unit takes at least the launches of a
micro-batch times the host's seconds for one (``cost_models.hardware.Device.host_seconds``), forward and backward each.
Launches are what the prices count: a kernel for each price of an operator (none for views, nor for what compiled code
computes inside of another kernel), and a collective for each that takes seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from passes.ir.graph import Node
from passes.repeats.model_units import ModelUnit
from planner.sharding_ilp.assignment import Conversion
from planner.sharding_ilp.options import OperatorChoices, Option
from planner.sharding_ilp.sharding_prices import Pricing

if TYPE_CHECKING:
    from planner.whole_step.costs.sharding import ShardingSpace, Variant

#: Launches forward and backward.
Launches = tuple[float, float]


class OptionLaunches:
    """Launches of operators under their options."""

    def __init__(self, offers: OperatorChoices, live: Collection[str], pricing: Pricing) -> None:
        self.offers, self.live, self.pricing = offers, live, pricing

    def of(self, name: str, node: Node | None, option: Option) -> Launches:
        """Kernels, and collectives that the operator issues itself."""
        kernels, own = self.kernels(name, node, option), own_collectives((option,))
        return kernels[0] + own[0], kernels[1] + own[1]

    def kernels(self, name: str, node: Node | None, option: Option) -> tuple[int, int]:
        """Kernels alone; none of what is no operator."""
        if node is None:
            return 0, 0
        _, flops = self.offers.facts(node)
        return self.pricing.launches(
            node, self.offers.values, option.inputs, option.outputs, flops=flops, live=name in self.live
        )


def own_collectives(options: Iterable[Option]) -> Launches:
    """Collectives that operators issue themselves under these options."""
    forward = [item.phase == "forward" for option in options for item in option.collectives if item.seconds]
    return float(sum(forward)), float(len(forward) - sum(forward))


class LaunchCounts:
    """Launches of operators and conversions under one sharding."""

    def __init__(self, space: ShardingSpace, variant: Variant) -> None:
        self.elements, self.options = variant.problem.elements, variant.assignment.options
        self.by_option = OptionLaunches(space.offers, space.live, variant.pricing)

    def operators(self, names: Iterable[str]) -> Launches:
        """Kernels of the operators ``names``."""
        counts = [
            self.by_option.kernels(name, self.elements[name].node, self.options[name])
            for name in names
            if name in self.options
        ]
        return float(sum(forward for forward, _ in counts)), float(sum(backward for _, backward in counts))

    def collectives(
        self, unit: ModelUnit, conversions: Sequence[Conversion], *, names: Iterable[str] | None = None
    ) -> Launches:
        """Collectives of one copy of a unit: those of the conversions that all copies pay for, and those that its
        operators issue themselves (or of these ``names`` alone)."""
        operators = unit.nodes if names is None else names
        own = own_collectives(self.options[name] for name in operators if name in self.options)
        forward = sum(item.copies for item in conversions if item.arc.forward) / unit.count
        backward = sum(item.backward_copies for item in conversions if item.arc.backward) / unit.count
        return forward + own[0], backward + own[1]
