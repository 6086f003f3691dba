"""Parameters whose gradients are reduced outside the program: on those axes they are R, with a partial gradient."""

from __future__ import annotations

import dataclasses

from passes.ir.conversions import Step, step_between
from passes.ir.types import I, MeshShape, Placement, R
from passes.plan import ConversionPlan
from passes.shard.context import Tree


class DeferredTree(Tree):
    """The conversions of a parameter, with R for whatever it is planned as on the ``deferred`` axes.

    A planned step to R on such an axis is dropped: with it goes the collective of its backward. An operator that wants
    the parameter as I there (it computes with parameters alone) is given R → I, which keeps one rank's gradient.

    Args:
        planned: the conversions as the plan has them.
        deferred: positions of the axes.
        value: how the plan names the parameter.
    """

    def __init__(self, planned: Tree, deferred: frozenset[int], mesh: MeshShape, value: str) -> None:
        super().__init__(_changed(planned.root, dict.fromkeys(deferred, R)), {})
        self.planned = planned
        self.deferred = deferred
        self.mesh = mesh
        self.value = value

    def chain(self, target: Placement, what: str) -> list[ConversionPlan]:
        """Steps from the root to ``target``, in order."""
        current, conversions = self.root, []
        for step in self.planned.chain(target, what):
            axes = step_between(step.source, step.target).axes
            if len(axes) > 1 and all(current[axis] == step.source[axis] for axis in axes):
                # One by one, axes that come to cut a dim would cut it in another order.
                after = _changed(current, {axis: step.target[axis] for axis in axes})
                conversions.append(dataclasses.replace(step, source=current, target=after))
                current = after
                continue
            for axis in reversed(axes):  # of a joint step one by one: some may be dropped
                target_type = step.target[axis]
                if axis in self.deferred and target_type in (I, R) and current[axis] == R:
                    continue
                after = _changed(current, {axis: target_type})
                alone = len(axes) == 1
                conversions.append(self._step(step, axis, current, after) if alone else self._new(axis, current, after))
                current = after
        for axis in sorted(self.deferred):
            if current[axis] != target[axis]:
                after = _changed(current, {axis: target[axis]})
                conversions.append(self._new(axis, current, after))
                current = after
        return conversions

    def _step(self, planned: ConversionPlan, axis: int, source: Placement, target: Placement) -> ConversionPlan:
        if axis in self.deferred:
            return self._new(axis, source, target)
        return dataclasses.replace(planned, source=source, target=target)

    def _new(self, axis: int, source: Placement, target: Placement) -> ConversionPlan:
        forward, backward = Step(axis, source, target).collectives
        return ConversionPlan(self.value, self.mesh.names[axis], source, target, 1, forward, backward, 0)


def _changed(placement: Placement, changes: dict[int, str]) -> Placement:
    return tuple(changes.get(axis, spmd_type) for axis, spmd_type in enumerate(placement))
