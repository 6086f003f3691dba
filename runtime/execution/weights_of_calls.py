"""Which weights calls use beside a training step's: in which chunk, and those that the step does not use at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

from passes.ir.graph import Graph
from passes.ir.types import R
from passes.pipeline_cut import StageGraph, StepPrograms
from passes.plan import Plan
from passes.plan.plan_data import TensorPlan
from passes.shard import UnitMismatch


def with_unused_weights(plan: Plan, graph: Graph, names: Collection[str], trains: Callable[[str], bool]) -> Plan:
    """A plan with frozen weights of ``graph`` that the step does not use: whole, with a pipeline on the first stage.

    Args:
        names: of the model's parameters and buffers; a graph has literals beside them.
    """
    unused = {
        state.path: TensorPlan(state.value.shape, state.value.dtype, (R,) * len(plan.mesh.names))
        for state in graph.states
        if state.path in names and state.path not in plan.states and not trains(state.path)
    }
    return dataclasses.replace(plan, states={**plan.states, **unused}) if unused else plan


def cut_with_weights(
    cut: Callable[[StepPrograms | None], StepPrograms],
    plan: Plan,
    first: StepPrograms | None,
    *,
    follows_plan: bool,
) -> StepPrograms:
    """Programs of a call of ``plan``: its operators are in the plan's groups, or where ``first`` has their weights.

    The second if the call's units are not the plan's (of a repeated layer that is unlike the others by now), if it uses
    a weight later than the plan's, and unless it ``follows_plan``.

    Args:
        cut: programs like others that are given, or by the plan's groups.
        first: programs of the plan's own training step; None while they are made.
    """
    if first is None:
        return cut(None)
    try:
        programs = cut(None if follows_plan else first)
    except UnitMismatch:
        programs = cut(first)
    if follows_plan and has_weights_elsewhere(programs, first):
        programs = cut(first)
    check_weights(programs, first, plan)
    return programs


def check_weights(programs: StepPrograms, like: StepPrograms, plan: Plan) -> None:
    """Raise ValueError, on all ranks alike, if a chunk uses weights that its stage does not have.

    Args:
        like: programs of the training step of ``plan``.
    """
    for stage, trained in zip(programs.stages, like.stages):
        trained_paths, used = map(_paths_of, (trained, stage))
        planned = {path: plan.states.get(path) for path in sorted(used - trained_paths)}
        unknown = [path for path, state in planned.items() if state is not None and state.trainable]
        if unknown:
            raise ValueError(
                f"this call uses {unknown[0]!r} in pipeline chunk {stage.index + 1}, which training does not: "
                "compile with example_inputs that use all weights that calls do, in the loss too if there is one (what "
                "it does not depend on is no part of a step), or plan with axis sizes alone (planner.compile(model, "
                "'dp=2'))"
            )
        elsewhere = [path for path, state in planned.items() if state is None and stage.index]
        if elsewhere:
            raise ValueError(
                f"this call uses the frozen {elsewhere[0]!r} in pipeline chunk {stage.index + 1}, but the first stage "
                "has it, as training does not use it: plan without a pipeline"
            )


def has_weights_elsewhere(programs: StepPrograms, like: StepPrograms) -> bool:
    """Whether a chunk uses weights that the same chunk of ``like`` does not."""
    return any(not _paths_of(stage) <= _paths_of(other) for stage, other in zip(programs.stages, like.stages))


def _paths_of(stage: StageGraph) -> set[str]:
    return {path for unit in stage.all_units for _, _, path in unit.states}
