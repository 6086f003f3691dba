"""Which unit pays for the conversions of a value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from passes.repeats.model_units import ModelUnit
from planner.sharding_ilp.sharding_problem import ValueStream


def unit_of_stream(units: Sequence[ModelUnit], unit_of: Mapping[str, int], stream: ValueStream) -> int | None:
    """The unit that pays for a stream's conversions: the producer's, else (inputs, states) the first user's."""
    producer = unit_of_element(units, unit_of, stream.source)
    if producer is not None:
        return producer
    users = [unit_of[use.element] for use in stream.uses if use.element in unit_of]
    return min(users) if users else None


def unit_of_element(units: Sequence[ModelUnit], unit_of: Mapping[str, int], name: str) -> int | None:
    """The unit of an operator, or of the block whose copies carry a value; None for what is in none."""
    if not name.startswith("carry:"):
        return unit_of.get(name)
    run = int(name.removeprefix("carry:").partition("#")[0])
    return next(index for index, unit in enumerate(units) if unit.run == run)
