"""Planning for calls that a plan does not cover: earlier decisions stay."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from passes.ir.conversions import divides
from passes.ir.graph import Graph, Value
from passes.ir.types import I, Placement, R, SpmdType
from passes.plan import Plan
from passes.plan.plan_data import TensorPlan
from passes.shard.context import has_whole_gradient, input_key

#: Finds a plan for a graph; the second argument is the plan whose decisions are pinned, or None.
Planner = Callable[[Graph, Plan | None], Plan]


def as_seen_by(graph: Graph, plan: Plan, *, samples_divide: bool = False) -> Plan:
    """What to keep of ``plan`` for another graph of the model: a tensor that is whole is R without a gradient, else I.

    Where a gradient comes in that the plan did not know of, or an input cannot be cut into equal parts, its operators
    are chosen anew: only the shards stay. ``samples_divide``: only other dims than the samples' cannot be cut, so that
    all stays that is still possible.
    """
    with_grad = {state.path for state in graph.states if state.value.requires_grad}
    used = {state.path for state in graph.states}
    states = {
        path: dataclasses.replace(planned, placement=_whole_as(I if path in with_grad else R, planned.placement))
        if path in used
        else planned
        for path, planned in plan.states.items()
    }
    newly_trained = any(path in plan.states and not plan.states[path].trainable for path in with_grad)
    divided = samples_divide or _divides_inputs(plan, graph)
    if newly_trained or not _gives_input_gradients(plan, graph) or not divided:
        return dataclasses.replace(plan, states=states, inputs={}, nodes={}, blocks=())
    return dataclasses.replace(plan, states=states)


def _gives_input_gradients(plan: Plan, graph: Graph) -> bool:
    return all(
        one is None or not value.requires_grad or has_whole_gradient(one.placement, plan.mesh)
        for one, value in _planned_inputs(plan, graph)
    )


def _divides_inputs(plan: Plan, graph: Graph) -> bool:
    return all(
        one is None or divides(one.placement, value.shape, plan.mesh) for one, value in _planned_inputs(plan, graph)
    )


def _planned_inputs(plan: Plan, graph: Graph) -> list[tuple[TensorPlan | None, Value]]:
    return [(plan.inputs.get(input_key(path)), value) for path, value in zip(graph.input_paths, graph.inputs)]


def _whole_as(whole: SpmdType, placement: Placement) -> Placement:
    return tuple(whole if spmd_type in (R, I) else spmd_type for spmd_type in placement)
