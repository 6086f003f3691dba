"""All conversion steps between some placements, with what is the same of them whatever the sizes of axes above 1."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from passes.ir.conversions import Step, joint_steps_from, steps_from
from passes.ir.types import I, MeshShape, Placement, R

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Places = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class StepTable:
    """Every step from one of some placements to another of them, and what all values that it may convert are asked.

    Attributes:
        steps: in the order of their sources.
        ends: of each step, the indices of its placements.
        axis_names: of each step, those of its axes joined by ``_``.
        sizes: of steps that move equally many bytes, one.
        collectives: distinct (collective, axis name, place in ``sizes``, one of ``Step.laid_out_dims``); the first
            stands for no communication.
        forward, backward: of each step, the place of its collectives among these.
        joint: places of the steps of several axes.
        shared: places of the steps that reduce a parameter's gradient, which may go together with those of others.
    """

    num_placements: int
    steps: tuple[Step, ...]
    ends: tuple[tuple[int, int], ...]
    axis_names: tuple[str, ...]
    sizes: tuple[Step, ...]
    collectives: tuple[tuple[str, str, int, int | None], ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    joint: tuple[int, ...]
    shared: tuple[int, ...]

    @functools.cached_property
    def by_target(self) -> tuple[Places, Places, Places, Places]:
        """Places of the steps by their target and the sources of these; where those of a target begin; targets."""
        import numpy as np

        sources, targets = np.array(self.ends, dtype=np.int64).reshape(-1, 2).T
        order = targets.argsort(kind="stable")
        reached, starts = np.unique(targets[order], return_index=True)
        return order, sources[order], starts, reached


@functools.lru_cache(maxsize=4096)
def step_table(placements: tuple[Placement, ...], mesh: MeshShape, *, joint: bool) -> StepTable:
    """The table of ``placements``, the same for all sizes of axes above 1; ``joint``: with joint steps."""
    index = {placement: position for position, placement in enumerate(placements)}
    types = [sorted(set(on_axis)) for on_axis in zip(*placements)]
    steps = tuple(
        step
        for placement in placements
        for step in (*steps_from(placement, mesh, types), *(joint_steps_from(placement, mesh, types) if joint else ()))
        if step.target in index
    )
    sizes: dict[tuple[object, ...], tuple[int, Step]] = {}
    collectives: dict[tuple[str, str, int, int | None], int] = {("", "", 0, None): 0}
    called: list[list[int]] = []
    names = tuple(step.axis_name(mesh) for step in steps)
    for step, name in zip(steps, names):
        size, _ = sizes.setdefault((step.axes, step.whole, step.moved_dims), (len(sizes), step))
        called.append(
            [
                collectives.setdefault((each, name, size, dim), len(collectives)) if each else 0
                for each, dim in zip(step.collectives, step.laid_out_dims)
            ]
        )
    pairs = [(step.source_type, step.target_type) for step in steps]
    return StepTable(
        num_placements=len(placements),
        steps=steps,
        ends=tuple((index[step.source], index[step.target]) for step in steps),
        axis_names=names,
        sizes=tuple(step for _, step in sizes.values()),
        collectives=tuple(collectives),
        forward=tuple(forward for forward, _ in called),
        backward=tuple(backward for _, backward in called),
        joint=tuple(place for place, step in enumerate(steps) if step.is_joint),
        shared=tuple(place for place, pair in enumerate(pairs) if pair == (I, R)),
    )
