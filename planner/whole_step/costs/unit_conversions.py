"""The conversions that each unit's copies pay for under one sharding, and those that run again where it recomputes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from passes.repeats.model_units import ModelUnit
from planner.sharding_ilp.assignment import Conversion
from planner.whole_step.costs.stream_units import unit_of_stream

if TYPE_CHECKING:
    from planner.whole_step.costs.sharding import Variant


class UnitConversions:
    """Conversions of values by unit, each by the element that produces the value."""

    def __init__(self, variant: Variant, units: Sequence[ModelUnit], unit_of: Mapping[str, int]) -> None:
        self._nodes = [frozenset(unit.nodes) for unit in units]
        self._by_unit: dict[int, list[tuple[str, Conversion]]] = defaultdict(list)
        for name, stream in variant.problem.streams.items():
            unit = unit_of_stream(units, unit_of, stream)
            if unit is not None:
                self._by_unit[unit] += [(stream.source, item) for item in variant.assignment.trees[name]]

    def of(self, unit: int) -> list[Conversion]:
        """All that the copies of a unit pay for."""
        return [item for _, item in self._by_unit[unit]]

    def again(self, unit: int, recomputed: Collection[str]) -> list[Conversion]:
        """Those that run again with the operators ``recomputed``: of what these produce and of what enters the unit.

        What an operator that does not run again produces is what the unit passes on: the next one saved it.
        """
        idle = self._nodes[unit].difference(recomputed)
        return [item for source, item in self._by_unit[unit] if source not in idle]
