"""Level 1: for one way to cut batch, sequence and tensors, how every operator is split.

The batch axis is followed (``planner.whole_step.costs.batch_propagation``); the context axis is searched alone, with
weights whole on it; the tensor axis is then searched by the sharding ILP (``planner.sharding_ilp.sharding_program``)
given both. Weighing bytes against seconds gives several undominated *variants*: the fastest, and ones that keep less
for the backward pass, or whose parameters are cut, so that their gradients are reduced sooner
(``planner.whole_step.costs.byte_weights``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from passes.ir.derived_values import state_derived
from passes.ir.graph import Graph, Node
from passes.ir.types import MeshShape
from passes.repeats.model_units import find_units, unit_of_nodes
from passes.repeats.repeated_blocks import BlockRun, find_blocks
from passes.repeats.sibling_linears import sibling_linears
from passes.rules import forward_flops, rule_for
from passes.rules.expert_rules import exchange_label, is_experts, num_experts
from planner.sharding_ilp.assignment import Assignment
from planner.sharding_ilp.constraints import Constraint, apply_constraints, foldable_runs, user_constraints
from planner.sharding_ilp.constraints import Demands as Pins
from planner.sharding_ilp.lattice import Lattice, LatticePool, Lattices
from planner.sharding_ilp.options import Labels, OperatorChoices, operator_options
from planner.sharding_ilp.program_templates import ProgramTemplates
from planner.sharding_ilp.sharding_problem import Problem, build_structure
from planner.sharding_ilp.sharding_program import ShardingIlp
from planner.sharding_ilp.space import Roles, fill_options
from planner.solvers.pulp_solver import HIGHS
from planner.whole_step.costs.batch_propagation import Followed, follow_batch
from planner.whole_step.costs.expert_regions import ExpertRegions, expert_regions
from planner.whole_step.costs.host_program import TIE, host_program
from planner.whole_step.costs.launch_counts import OptionLaunches
from planner.whole_step.costs.operator_facts import Fusion, OperatorTable
from planner.whole_step.costs.solved_sharding import SolvedSharding, solved_sharding
from planner.whole_step.costs.step_prices import (
    CONTEXT,
    DATA,
    EXPERT,
    STATE_AXES,
    TENSOR,
    ComputeTable,
    StepPrices,
    StepPricing,
)

#: What a problem's options are narrowed to, see ``planner.sharding_ilp.role_restrictions``.
Rules = Callable[[Problem], list[Constraint]]


class Cut(NamedTuple):
    """How a micro-batch is cut: pieces of the global batch (in space and time), and the other axes.

    A search looks prices up by their cuts a hundred thousand times, which takes a tuple a third of a dataclass's time.
    """

    pieces: int
    context: int = 1
    tensor: int = 1
    expert: int = 1

    @property
    def parts(self) -> int:
        """Into how many parts the whole work is cut."""
        return self.pieces * self.context * self.tensor * self.expert

    @property
    def batches(self) -> int:
        """Into how many parts the samples are cut."""
        return self.pieces * self.expert

    @property
    def mesh(self) -> MeshShape:
        """The axes; that of experts only where it has several devices."""
        experts = {EXPERT: self.expert} if self.expert > 1 else {}
        return MeshShape.from_dict({DATA: self.pieces, **experts, CONTEXT: self.context, TENSOR: self.tensor})


@dataclass(frozen=True)
class Variant:
    """One sharding of the whole (folded) graph: an option per element and the conversions between them.

    Attributes:
        ilp: the program whose solution it is.
        slack: seconds by which the program's optimum may be less, where its solver proved no more.
        along: with both axes, the sharding on the context axis alone, which it keeps.
        launched: where hosts are priced, seconds of a micro-batch that no sharding of the cut beats on device and host.
    """

    name: str
    cut: Cut
    problem: Problem
    pricing: StepPricing
    assignment: Assignment
    ilp: ShardingIlp
    slack: float = 0.0
    along: Variant | None = None
    launched: float = 0.0


@dataclass
class ShardingSpace:
    """What all cuts of one graph have in common, built once.

    ``rules`` narrow the options on the tensor axis; ``unconverted`` values must not be converted; ``solver`` solves the
    programs. ``row_axes``: on which products may exchange their rows. ``without_experts``: what an axis of experts
    divides otherwise than a data axis costs nothing (a bound).
    """

    graph: Graph
    runs: tuple[BlockRun, ...]
    structure: Problem
    followed: Followed
    states: frozenset[str]
    fusion: Fusion = field(default_factory=Fusion)
    pins: Pins = field(default_factory=dict)
    rules: Rules | None = None
    unconverted: frozenset[str] = frozenset()
    solver: str = HIGHS
    without_experts: bool = False
    row_axes: frozenset[str] = frozenset()

    @functools.cached_property
    def operators(self) -> OperatorTable:
        """What the prices of all operators depend on, whatever the cut."""
        return OperatorTable(self.fusion)

    @functools.cached_property
    def templates(self) -> ProgramTemplates:
        """The rows of the programs of all cuts."""
        return ProgramTemplates()

    @functools.cached_property
    def expert_nodes(self) -> frozenset[str]:
        """Names of the operators that are a mixture's experts, or planned with those of a region of experts."""
        return frozenset(node.name for node in self.graph.nodes if is_experts(node)) | set(self.regions.labels)

    @functools.cached_property
    def regions(self) -> ExpertRegions:
        """What an axis of experts cuts of mixtures that are no operator of their own."""
        return expert_regions(self.graph, self.states, rules=rule_for)

    @functools.cached_property
    def state_nodes(self) -> frozenset[str]:
        """Names of the operators that compute from parameters alone."""
        return frozenset(node.name for node in self.graph.nodes if node.output.name in self.states)

    @functools.cached_property
    def num_experts(self) -> int:
        """What an axis ``ep`` must divide: the number of experts of all mixtures; 1 if a model has none."""
        counts = [num_experts(node, self.graph.values) for node in self.graph.nodes if is_experts(node)]
        return math.gcd(*counts, *self.regions.num_experts) or 1

    @functools.cached_property
    def mixtures(self) -> tuple[tuple[Node, int], ...]:
        """The experts of every mixture that is planned, and how many copies of its block there are."""
        copies = {name: run.num_copies for run in self.runs for name in run.copies[0]}
        later = {name for run in self.runs for copy in run.copies[1:] for name in copy}
        nodes = [node for node in self.graph.nodes if node.name in self.expert_nodes and node.name not in later]
        return tuple((node, copies.get(node.name, 1)) for node in nodes)

    @functools.cached_property
    def live(self) -> frozenset[str]:
        """Names of the elements that a gradient comes back from."""
        return frozenset(use.element for stream in self.structure.streams.values() for use in stream.uses if use.live)

    @functools.cached_property
    def unpriced(self) -> frozenset[str]:
        """Without experts, the parameters that these or operators on parameters alone use, and what is made of them: an
        axis of experts may divide them."""
        if not self.without_experts:
            return frozenset()
        nodes = [node for node in self.graph.nodes if node.name in self.expert_nodes | self.state_nodes]
        names = {name for node in nodes for name in (*node.inputs, *(value.name for value in node.outputs))}
        return frozenset(names & self.states)

    @functools.cached_property
    def offers(self) -> OperatorChoices:
        """What the operators may choose from, whatever the cut."""
        return OperatorChoices(self.graph.values, rule_for=rule_for, flops_of=forward_flops, row_axes=self.row_axes)

    @staticmethod
    def of(
        graph: Graph,
        *,
        fusion: Fusion | None = None,
        pins: Pins | None = None,
        blocks: tuple[BlockRun, ...] | None = None,
        solver: str = HIGHS,
        overlap_tensor: bool = False,
    ) -> ShardingSpace:
        """The space of ``graph``; ``pins`` are constraints by pattern, see ``planner.sharding_ilp.constraints``.

        ``blocks``: the repeated blocks, if not all that there are may be planned as one.
        """
        pinned = dict(pins or {})
        runs = foldable_runs(graph, find_blocks(graph) if blocks is None else blocks, tuple(pinned))
        structure = build_structure(graph, runs, Cut(1).mesh)
        if overlap_tensor:
            units = unit_of_nodes(find_units(graph, structure.runs))
            structure.siblings = sibling_linears(graph, units, find_blocks(graph))
        later = {name for run in structure.runs for copy in run.copies[1:] for name in copy}
        repeated = {name for run in structure.runs for name in run.copies[0]}
        followed = follow_batch(graph, rules=rule_for, skip=later, alias=structure.last_to_first, repeated=repeated)
        states = state_derived(graph)
        return ShardingSpace(
            graph, structure.runs, structure, followed, states, fusion or Fusion(), pinned, solver=solver,
            row_axes=frozenset({TENSOR} if overlap_tensor else ()),
        )  # fmt: skip


