"""Say why there is no plan: the constraints that conflict, and the smallest change that helps."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from planner.sharding_ilp.constraints import Constraint, apply_constraints
from planner.sharding_ilp.lattice import Lattices
from planner.sharding_ilp.sharding_prices import Pricing
from planner.sharding_ilp.sharding_problem import Problem
from planner.sharding_ilp.sharding_program import build_ilp
from planner.solvers.linear import SECOND
from planner.solvers.solver import solve

#: The solver's effort for each of the small problems solved to find the conflict.
EFFORT = 30 * SECOND


@dataclass(frozen=True)
class ShardingDemands:
    """Everything that a plan must respect, each part of which can be dropped."""

    constraints: tuple[Constraint, ...] = ()
    forbidden: tuple[str, ...] = ()
    memory_limit: float | None = None

    def parts(self) -> list[str]:
        """A text for each part, in the order of ``without``."""
        texts = [constraint.text for constraint in self.constraints]
        texts.extend(f"forbid_collectives={name!r}" for name in self.forbidden)
        if self.memory_limit is not None:
            texts.append(f"memory limit {format_bytes(self.memory_limit)}")
        return texts

    def keep(self, parts: Collection[str]) -> ShardingDemands:
        """The demands with only the named parts."""
        return ShardingDemands(
            tuple(constraint for constraint in self.constraints if constraint.text in parts),
            tuple(name for name in self.forbidden if f"forbid_collectives={name!r}" in parts),
            self.memory_limit if any(part.startswith("memory limit") for part in parts) else None,
        )


def format_bytes(count: float) -> str:
    """``1.7 GiB``."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def forbid_own_collectives(problem: Problem, collective: str) -> Constraint:
    """No operator may issue ``collective`` itself."""
    constraint = Constraint(f"forbid_collectives={collective!r}")
    for name, element in problem.elements.items():
        if any(option.collectives for option in element.options):
            constraint.add(name, lambda option: all(issued.collective != collective for issued in option.collectives))
    return constraint


def restricted(problem: Problem, demands: ShardingDemands) -> Problem | None:
    """The problem with only the options that ``demands`` allow; None if an element is left with none."""
    on_collectives = [forbid_own_collectives(problem, name) for name in demands.forbidden]
    options = apply_constraints(problem, [*demands.constraints, *on_collectives])
    if not all(options.values()):
        return None
    elements = {name: replace(element, options=options[name]) for name, element in problem.elements.items()}
    return replace(problem, elements=elements)


def infeasible(problem: Problem, demands: ShardingDemands, pricing: Pricing) -> ValueError:
    """The error to raise when no plan meets ``demands``: a smallest set that conflicts, and what would help."""
    conflict = demands.parts()
    for part in list(conflict):
        rest = [other for other in conflict if other != part]
        if not _is_feasible(problem, demands.keep(rest), pricing):
            conflict = rest
    advice = _advice(problem, demands, conflict, pricing)
    return ValueError(f"no plan satisfies {' together with '.join(conflict)}: {advice}")


def _advice(problem: Problem, demands: ShardingDemands, conflict: Sequence[str], pricing: Pricing) -> str:
    everything = demands.parts()
    helpful = []
    for part in conflict:
        rest = demands.keep([other for other in everything if other != part])
        if part.startswith("memory limit"):
            needed = least_memory(problem, rest, pricing)
            if needed is not None:
                helpful.append(f"it needs at least {format_bytes(needed)} on each device")
        elif _is_feasible(problem, rest, pricing):
            helpful.append(f"drop {part}")
    return " or ".join(helpful) if helpful else "dropping any one of them is not enough, there are further conflicts"


def least_memory(problem: Problem, demands: ShardingDemands, pricing: Pricing) -> float | None:
    """Least bytes that a plan takes under ``demands`` without their memory limit; None if no plan meets them."""
    restricted_problem = restricted(problem, demands)
    if restricted_problem is None:
        return None
    lattices = Lattices(pricing, frozenset(demands.forbidden))
    ilp = build_ilp(restricted_problem, lattices, memory_limit=None, minimise_memory=True)
    solution = solve(ilp.program, effort=EFFORT)
    if solution.values is None:
        return None
    return sum(cost * value for cost, value in zip(ilp.program.costs, solution.values))


def _is_feasible(problem: Problem, demands: ShardingDemands, pricing: Pricing) -> bool:
    if not demands.parts():
        return True
    if demands.memory_limit is not None:
        needed = least_memory(problem, demands, pricing)
        return needed is not None and needed <= demands.memory_limit
    restricted_problem = restricted(problem, demands)
    if restricted_problem is None:
        return False
    if not demands.forbidden:
        return True  # every type can be converted into every other
    ilp = build_ilp(restricted_problem, Lattices(pricing, frozenset(demands.forbidden)), memory_limit=None)
    ilp.program.costs = [0.0] * ilp.program.num_variables
    return solve(ilp.program, effort=EFFORT).values is not None
