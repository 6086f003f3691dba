"""Which weights calls use beside a training step's: in which chunk, and those that the step does not use at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping

from passes.ir.graph import Graph
from passes.ir.types import R
from passes.pipeline_cut import Deferral, StageGraph, StepPrograms, step_programs
from passes.plan import Plan
from passes.plan.plan_data import TensorPlan
from passes.shard import PlanMismatch, UnitMismatch
from runtime.execution.batch_split import BatchSplit, cut_batch, split_of
from runtime.execution.unit_table import stages_of

Stages = tuple[int, ...]
StagesOf = Mapping[str, Stages]


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


def cut_like(
    graph: Graph,
    plan: Plan,
    like: StepPrograms | None,
    split: BatchSplit,
    *,
    outputs: Collection[str] | None,
    deferral: Deferral | None = None,
) -> StepPrograms:
    """``step_programs`` with the batch in the pieces of ``split``."""
    return step_programs(
        graph,
        plan,
        num_microbatches=split.num_microbatches,
        batch_ranks=split.num_ranks,
        outputs=outputs,
        like=like,
        deferral=deferral,
    )


def cut_with_weights(
    cut: Callable[[StepPrograms | None], StepPrograms],
    plan: Plan,
    first: StepPrograms | None,
    *,
    follows_plan: bool,
    stages: StagesOf,
    names: Collection[str],
) -> StepPrograms:
    """Programs of a call of ``plan``: its operators are in the plan's groups, or where ``first`` has their weights.

    The second if the call's units are not the plan's (of a repeated layer that is unlike the others by now), if it uses
    a weight later than the plan's, and unless it ``follows_plan``.

    Args:
        cut: programs like others that are given, or by the plan's groups.
        first: programs of the plan's own training step; None while they are made.
        stages, names: see ``check_weights``.
    """
    if first is None:
        return cut(None)
    try:
        programs = cut(None if follows_plan else first)
    except UnitMismatch:
        programs = cut(first)
    if follows_plan and has_weights_elsewhere(programs, first):
        programs = cut(first)
    check_weights(programs, first, plan, stages=stages, names=names)
    return programs


def check_weights(
    programs: StepPrograms, like: StepPrograms, plan: Plan, *, stages: StagesOf, names: Collection[str]
) -> None:
    """Raise ValueError, on all ranks alike, if a chunk uses weights that its stage does not have.

    Args:
        like: programs of the training step of ``plan``.
        stages: pipeline ranks that have a weight which the training step does not use, by path.
        names: of the model's parameters and buffers; every rank has a call's literals.
    """
    trained = {path for stage in (*like.stages, *like.counting) for path in _paths_of(stage)}
    for stage, of_step in zip(programs.stages, like.stages):
        own_rank = plan.step.chunks[stage.index].rank
        for path in sorted((_paths_of(stage) - _paths_of(of_step)).intersection(names)):
            planned = plan.states.get(path)
            if path in trained and planned is not None and planned.trainable:
                raise ValueError(
                    f"this call uses {path!r} in pipeline chunk {stage.index + 1}, which training does not: compile "
                    "with example_inputs that use all weights that calls do, in the loss too if there is one, or plan "
                    "with axis sizes alone (planner.compile(model, 'dp=2'))"
                )
            if (planned is None or planned.trainable) and own_rank not in stages.get(path, (0,)):
                raise ValueError(
                    f"this call uses {path!r} in pipeline chunk {stage.index + 1}, but another stage has it, as "
                    "training does not use it: compile with example_inputs whose outputs depend on it, or plan without "
                    "a pipeline"
                )


def stages_beside_step(
    plan: Plan, for_call: Plan, graph: Graph, first: StepPrograms, names: Collection[str]
) -> dict[str, Stages]:
    """Pipeline ranks that have a weight which the outputs of a step's own call depend on, but the step does not.

    Args:
        for_call: ``plan`` with such weights that are frozen.
        first: programs of the training step of ``plan`` and ``graph``.
        names: of the model's parameters and buffers.
    """
    used = stages_of(plan, first)
    if len(plan.step.chunks) == 1 or all(state.path in used for state in graph.states if state.path in names):
        return {}

    def cut(split: BatchSplit) -> StepPrograms:
        return cut_like(graph, for_call, first, split, outputs=graph.outputs)

    try:
        programs, _ = cut_batch(plan, split_of(graph, plan, training=False), cut)
    except PlanMismatch:  # operators that the step leaves out, of which the plan knows nothing
        return {}
    return {path: stages for path, stages in stages_of(plan, programs).items() if path not in used}


def has_weights_elsewhere(programs: StepPrograms, like: StepPrograms) -> bool:
    """Whether a chunk uses weights that the same chunk of ``like`` does not."""
    return any(not _paths_of(stage) <= _paths_of(other) for stage, other in zip(programs.stages, like.stages))


def _paths_of(stage: StageGraph) -> set[str]:
    return {path for unit in stage.all_units for _, _, path in unit.states}
