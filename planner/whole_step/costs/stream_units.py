"""Which unit pays for the conversions of a value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from passes.repeats.model_units import ModelUnit
from planner.sharding_ilp.sharding_problem import Problem, ValueStream


def unit_of_stream(
    problem: Problem, units: Sequence[ModelUnit], unit_of: Mapping[str, int], stream: ValueStream
) -> int | None:
    """The unit that pays for a stream's conversions: the producer's, else (inputs, states) the first user's."""
    element = problem.elements[stream.source]
    if stream.source in unit_of:
        return unit_of[stream.source]
    if element.kind == "carry":
        run = int(element.key.removeprefix("carry:").partition("#")[0])
        return next(index for index, unit in enumerate(units) if unit.run == run)
    users = [unit_of[use.element] for use in stream.uses if use.element in unit_of]
    return min(users) if users else None
