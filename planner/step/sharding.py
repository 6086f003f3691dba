"""Level 1: for one way to cut batch, sequence and tensors, how every operator is split.

The batch axis is followed (``planner.step.following``); the context axis is searched alone, with weights whole on it;
the tensor axis is then searched by the sharding ILP (``planner.search.ilp``) given both. Weighing bytes against seconds
gives several undominated *variants*: the fastest, and ones that keep less for the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from passes.blocks import BlockRun, find_blocks
from passes.ir.graph import Graph
from passes.ir.types import MeshShape
from passes.rules import forward_flops, rule_for
from planner.search.assignment import Assignment, complete, read_choices
from planner.search.constraints import Constraint, apply_constraints
from planner.search.ilp import build_ilp
from planner.search.lattice import Lattices
from planner.search.problem import Problem, build_structure
from planner.search.solver import solve
from planner.search.space import Roles, fill_options
from planner.step.following import Followed, follow_batch
from planner.step.pricing import CONTEXT, DATA, STATE_AXES, TENSOR, Fusion, StepPricing, state_derived

#: Seconds that a byte is worth when looking for variants, as a share of (seconds of the fastest / its bytes).
BYTE_WEIGHTS = (0.0, 0.25)
#: Seconds for one sharding ILP; they take milliseconds.
ILP_SECONDS = 10.0


@dataclass(frozen=True)
class Cut:
    """How a micro-batch is cut: pieces of the global batch (in space and time), and the context and tensor axes."""

    pieces: int
    context: int = 1
    tensor: int = 1

    @property
    def mesh(self) -> MeshShape:
        return MeshShape((DATA, CONTEXT, TENSOR), (self.pieces, self.context, self.tensor))


@dataclass(frozen=True)
class Variant:
    """One sharding of the whole (folded) graph: an option per element and the conversions between them."""

    name: str
    cut: Cut
    problem: Problem
    pricing: StepPricing
    assignment: Assignment


@dataclass
class ShardingSpace:
    """What all cuts of one graph have in common, made once."""

    graph: Graph
    runs: tuple[BlockRun, ...]
    structure: Problem
    followed: Followed
    states: frozenset[str]
    fusion: Fusion = field(default_factory=Fusion)
    variants: dict[tuple[object, ...], tuple[Variant, ...]] = field(default_factory=dict)

    @staticmethod
    def of(graph: Graph, *, fusion: Fusion | None = None) -> ShardingSpace:
        runs = find_blocks(graph)
        structure = build_structure(graph, runs, Cut(1).mesh)
        later = {name for run in structure.runs for copy in run.copies[1:] for name in copy}
        followed = follow_batch(graph, rules=rule_for, skip=later, alias=structure.last_to_first)
        return ShardingSpace(
            graph, structure.runs, structure, followed, state_derived(graph), fusion if fusion is not None else Fusion()
        )


def find_variants(
    space: ShardingSpace,
    cut: Cut,
    prices: object,
    *,
    constraints: Sequence[Constraint] = (),
    weights: Sequence[float] = BYTE_WEIGHTS,
) -> tuple[Variant, ...]:
    """The undominated shardings for ``cut``; none if nothing divides.

    ``prices`` gives the seconds of compute and of collectives on this cut's axes (see ``planner.step.pricing``).
    """
    fixed = {name: {DATA: label} for name, label in space.followed.labels.items()}
    if cut.context > 1:
        along = _search(space, Cut(cut.pieces, cut.context), prices, fixed, (0.0,), constraints)
        if not along:
            return ()
        fixed = {name: {**labels, **_labels_on(along[0], name, CONTEXT)} for name, labels in fixed.items()}
    return _search(space, cut, prices, fixed, weights if cut.tensor > 1 else weights[:1], constraints)


def _labels_on(variant: Variant, name: str, axis: str) -> dict[str, str]:
    option = variant.assignment.options.get(name)
    if option is None:
        return {}
    return {axis: option.labels[variant.cut.mesh.names.index(axis)]}


def _search(
    space: ShardingSpace,
    cut: Cut,
    prices: object,
    fixed: Mapping[str, Mapping[str, str]],
    weights: Sequence[float],
    constraints: Sequence[Constraint],
) -> tuple[Variant, ...]:
    pricing = StepPricing(prices, cut.mesh, states=space.states, fusion=space.fusion)
    problem = _problem(space, cut, pricing, fixed)
    if constraints:
        left = apply_constraints(problem, constraints)
        problem = replace(
            problem, elements={n: replace(e, options=left[n] or e.options) for n, e in problem.elements.items()}
        )
    if not all(element.options for element in problem.elements.values()):
        return ()
    lattices = Lattices(pricing)
    found: list[Assignment] = []
    for weight in weights:
        assignment = _solve(problem, lattices, weight, found[0] if found else None)
        if assignment is not None and all(_better_somewhere(assignment, other) for other in found):
            found.append(assignment)
    return tuple(Variant(f"v{index}", cut, problem, pricing, each) for index, each in enumerate(found))


def _better_somewhere(new: Assignment, old: Assignment) -> bool:
    return new.memory < old.memory * 0.999 or new.seconds < old.seconds * 0.999


def _problem(space: ShardingSpace, cut: Cut, pricing: StepPricing, fixed: Mapping[str, Mapping[str, str]]) -> Problem:
    elements = {name: replace(element, options=[]) for name, element in space.structure.elements.items()}
    searched = CONTEXT if cut.tensor == 1 else TENSOR
    settled = frozenset(index for index, axis in enumerate(cut.mesh.names) if axis != searched)
    problem = replace(space.structure, mesh=cut.mesh, elements=elements, settled=settled)
    roles = Roles(fixed=fixed, whole_states=STATE_AXES)
    fill_options(problem, pricing, rule_for=rule_for, flops_of=forward_flops, bound_frozen=False, roles=roles)
    return problem


def _solve(problem: Problem, lattices: Lattices, weight: float, fastest: Assignment | None) -> Assignment | None:
    """The best assignment if a byte is worth ``weight`` × (seconds / bytes of the fastest)."""
    ilp = build_ilp(problem, lattices, memory_limit=None)
    if weight and fastest is not None and fastest.memory:
        worth = weight * fastest.seconds / fastest.memory
        for column, num_bytes in ilp.memory_terms:
            ilp.program.costs[column] += worth * num_bytes
    solution = solve(ilp.program, time_limit=ILP_SECONDS)
    if solution.values is None:
        return None
    return complete(problem, read_choices(ilp, solution.values), lattices)
