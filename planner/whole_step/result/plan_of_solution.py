"""Turn a solution of the step search into a Plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from cost_models import Cluster
from cost_models.memory import StateBytes
from cost_models.memory_interval import memory_interval
from cost_models.schedules import rank_of_chunk
from cost_models.simulator import StepReport, simulate
from cost_models.step import PipelineStep
from cost_models.step_interval import step_interval
from cost_models.step_time import peak_in_flight, step_memory, step_seconds
from passes.ir.types import MeshShape
from passes.plan import Certificate, Plan
from passes.plan.step_plan import Alternative, ChunkPlan, GroupPlan, RankMemory, StageDevice, StepCosts, StepPlan
from passes.rules.rule import INVARIANT, REPLICATE
from planner.pipeline_ilp.stage_problem import ROUNDING, as_step
from planner.sharding_ilp.model_figures import compute_dtype, model_flops
from planner.sharding_ilp.plan_of_assignment import make_plan
from planner.solvers.linear import EFFORT_LIMIT, OPTIMAL, UNPROVED
from planner.solvers.pulp_solver import solver_text
from planner.whole_step.best_first import Search
from planner.whole_step.candidates.demands import recorded, recorded_offload
from planner.whole_step.costs.step_prices import CONTEXT, TENSOR
from planner.whole_step.costs.unit_choices import seconds_by_cause, state_bytes, with_tied_copies
from planner.whole_step.result.outcome import Outcome, StepSolution
from planner.whole_step.result.step_collectives import step_collectives

#: What a certificate says whose bound is of plans that split all copies of a repeated block alike.
ALIKE = " with alike copies"
#: What it says where the search has ended, but the simulator has what is nearer to the bound slower than the plan.
SEARCHED = "searched to the end"


@dataclasses.dataclass(frozen=True)
class Judged:
    """A solution with its step played by the simulator."""

    solution: StepSolution
    step: PipelineStep
    report: StepReport


def judge(solution: StepSolution) -> Judged:
    step = as_step(solution.problem, solution.assignment)
    return Judged(solution, step, simulate(step))


def extract(
    search: Search,
    outcome: Outcome,
    best: Judged,
    others: list[Judged],
    *,
    cluster: Cluster,
    constraints: Mapping[str, Any],
) -> Plan:
    """The plan of ``best``; ``others`` are its runners-up."""
    solution, candidate = best.solution, best.solution.candidate
    sharded = search.in_plan(candidate, solution.sharded)
    certificate = Certificate(
        objective=solution.seconds,
        bound=float(min(outcome.proved, solution.seconds)),
        gap=float(max(0.0, (solution.seconds - outcome.proved) / solution.seconds)) if solution.seconds else 0.0,
        status=outcome.status + (ALIKE if _splits_copies_alike(search) else ""),
        solver=f"best first over candidates, {solver_text(search.demands.solver)} for shardings and stages",
        num_variables=solution.stages.num_variables,
        num_constraints=solution.stages.num_constraints,
        demands=recorded(search.demands),
    )
    variant = sharded.variant
    plan = make_plan(
        variant.problem,
        variant.assignment,
        variant.pricing,
        certificate=certificate,
        cluster=cluster.to_dict(),
        constraints=dict(constraints),
        step=_step_plan(search, outcome, best, others, cluster),
    )
    layout = candidate.layout
    mesh = MeshShape(variant.cut.mesh.names, tuple(layout.sizes[axis] for axis in variant.cut.mesh.names))
    notes = (*plan.notes, *_uncalibrated(cluster), *_unequal(search, cluster), *_open(certificate))
    plan = dataclasses.replace(plan, mesh=mesh, notes=(*notes, *_computing_the_same(plan, mesh)))
    return dataclasses.replace(plan, collectives=step_collectives(search.level_one.space.graph, plan))


def with_bound(plan: Plan, bound: float) -> Plan:
    """A plan whose certificate has another lower bound, in seconds."""
    objective = plan.certificate.objective
    gap = max(0.0, (objective - bound) / objective) if objective else 0.0
    return dataclasses.replace(
        plan, certificate=dataclasses.replace(plan.certificate, bound=min(bound, objective), gap=gap)
    )


def continued(plan: Plan, before: Certificate, *, bound: float) -> Plan:
    """A plan of a search that went on from one whose certificate is ``before``, a limit of which counts for both."""
    status = plan.certificate.status if before.status.startswith(OPTIMAL) else before.status
    certificate = dataclasses.replace(plan.certificate, status=status)
    return with_bound(dataclasses.replace(plan, certificate=certificate), bound)


def proved_as(plan: Plan, before: Certificate) -> Plan:
    """A plan that a search of some candidates found, under what a search of all was asked for, and what both prove."""
    bound = min(before.bound, plan.certificate.bound)
    certificate = dataclasses.replace(plan.certificate, status=before.status, demands=before.demands)
    return with_bound(dataclasses.replace(plan, certificate=certificate), bound)


def searched_if_open(plan: Plan, *, gap: float, gave_up: bool = False) -> Plan:
    """A plan that is not called optimal if its gap is larger than ``gap``: on equal devices the simulator chose it.

    Args:
        gave_up: whether the search left programs whose bounds did not rise, so that faster plans may be there.
    """
    certificate = plan.certificate
    if plan.step.stage_devices or certificate.gap <= gap * (1.0 + ROUNDING):
        return plan
    if not certificate.status.startswith(OPTIMAL):
        return plan
    status = EFFORT_LIMIT if gave_up else SEARCHED
    certificate = dataclasses.replace(certificate, status=status + certificate.status.removeprefix(OPTIMAL))
    if gave_up:
        return dataclasses.replace(plan, certificate=certificate)
    note = "the objective has faster plans, down to the bound; the simulator has those that were found slower than this"
    return dataclasses.replace(plan, certificate=certificate, notes=(*plan.notes, note))


def unproved_if_open(plan: Plan, *, gap: float) -> Plan:
    """A plan that is not called optimal if its gap is larger than ``gap``."""
    certificate = plan.certificate
    if certificate.gap <= gap * (1.0 + ROUNDING) or not certificate.status.startswith(OPTIMAL):
        return plan
    status = UNPROVED + certificate.status.removeprefix(OPTIMAL)
    certificate = dataclasses.replace(certificate, status=status)
    return dataclasses.replace(plan, certificate=certificate, notes=(*plan.notes, *_open(certificate)))


def _open(certificate: Certificate) -> Iterator[str]:
    """What there is to say of a search that ended by itself before its gap was closed: on unequal devices alone."""
    if certificate.status.startswith(UNPROVED):
        yield (
            "not every way to split operators was tried on devices that differ: another may be faster, down to the "
            "bound, which holds for all"
        )


def _unequal(search: Search, cluster: Cluster) -> Iterator[str]:
    """What there is to say of unequal devices: which ranks have which."""
    if not cluster.has_unequal_devices:
        return
    first, ranks = 0, []
    for group in cluster.groups:
        ranks.append(f"ranks {first}–{first + group.count - 1} on {group.device.name}")
        first += group.count
    yield f"start the processes in this order: {', '.join(ranks)}; costs of one micro-batch are the slowest device's"


def _computing_the_same(plan: Plan, mesh: MeshShape) -> Iterator[str]:
    """What there is to say of axes on which nothing is cut, since what that sends takes longer than it saves."""
    for place, (axis, size) in enumerate(mesh.as_dict().items()):
        if size > 1 and {node.strategy[place] for node in plan.nodes.values()} <= {REPLICATE, INVARIANT}:
            yield f"no operator is cut on {axis}: its {size} ranks compute the same, in the time that one of them takes"


def _splits_copies_alike(search: Search) -> bool:
    """Whether the search leaves out plans that split the copies of a block in different ways."""
    one_way = all(search.demands.fixed.get(axis) == {1} for axis in (CONTEXT, TENSOR))
    return bool(search.level_one.space.runs) and search.cluster.num_devices > 1 and not one_way


def _uncalibrated(cluster: Cluster) -> tuple[str, ...]:
    """What there is to say of devices whose operators are priced at their peak."""
    names = dict.fromkeys(group.device.name for group in cluster.groups if not group.device.efficiency)
    return tuple(
        f"{name} has no efficiency curves: its operators are priced at their peak, so the step is shorter and its "
        "utilisation higher than any real one"
        for name in names
    )


def _step_plan(search: Search, outcome: Outcome, best: Judged, others: list[Judged], cluster: Cluster) -> StepPlan:
    candidate, demands = best.solution.candidate, search.demands
    costs = _costs(search, best)
    is_trained = search.level_one.space.graph.training
    counts = {**outcome.counts, "shardings searched": search.level_one.solved}
    chunks = _chunks(search, best)
    divides = any(group.zero for chunk in chunks for group in chunk.groups)
    step = StepPlan(
        axes=dict(candidate.layout.sizes),
        global_batch=search.level_one.global_batch,
        local_batch=candidate.local_batch,
        num_microbatches=candidate.num_microbatches,
        schedule=candidate.schedule if candidate.layout.pipeline > 1 else "none",
        chunks_per_rank=candidate.chunks_per_rank,
        chunks=chunks,
        optimizer=demands.training.optimizer,
        gradient_dtype=demands.training.gradient_dtype or "",
        zero_ranks=candidate.layout.zero_ranks if divides else 0,
        offload=recorded_offload(demands),
        compiled=demands.compiled,
        overlap_tensor=demands.overlap_tensor,
        costs=costs,
        memory=memory_by_rank(search, best.solution, best.step),
        memory_limit=max([limit for _, limit in search.device_limits(candidate)], default=search.memory),
        headroom=demands.headroom,
        forward_passes=search.level_one.forward_passes(candidate.num_microbatches),
        stage_devices=tuple(StageDevice(*each) for each in search.device_limits(candidate)),
        interval=step_interval(costs.simulated, cluster.groups, cluster.profile) if is_trained else None,
        search={name: int(count) for name, count in sorted(counts.items())},
        alternatives=tuple(map(alternative_of, others)),
    )
    if not is_trained:
        return step
    fullest = step.memory[step.fullest_rank].total
    return dataclasses.replace(step, memory_interval=memory_interval(fullest, cluster.groups))


def _chunks(search: Search, best: Judged) -> tuple[ChunkPlan, ...]:
    problem, assignment = best.solution.problem, best.solution.assignment
    on_ranks = search.on_ranks(best.solution.candidate, best.solution.sharded)
    num_done = [0] * len(problem.runs)
    chunk_plans = []
    for chunk, groups in enumerate(assignment):
        plans, parts = [], []
        prices = on_ranks[problem.ranks[chunk]]
        for run, choice, count in groups:
            recompute, zero = problem.runs[run].choices[choice].label
            first = _unit_name(best, run, num_done[run])
            plans.append(GroupPlan(first, num_done[run], count, recompute, _zero_stage((recompute, zero))))
            num_done[run] += count
            parts.append(seconds_by_cause(prices.figures_on_rank[run], (recompute, zero), prices.setting))
        rank = rank_of_chunk(problem.schedule, chunk, num_ranks=problem.num_ranks, num_chunks=problem.num_chunks)
        chunk_plans.append(ChunkPlan(rank, tuple(plans), best.step.chunks[chunk], tuple(parts)))
    return tuple(chunk_plans)


def _unit_name(best: Judged, run: int, copy: int) -> str:
    """Module path of one copy of a unit."""
    unit = best.solution.sharded.figures[run].unit
    if unit.run is None:
        return unit.name
    return " ".join(best.solution.sharded.variant.problem.runs[unit.run].roots[copy])


def _costs(search: Search, best: Judged) -> StepCosts:
    seconds = step_seconds(best.step)
    report = best.report
    flops = model_flops(search.level_one.space.graph)
    cluster = search.cluster
    dtype = compute_dtype(search.level_one.space.graph)
    peak = cluster.peak_flops(dtype)
    return StepCosts(
        seconds=seconds.total,
        pipeline=seconds.pipeline,
        tail=seconds.tail,
        update=seconds.update,
        simulated=report.seconds,
        bubble=max(rank.bubble_fraction for rank in report.ranks),
        exposed=max(rank.exposed_seconds for rank in report.ranks) / report.seconds if report.seconds else 0.0,
        flops=flops,
        utilisation=flops / (report.seconds * peak) if report.seconds and peak else 0.0,
        samples_per_second=search.level_one.global_batch / report.seconds if report.seconds else 0.0,
    )


def memory_by_rank(search: Search, solution: StepSolution, step: PipelineStep) -> tuple[RankMemory, ...]:
    """Bytes of every rank by part: what the step's memory says, with the state told apart.

    A parameter that several units use is counted on every rank that has one of them, once.
    """
    problem, assignment = solution.problem, solution.assignment
    totals = step_memory(step)
    flight, flight_on_host = peak_in_flight(step), peak_in_flight(step, "host_bytes")
    setting = search.setting(solution.candidate)
    figures = with_tied_copies(solution.sharded.figures)
    rank_memories = []
    for rank, total in enumerate(totals):
        states, activations, tied = [0.0, 0.0, 0.0, 0.0], 0.0, set[str]()
        for chunk, groups in enumerate(assignment):
            if problem.ranks[chunk] != rank:
                continue
            for run, choice, count in groups:
                option = problem.runs[run].choices[choice]
                weights = tuple(weight for weight in figures[run].weights if weight.path not in tied)
                tied.update(weight.path for weight in weights if len(weight.uses) > 1)
                held = dataclasses.replace(figures[run], weights=weights)
                parts = state_bytes(held, _zero_stage(option.label), setting)
                states = [before + count * part for before, part in zip(states, _by_part(parts))]
                activations += count * option.costs.saved_bytes * flight[chunk]
                states[3] += count * option.costs.host_bytes * flight_on_host[chunk]
        parameters, gradients, optimizer, on_host = states
        transient = max(0.0, total - (parameters + gradients + optimizer) - activations)
        rank_memories.append(RankMemory(parameters, gradients, optimizer, activations, transient, on_host))
    return tuple(rank_memories)


def _zero_stage(label: tuple[str, ...]) -> int:
    return int(label[1].removeprefix("zero-"))


def _by_part(parts: StateBytes) -> tuple[float, float, float, float]:
    return parts.parameters, parts.gradients, parts.optimizer, parts.host


def alternative_of(judged: Judged) -> Alternative:
    """A solution as a runner-up of another plan."""
    solution = judged.solution
    labels = sorted(
        {
            " ".join(solution.problem.runs[run].choices[choice].label)
            for groups in solution.assignment
            for run, choice, _ in groups
        }
    )
    what = f"{solution.candidate}; {', '.join(labels)}"
    return Alternative(what, solution.seconds, judged.report.seconds, max(step_memory(judged.step)))