class Shardings:
    """The sharding ILP of one cut, solved for any worth of a byte.

    Args:
        prices: seconds of compute and of collectives on this cut's axes (see ``planner.whole_step.costs.step_prices``).
        along: with both axes, what the context axis does alone: it is kept.
        of_states: lattices of parameters that other cuts have made (``StepPricing``).
        computed: seconds of operators that other cuts have asked these devices for.
        pool: lattices of other cuts.
    """

    def __init__(
        self,
        space: ShardingSpace,
        cut: Cut,
        prices: StepPrices,
        *,
        along: Variant | None = None,
        of_states: dict[tuple[object, ...], Lattice] | None = None,
        computed: ComputeTable | None = None,
        pool: LatticePool | None = None,
    ) -> None:
        self.space, self.cut, self.along, self.solver, self.templates = space, cut, along, space.solver, space.templates
        self.host_seconds: float = prices.host_seconds
        fixed = {name: _on_sample_axes(space, cut, name, label) for name, label in space.followed.labels.items()}
        if along is not None:
            fixed = {name: {**labels, **_labels_on(along, name, CONTEXT)} for name, labels in fixed.items()}
        self.pricing = StepPricing(
            prices, cut.mesh, states=space.states, fusion=space.fusion, unconverted=space.unconverted,
            unpriced=space.unpriced, of_states=of_states, operators=space.operators, computed=computed,
        )  # fmt: skip
        self.problem = _problem(space, cut, self.pricing, fixed)
        self.lattices = Lattices(self.pricing, pool=pool)
        self.divides = all(element.options for element in self.problem.elements.values())

    def variant(self, *, weight: float = 0.0) -> Variant | None:
        """The best sharding if a saved byte costs ``weight`` × (seconds / bytes of the fastest); None if there is
        none."""
        if not self.divides or self.fastest is None:
            return None
        best: SolvedSharding | None = self.fastest
        fastest = self.fastest.assignment
        if weight and fastest.memory:
            best = self._solved(self._weighed(self.ilp, weight * fastest.seconds / fastest.memory))
        if best is None:
            return None
        name = f"bytes × {weight:g}"
        return Variant(
            name, self.cut, self.problem, self.pricing, best.assignment, best.ilp, self.fastest.slack, self.along
        )

    def variant_with_host(self, *, weight: float = 0.0) -> Variant | None:
        """The same of the longer of device and host for each unit; on devices alone where hosts are not priced, or
        linear layers may exchange their rows together."""
        variant = self.variant(weight=weight)
        if variant is None or self.fastest is None or self.fastest_with_host is None:
            return variant
        best, fastest = self.fastest_with_host, self.fastest.assignment
        slack = best.assignment.seconds - fastest.seconds + self.fastest.slack
        if weight and fastest.memory:
            heavier = self._weighed(self.host_ilp, weight * fastest.seconds / fastest.memory)
            best, slack = self._solved(heavier, follows_steps=True) or best, self.fastest.slack
        launched = self.fastest_with_host.bound / (1.0 + TIE)
        return replace(variant, assignment=best.assignment, ilp=best.ilp, slack=slack, launched=launched)

    @functools.cached_property
    def host_ilp(self) -> ShardingIlp:
        """The program in which each unit takes the longer of its device's and its host's seconds."""
        units = find_units(self.space.graph, self.problem.runs)
        launches = OptionLaunches(self.space.offers, self.space.live, self.pricing)
        return host_program(self.ilp, units, launches, host_seconds=self.host_seconds)

    @functools.cached_property
    def fastest_with_host(self) -> SolvedSharding | None:
        """The sharding that is best in those; None where hosts are not priced, or siblings share what they exchange."""
        is_priced = self.host_seconds and not self.problem.siblings
        return self._solved(self.host_ilp, follows_steps=True) if is_priced else None

    def _solved(self, ilp: ShardingIlp, *, follows_steps: bool = False) -> SolvedSharding | None:
        return solved_sharding(ilp, self.lattices, self.solver, follows_steps=follows_steps)

    @functools.cached_property
    def fastest(self) -> SolvedSharding | None:
        """The fastest sharding."""
        return self._solved(self.ilp)

    @functools.cached_property
    def least_of_operators(self) -> float:
        """Seconds of all operators, each under its fastest choice; infinite if one has none.

        What an operator exchanges itself may be shared with others, and counts as nothing.
        """
        if not self.divides:
            return math.inf
        return sum(
            element.copies * min(sum(option.compute) if option.sent else option.seconds for option in element.options)
            for element in self.problem.elements.values()
        )

    @functools.cached_property
    def ilp(self) -> ShardingIlp:
        return self.templates.program(self.problem, self.lattices)

    def _weighed(self, ilp: ShardingIlp, worth: float) -> ShardingIlp:
        """A program with every byte at ``worth`` seconds."""
        costs = list(ilp.program.costs)
        for column, num_bytes in ilp.memory_terms:
            costs[column] += worth * num_bytes
        return replace(ilp, program=replace(ilp.program, costs=costs))


