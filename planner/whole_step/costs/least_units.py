r"""Units at the least that any sharding of a cut takes: stage problems whose optimum bounds all shardings at once.

A candidate on unequal devices has one sharding s for all stages, and a unit u on a rank of the kinds d takes t(u,d,s)
seconds of a micro-batch there, forward and backward, as the sharding ILP counts them. The program of the cut at the
prices of d, with the costs of all other units left out (``least_of_units``), gives

    W(u,d) = min_s t(u,d,s)                                                                              (least of unit)

All shardings that a plan may have are feasible in it, each at no more than its own t(u,d,s), so W is right whatever the
sharding; each unit and each kind may have another one, which no plan may. What is beside t is bounded by the undivided
model in as many parts n as the axes cp·tp·ep make: one of n equal parts takes and holds at least 1/n
(``planner.whole_step.costs.candidate_bounds``). In the problem of ``least_runs`` a unit has the choices of recompute
and ZeRO that a plan has, with

    forward = 0                           what recomputes and accumulates: at least 1/n of the undivided
    backward = W(u,d) + what recomputes   saved, peak, entering bytes and buffers: the same
    gather forward = 0                    parameters of 1/tp (of experts 1/ep): state, gathers, reductions, the update
    gather backward = both gathers        conversions that are done again, slower computing beside a collective: 0

Its optimum is no more than that of any sharding under 1F1B and GPipe, with whole backward passes and one chunk a rank:

1. Bytes are no more on any rank, so that every assignment within memory is within it here.
2. Let a unit take F = forward ∨ gather, B = backward ∨ (gather + reduce) of a micro-batch (∨: the larger). Loads and
   fill take F + B alone; moving F into B, and its gather with it, changes no load, and in every row of the tail
   (``planner.pipeline_ilp.stage_ilp``) adds the gather, which is at most F, and takes off F, or less where it is not in
   that row. What waits, gathers and reductions less B, does not grow either.
3. F + B ≥ W(u,d) + what recomputes, and ≥ the sum of its gathers and reductions. Taking seconds off B shortens the step
   by at least nothing: a second of B prolongs the fill by one and shortens the tail by at most one.
4. The other figures are no more, and the step falls with none of them.

Under ZB-H1, which splits backward passes, B = (backward - weight ∨ gather) + (weight ∨ reduction), or backward ∨
reduction where nothing is gathered. F + B is at least what 3 says there, too, and is all that loads take. So a unit has
that as its backward, communicates nothing, so that there is no tail, and has as many seconds of weight gradients and
more than can be received, so that no chunk fills more than it receives: a step of m·L, that and the update, no more
than any sharding's.

Where activations go to the host, a unit takes at least as long as they do; that is the larger of both, not the sum. So
is, on devices whose host is priced, the time in which that launches the unit's operators, as many under any sharding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cost_models.step import LayerCosts
from passes.repeats.model_units import ModelUnit, unit_of_nodes
from planner.pipeline_ilp.stage_problem import UnitRun
from planner.solvers.nearly_integral import solve_nearly_integral
from planner.whole_step.candidates.mesh_layout import MeshLayout
from planner.whole_step.costs.stream_units import unit_of_stream
from planner.whole_step.costs.unit_choices import StageSetting, unit_runs
from planner.whole_step.costs.unit_figures import Policy, UnitFigures, Weight

if TYPE_CHECKING:
    from planner.whole_step.costs.sharding import Shardings

#: What a solver's bound may be above the optimum.
TOLERANCE = 1e-7


def least_of_units(shardings: Shardings, units: Sequence[ModelUnit]) -> tuple[float, ...]:
    """(least of unit): seconds of one copy of each unit that no sharding beats."""
    program = shardings.ilp.program
    least = []
    for costs in _costs_of_units(shardings, units):
        if not any(costs):
            least.append(0.0)
            continue
        solution = solve_nearly_integral(replace(program, costs=costs), solver=shardings.solver)
        least.append(max(0.0, solution.bound * (1.0 - TOLERANCE)))
    return tuple(least)


def _costs_of_units(shardings: Shardings, units: Sequence[ModelUnit]) -> list[list[float]]:
    """For each unit the costs of the program's variables that count for one copy of it.

    Rows that several linear layers exchange together count for nothing.
    """
    ilp, problem, unit_of = shardings.ilp, shardings.problem, unit_of_nodes(units)
    by_unit = [[0.0] * ilp.program.num_variables for _ in units]
    for name, columns in ilp.x.items():
        if name in unit_of:
            for column, option in zip(columns, problem.elements[name].options, strict=True):
                by_unit[unit_of[name]][column] = sum(option.compute) if option.sent else option.seconds
    for name in ilp.lattices:
        unit = unit_of_stream(units, unit_of, problem.streams[name])
        if unit is not None:
            for column in (column for columns in ilp.arcs(name) for column in columns):
                by_unit[unit][column] = ilp.program.costs[column] / units[unit].count
    return by_unit


def undivided_share(figures: UnitFigures, layout: MeshLayout) -> float:
    """Seconds of one copy of a unit that no sharding beats, from the undivided one; less than W, without a program."""
    return sum(figures.compute) / layout.num_parts


def least_runs(
    undivided: Sequence[UnitFigures], seconds: Sequence[float], setting: StageSetting
) -> tuple[UnitRun, ...]:
    """The chain of units on one kind of stage, each with all its choices at the least that any sharding makes of them.

    Args:
        undivided: figures of the units on it if only the batch is divided.
        seconds: W of a copy of each unit there.
    """
    if "regather" in setting.recompute:  # undivided there is nothing to gather again
        setting = replace(setting, recompute=frozenset((*setting.recompute, "none")))
    parts = [_parts(figures, setting.layout) for figures in undivided]
    runs = unit_runs(parts, replace(setting, host_seconds=0.0))
    launched = [setting.host_seconds * sum(figures.launches) for figures in undivided]
    return tuple(
        replace(
            run,
            choices=tuple(
                replace(choice, costs=_with_seconds(choice.costs, least, launched=of_host)) for choice in run.choices
            ),
        )
        for run, least, of_host in zip(runs, seconds, launched, strict=True)
    )


def _parts(figures: UnitFigures, layout: MeshLayout) -> UnitFigures:
    """One part of a unit, without the seconds of its operators and conversions."""
    parts = layout.num_parts
    return replace(
        figures,
        compute=(0.0, 0.0),
        communication=(0.0, 0.0),
        weight_backward=0.0,
        policies=tuple(_policy_of_part(policy, parts) for policy in figures.policies),
        weights=tuple(_weight_of_part(weight, layout) for weight in figures.weights),
        buffer_bytes=figures.buffer_bytes / parts,
        entering_bytes=figures.entering_bytes / parts,
        returning_bytes=figures.returning_bytes / parts,
    )


def _policy_of_part(policy: Policy, parts: int) -> Policy:
    return replace(
        policy,
        compute=policy.compute / parts,
        communication=0.0,
        saved_bytes=policy.saved_bytes / parts,
        peak_bytes=policy.peak_bytes / parts,
        host_bytes=policy.host_bytes / parts,
    )


def _weight_of_part(weight: Weight, layout: MeshLayout) -> Weight:
    parts = layout.tensor * (layout.expert if weight.expert else 1)
    return replace(weight, elements=weight.elements // parts)


def _with_seconds(costs: LayerCosts, seconds: float, *, launched: float) -> LayerCosts:
    """``costs`` of a choice without operators and conversions, with the least ``seconds`` of those, as in 2 and 3;
    ``launched``: in which the host launches the operators."""
    beside = costs.forward + costs.backward
    longest = max(seconds, beside) if costs.host_bytes else seconds + beside
    return replace(
        costs,
        forward=0.0,
        backward=max(longest, launched),
        backward_weight=0.0,
        gather_forward=0.0,
        gather_backward=costs.gather_forward + costs.gather_backward,
    )


def split_runs(by_kinds: Mapping[frozenset[int], tuple[UnitRun, ...]]) -> dict[frozenset[int], tuple[UnitRun, ...]]:
    """The chains of ``least_runs`` on all kinds of stages, for a schedule that splits backward passes."""
    received = max(run.receive_forward + run.receive_backward for runs in by_kinds.values() for run in runs)
    return {
        stage: tuple(
            replace(run, choices=tuple(replace(each, costs=_split(each.costs, received)) for each in run.choices))
            for run in runs
        )
        for stage, runs in by_kinds.items()
    }


def _split(costs: LayerCosts, received: float) -> LayerCosts:
    longest = max(costs.backward, costs.gather_backward + costs.reduce_backward)
    nothing = dict.fromkeys(("gather_backward", "reduce_backward", "reduce_step"), 0.0)
    return replace(costs, backward=longest, backward_weight=longest + received, **nothing)
