"""Find the cheapest plan of a graph on a mesh."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from passes.blocks import find_blocks
from passes.ir.graph import Graph
from passes.ir.types import MeshShape
from passes.plan import Certificate, Plan
from passes.rules import forward_flops, rule_for
from planner.search.assignment import Assignment, complete, read_choices
from planner.search.extract import make_plan
from planner.search.ilp import ShardingIlp, build_ilp
from planner.search.lattice import Lattices
from planner.search.linear import Solution
from planner.search.options import FlopsOf, RuleFor
from planner.search.pricing import Prices, Pricing
from planner.search.problem import build_structure
from planner.search.solver import solve
from planner.search.space import fill_options


def search(
    graph: Graph,
    *,
    mesh: MeshShape,
    cost_model: Prices,
    cluster_info: Mapping[str, Any],
    memory_limit: float | None = None,
    constraints: Mapping[str, Mapping[str, Any]] | None = None,
    forbid_collectives: Collection[str] = (),
    forbid_replicated_matmul: bool = False,
    time_limit: float = 60.0,
    pinned: Plan | None = None,
    fold: bool = True,
    solver: str | None = None,
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
        constraints: pins by glob pattern, see ``planner.search.constraints``.
        forbid_collectives: collectives that must not be used (``"all_gather"``, …), forward or backward.
        forbid_replicated_matmul: every matmul must be cut by every axis, so that none is computed twice.
        time_limit: seconds for the solver; when it runs out the best plan so far is returned with its gap.
        pinned: keep the parameter placements of this plan, and its strategies where they are still possible.
        fold: solve repeated blocks once (turn off only to check that folding changes nothing).
        solver: ``"highs"`` or ``"cbc"``; None for the first that there is.
        rules, flops: the sharding rule and the forward flops of a node.

    Raises:
        ValueError: if no plan satisfies the constraints; the message names those that conflict.
    """
    pricing = Pricing(cost_model, mesh)
    problem = build_structure(graph, find_blocks(graph) if fold else ())
    fill_options(problem, pricing, rule_for=rules, flops_of=flops, divide_frozen=memory_limit is not None)
    lattices = Lattices(pricing, frozenset(forbid_collectives))
    ilp = build_ilp(problem, lattices, memory_limit=memory_limit)
    solution = solve(ilp.program, time_limit=time_limit, solver=solver)
    if solution.values is None:
        raise ValueError("no plan satisfies the constraints")
    assignment = complete(problem, read_choices(ilp, solution.values), lattices)
    assert assignment is not None
    return make_plan(
        problem,
        assignment,
        pricing,
        certificate=_certificate(ilp, solution, assignment),
        cluster=cluster_info,
        constraints=constraints or {},
    )


def _certificate(ilp: ShardingIlp, solution: Solution, assignment: Assignment) -> Certificate:
    objective = assignment.seconds
    bound = min(max(solution.bound, 0.0), objective)
    return Certificate(
        objective=objective,
        bound=bound,
        gap=(objective - bound) / objective if objective else 0.0,
        status=solution.status,
        solver=solution.solver,
        num_variables=ilp.program.num_variables,
        num_constraints=ilp.program.num_constraints,
    )