def _on_sample_axes(space: ShardingSpace, cut: Cut, name: str, label: str) -> dict[str, Labels]:
    """The choice of an operator on the axes that divide samples: over ``ep`` experts exchange tokens, a region of
    experts is cut along these, and what is computed from parameters alone may be cut as they are."""
    if cut.expert == 1:
        return {DATA: label}
    if name in space.regions.labels:
        by_expert = space.regions.labels[name]
        is_demanded = name in space.regions.demanded
        return {DATA: label, EXPERT: by_expert if is_demanded else frozenset((label, by_expert))}
    if name in space.expert_nodes:
        return {DATA: label, EXPERT: exchange_label(label)}
    return {DATA: label} if name in space.state_nodes else {DATA: label, EXPERT: label}


def _labels_on(variant: Variant, name: str, axis: str) -> dict[str, str]:
    option = variant.assignment.options.get(name)
    if option is None:
        return {}
    return {axis: option.labels[variant.cut.mesh.names.index(axis)]}


def _pinned(problem: Problem, pins: Pins) -> Problem:
    """The problem with only the options that the user's pins allow, possibly none for an element."""
    return _narrowed(problem, user_constraints(problem, problem.mesh, pins))


def _narrowed(problem: Problem, demanded: list[Constraint]) -> Problem:
    remaining = apply_constraints(problem, demanded)
    elements = {name: replace(element, options=remaining[name]) for name, element in problem.elements.items()}
    return replace(problem, elements=elements)


