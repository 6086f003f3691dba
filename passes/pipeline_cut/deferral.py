"""Which gradients are reduced outside of programs, all of a unit together, rather than one by one inside of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from passes.ir.types import I, R, shard_dim
from passes.plan import Plan

#: Axes on whose ranks a step that is planned as a whole has the same parameters.
BATCH_AXIS = "dp"
DATA_AXES = (BATCH_AXIS, "ep", "cp")

#: Path of a parameter or buffer → axes on which a program takes it as R and leaves its gradient partial.
Deferral = Mapping[str, tuple[str, ...]]


def deferral_of(plan: Plan) -> Deferral:
    """The axes of every parameter and buffer of a plan on which its gradient is reduced outside of programs.

    Where a whole step was searched: the data axes, but for those that cut it (experts over ``ep``). On a given mesh:
    those on which the plan converts a parameter that is whole there (I → R) for an operator that gives partial sums of
    its gradient; the conversion and its backward collective go.
    """
    if plan.step.decides_units:
        axes = tuple(axis for axis in DATA_AXES if axis in plan.mesh.names)
        places = [(axis, plan.mesh.names.index(axis)) for axis in axes]
        return {
            path: tuple(axis for axis, place in places if shard_dim(planned.placement[place]) is None)
            for path, planned in plan.states.items()
        }
    partial: dict[str, dict[str, None]] = {}
    for conversion in plan.conversions:
        kind, _, path = conversion.value.partition(":")
        planned = plan.states.get(path)
        if kind != "state" or planned is None or not planned.trainable or conversion.axis not in plan.mesh.names:
            continue  # No step over several axes at once is I → R.
        axis = plan.mesh.names.index(conversion.axis)
        if (conversion.source[axis], conversion.target[axis]) == (I, R) and planned.placement[axis] == I:
            partial.setdefault(path, {})[conversion.axis] = None
    ordered = {path: tuple(axis for axis in plan.mesh.names if axis in axes) for path, axes in partial.items()}
    return {copy: axes for path, axes in ordered.items() for copy in (path, *_copies(plan, path))}


def _copies(plan: Plan, path: str) -> Iterator[str]:
    """The same state in the other copies of the repeated block that ``path`` is in."""
    for block in plan.blocks:
        for place, root in enumerate(block.roots[0]):
            if path.startswith(f"{root}."):
                yield from (copy[place] + path[len(root) :] for copy in block.roots[1:])
