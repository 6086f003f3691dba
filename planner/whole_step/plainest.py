"""What the plainest plan is searched among: ever more axes and schedules, until one is as fast as can be told.

Plainer is what divides along fewer axes beside ``dp``; of as many, along ``tp`` before ``ep``, ``cp`` and ``pp``; and a
pipeline that runs 1F1B, then interleaved 1F1B, then any schedule.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from passes.plan.step_plan import Alternative, StepPlan
from planner.whole_step.candidates.demands import Demands
from planner.whole_step.costs.step_prices import CONTEXT, EXPERT, PIPELINE, TENSOR

#: Axes beside ``dp``, plainest first.
_PLAIN_AXES = (TENSOR, EXPERT, CONTEXT, PIPELINE)
#: Schedules of a pipeline, ever more; None: all.
_PLAIN_SCHEDULES: tuple[tuple[str, ...] | None, ...] = (("1f1b",), ("1f1b", "interleaved_1f1b"), None)


def plainer_demands(demands: Demands) -> Iterator[Demands]:
    """Demands that allow no more than ``demands``, the plainest first, the last of them all that ``demands`` do."""
    for count in range(len(_PLAIN_AXES) + 1):
        for axes in itertools.combinations(_PLAIN_AXES, count):
            alone = {axis: frozenset({1}) for axis in _PLAIN_AXES if axis not in axes}
            for names in _PLAIN_SCHEDULES if PIPELINE in axes else _PLAIN_SCHEDULES[-1:]:
                limits = alone if names is None else {**alone, "schedule": frozenset(names)}
                fixed = {**demands.fixed, **{name: _allowed(demands, name, values) for name, values in limits.items()}}
                if all(fixed.values()):
                    yield dataclasses.replace(demands, fixed=fixed)


def _allowed(demands: Demands, name: str, values: frozenset[Any]) -> frozenset[Any]:
    """Those of ``values`` that the demands allow, too."""
    return frozenset(demands.among(name, values))


def is_among(step: StepPlan, fixed: Mapping[str, frozenset[Any]]) -> bool:
    """Whether a step has the axes and the schedule that ``fixed`` allows."""
    sizes = (step.axes.get(axis, 1) in fixed.get(axis, (step.axes.get(axis, 1),)) for axis in _PLAIN_AXES)
    return all(sizes) and (step.schedule == "none" or step.schedule in fixed.get("schedule", (step.schedule,)))


def with_first_runner_up(step: StepPlan, fastest: Alternative) -> StepPlan:
    """A step with ``fastest`` before its runners-up."""
    others = [other for other in step.alternatives if other.what != fastest.what]
    return dataclasses.replace(step, alternatives=(fastest, *others))