def _problem(
    space: ShardingSpace, cut: Cut, pricing: StepPricing, fixed: Mapping[str, Mapping[str, Labels]]
) -> Problem:
    elements = {name: replace(element, options=[]) for name, element in space.structure.elements.items()}
    searched = CONTEXT if cut.tensor == 1 else TENSOR
    settled = frozenset(index for index, axis in enumerate(cut.mesh.names) if axis not in (searched, EXPERT))
    sampled = frozenset(index for index, axis in enumerate(cut.mesh.names) if axis == EXPERT)
    problem = replace(
        space.structure, mesh=cut.mesh, elements=elements, settled=settled, sampled=sampled,
        overlap_slowdown=pricing.overlap_slowdown,
    )  # fmt: skip
    roles = Roles(fixed=fixed, whole_states=STATE_AXES, used_states=(EXPERT,))
    fill_options(problem, pricing, offers=space.offers, bound_frozen=False, roles=roles)
    _leave_samples_whole(problem, space.followed.labels, problem.mesh.names.index(searched))
    if space.without_experts:
        problem = _unpriced(problem, space.expert_nodes | space.state_nodes)
    if space.rules is not None and cut.tensor > 1:
        problem = _narrowed(problem, space.rules(problem))
    return _pinned(problem, space.pins) if space.pins else problem


def _leave_samples_whole(problem: Problem, labels: Mapping[str, str], axis: int) -> None:
    """Drop options that divide samples on the searched axis: the data axis does that."""
    if problem.mesh.sizes[axis] == 1:
        return
    for name, element in problem.elements.items():
        if element.kind == "op":
            label = labels.get(name)
            element.options = [o for o in element.options if o.labels[axis] != label or not o.cut_axes[axis]]


def _unpriced(problem: Problem, nodes: frozenset[str]) -> Problem:
    """The problem with the options of ``nodes`` at no cost."""
    elements = {
        name: replace(
            element,
            options=[replace(option, compute=(0.0, 0.0), collectives=(), sent=()) for option in element.options],
        )
        if name in nodes
        else element
        for name, element in problem.elements.items()
    }
    return replace(problem, elements=elements)


def least_of_experts(
    space: ShardingSpace, cut: Cut, prices: StepPrices, *, computed: ComputeTable | None = None
) -> float:
    """Least seconds of one micro-batch in all mixtures' experts and the exchange of their tokens, whatever the types of
    operands on the searched axes; infinite if they cannot be cut so."""
    pricing = StepPricing(
        prices, cut.mesh, states=space.states, fusion=space.fusion, operators=space.operators, computed=computed
    )
    total = 0.0
    for node, copies in space.mixtures:
        fixed = _on_sample_axes(space, cut, node.name, space.followed.labels[node.name])
        options = operator_options(
            node, space.offers, pricing, live=node.name in space.live, saved=[False], fixed=fixed
        )
        total += copies * min((option.seconds for option in options), default=math.inf)
    return total
