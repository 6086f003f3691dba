"""Find the cheapest plan of a graph on a mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from passes.ir.conversions import COLLECTIVES
from passes.ir.graph import Graph
from passes.ir.types import MeshShape
from passes.plan import Certificate, Plan
from passes.repeats.repeated_blocks import BlockRun, find_blocks
from passes.rules import forward_flops, rule_for
from planner.sharding_ilp.assignment import Assignment, complete, read_choices, used_steps, whole_choices
from planner.sharding_ilp.bundles import bundles_of
from planner.sharding_ilp.constraints import (
    cut_every_matmul,
    foldable_runs,
    folded_as,
    keep_plan,
    match,
    user_constraints,
)
from planner.sharding_ilp.explain import ShardingDemands, infeasible, restricted
from planner.sharding_ilp.folding import Solved, best_folding, unfolded_bound
from planner.sharding_ilp.lattice import Lattices
from planner.sharding_ilp.options import FlopsOf, OperatorChoices, RuleFor
from planner.sharding_ilp.plan_of_assignment import make_plan
from planner.sharding_ilp.program_files import write_sharding_program
from planner.sharding_ilp.role_restrictions import alike, baseline_named, restrict, roles
from planner.sharding_ilp.sharding_prices import Prices, Pricing
from planner.sharding_ilp.sharding_problem import Problem, build_structure
from planner.sharding_ilp.sharding_program import ShardingIlp, build_ilp
from planner.sharding_ilp.space import fill_options
from planner.solvers.limits import Limits
from planner.solvers.linear import OPTIMAL, LinearSolution
from planner.solvers.nearly_integral import solve_nearly_integral
from planner.solvers.pulp_solver import solver_named
from planner.solvers.solver import solve

#: Variables of a program from which on its relaxation is solved first.
LARGE = 100_000

Demanded = Mapping[str, Mapping[str, Any]]


def search(
    graph: Graph,
    *,
    mesh: MeshShape,
    cost_model: Prices,
    cluster_info: Mapping[str, Any],
    memory_limit: float | None = None,
    constraints: Demanded | None = None,
    forbid_collectives: Collection[str] = (),
    forbid_replicated_matmul: bool = False,
    time_limit: float | None = None,
    pinned: Plan | None = None,
    fold: bool = True,
    solver: str | None = None,
    write_lp: str | Path | None = None,
    baseline: str | None = None,
    rules: RuleFor = rule_for,
    flops: FlopsOf = forward_flops,
) -> Plan:
    """Choose a sharding of every operator and parameter of ``graph`` that takes least time, forward and backward.

    Args:
        graph: what to plan.
        mesh: the mesh axes and their sizes.
        cost_model: prices of compute and collectives on that mesh.
        cluster_info: the cluster as plain data, recorded in the plan.
        memory_limit: bytes that a device may hold; None for no bound.
        constraints: pins by glob pattern, see ``planner.sharding_ilp.constraints``.
        forbid_collectives: collectives that must not be used (``"all_gather"``, …), forward or backward.
        forbid_replicated_matmul: every matmul must be cut by every axis, so that none is computed twice.
        time_limit: seconds for the solver; when it runs out the best plan so far is returned with its gap. None: an
            effort of about 90 s, which ends at the same point on every machine (``planner.solvers.limits``).
        pinned: keep the parameter placements of this plan, and its strategies where they are still possible.
        fold: solve repeated blocks once, or a few copies as one where that is better, see
            ``planner.sharding_ilp.folding``.
        solver: who solves the program: ``"HiGHS"`` (None), or another that PuLP can call here (``"CBC"``, …).
        write_lp: an LP file to write the plan's program to, in microseconds.
        baseline: only plans of this kind, see ``planner.sharding_ilp.role_restrictions``.
        rules, flops: the sharding rule and the forward flops of a node.

    Raises:
        ValueError: if no plan satisfies the constraints, and the message names those that conflict; for a solver that
            is not installed.
    """
    solver, limits = solver_named(solver), Limits.of(time_limit)
    pricing = Pricing(cost_model, mesh, bundles_of(graph))
    pins = constraints or {}
    layers = roles(graph) if baseline is not None else {}
    offers = OperatorChoices(graph.values, rule_for=rules, flops_of=flops)
    forbidden = _collectives(forbid_collectives)
    lattices = Lattices(pricing, frozenset(forbidden))

    def posed(runs: tuple[BlockRun, ...]) -> tuple[Problem, ShardingDemands]:
        problem = build_structure(
            graph,
            runs,
            mesh,
            pinned_outputs=_pinned_outputs(graph, mesh, pins),
            pinned_states={} if pinned is None else {path: each.placement for path, each in pinned.states.items()},
        )
        bound_frozen = memory_limit is not None or bool(pins) or baseline is not None or pinned is not None
        fill_options(problem, pricing, offers=offers, bound_frozen=bound_frozen)
        demanded = user_constraints(problem, mesh, pins)
        if forbid_replicated_matmul:
            demanded.append(cut_every_matmul(problem, mesh))
        if pinned is not None:
            demanded.append(keep_plan(problem, pinned))
        if baseline is not None:
            demanded.extend(restrict(problem, baseline_named(baseline), layers))
        return problem, ShardingDemands(tuple(demanded), forbidden, memory_limit)

    def solve_folded(runs: tuple[BlockRun, ...], limits: Limits) -> Solved | None:
        restricted_problem = restricted(*posed(runs))
        if restricted_problem is None:
            return None
        return _solve(restricted_problem, lattices, memory_limit=memory_limit, limits=limits, solver=solver)

    runs = foldable_runs(graph, find_blocks(graph), tuple(pins)) if fold else ()
    if pinned is not None:
        runs = folded_as(runs, graph, pinned)
    runs = alike(runs, layers)
    solved = solve_folded(runs, limits)
    if solved is None:
        raise infeasible(*posed(runs), pricing)
    runs = solved.ilp.problem.runs
    if runs:
        bound = unfolded_bound(solved.ilp, lattices, memory_limit=memory_limit, limits=limits)
        solved = dataclasses.replace(solved, bound=bound)
    if runs and pinned is None and baseline is None:
        solved = best_folding(solved, runs, solve_folded, limits=limits)
    if write_lp is not None:
        write_sharding_program(solved.ilp, write_lp)
    return make_plan(
        solved.ilp.problem,
        solved.assignment,
        pricing,
        certificate=_certificate(
            solved,
            demands={
                "memory_limit": memory_limit,
                "forbid_collectives": list(forbidden),
                "forbid_replicated_matmul": forbid_replicated_matmul,
                "fold": fold,
            }
            if pinned is None and baseline is None and rules is rule_for and flops is forward_flops
            else {},
        ),
        cluster=cluster_info,
        constraints=pins,
        memory_limit=memory_limit,
    )


def _pinned_outputs(graph: Graph, mesh: MeshShape, pins: Demanded) -> dict[str, tuple[bool, ...]]:
    """For each output that a pin names, on which axes it may be other than whole (the loss on none)."""
    free_axes: dict[str, tuple[bool, ...]] = {}
    for pattern, by_axis in pins.items():
        for path in match(graph, pattern).outputs:
            so_far = free_axes.get(path, (False,) * len(mesh.names))
            beside_loss = graph.loss is not None
            free_axes[path] = tuple(
                path != graph.loss and (was or beside_loss or name in by_axis) for was, name in zip(so_far, mesh.names)
            )
    return free_axes


def _collectives(names: Collection[str]) -> tuple[str, ...]:
    listed = (names,) if isinstance(names, str) else tuple(names)
    unknown = [name for name in listed if name not in COLLECTIVES]
    if unknown:
        raise ValueError(f"unknown collective {unknown[0]!r} in forbid_collectives: expected {', '.join(COLLECTIVES)}")
    return tuple(dict.fromkeys(listed))


def _solve(
    problem: Problem, lattices: Lattices, *, memory_limit: float | None, limits: Limits, solver: str
) -> Solved | None:
    """The program, its solution and what that decides; None if it is infeasible.

    A memory limit makes the program much harder, and often does not bind: the optimum without it is the optimum with
    it if it fits.
    """
    for limit in (None,) if memory_limit is None else (None, memory_limit):
        ilp = build_ilp(problem, lattices, memory_limit=limit)
        # A limit on memory makes it fractional; of equal plans presolve leaves the plainer, which takes long if large
        relax_first = limit is None and ilp.program.num_variables > LARGE
        solve_program = solve_nearly_integral if relax_first else solve
        effort = limits.effort_on(ilp.program)
        solution = solve_program(ilp.program, time_limit=limits.seconds, effort=effort, solver=solver)
        if solution.infeasible:
            return None
        if limit == memory_limit:
            return Solved(ilp, solution, _assignment(ilp, solution, lattices, limit, limits), solution.bound)
        if solution.status == OPTIMAL and solution.values is not None:
            assignment = _assignment(ilp, solution, lattices, None, limits)
            if memory_limit is not None and assignment.memory <= memory_limit:
                return Solved(ilp, solution, assignment, solution.bound)
    return None


def _assignment(
    ilp: ShardingIlp, solution: LinearSolution, lattices: Lattices, memory_limit: float | None, limits: Limits
) -> Assignment:
    """The solver's choices, or if it found none within its limits, everything whole, or else any plan there is."""
    limit = float("inf") if memory_limit is None else memory_limit * (1 + 1e-9)
    if solution.values is not None:
        choices = read_choices(ilp, solution.values)
        assignment = complete(ilp.problem, choices, lattices)
        if assignment is not None and assignment.memory > limit:
            assignment = complete(ilp.problem, choices, lattices, allowed=used_steps(ilp, solution.values))
        assert assignment is not None  # the flows are a way to do every conversion
        return assignment
    assignment = complete(ilp.problem, whole_choices(ilp.problem), lattices)
    if assignment is not None and assignment.memory <= limit:
        return assignment
    program = dataclasses.replace(ilp.program, costs=[0.0] * ilp.program.num_variables)
    longer = limits.times(10)
    anything = solve(program, time_limit=max(60.0, longer.seconds), effort=longer.effort_on(program))
    if anything.values is None:
        raise ValueError(f"no plan was found in {limits}: give a longer time_limit, or loosen the constraints")
    return _assignment(ilp, anything, lattices, memory_limit, limits)


def _certificate(solved: Solved, *, demands: dict[str, Any]) -> Certificate:
    program, solution, objective = solved.ilp.program, solved.solution, solved.assignment.seconds
    bound = min(max(solved.bound, 0.0), objective)
    return Certificate(
        objective=objective,
        bound=bound,
        gap=(objective - bound) / objective if objective else 0.0,
        status=solved.status,
        solver=solution.solver,
        num_variables=program.num_variables,
        num_constraints=program.num_constraints,
        demands=demands,
    )
