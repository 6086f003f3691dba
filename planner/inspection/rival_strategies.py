"""The other strategies of an operator under a plan's own layout: forced one by one, with the rest searched again.

The layout, micro-batches, cuts, recompute policies and ZeRO stages stay as the plan has them. The plan's sharding
program (``planner.sharding_ilp.sharding_program``) is built again for them, and solved with one choice forced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass

from cost_models import Cluster, CostModel
from passes.ir.graph import Graph
from passes.plan import Plan
from passes.plan.step_plan import CHUNKED_LOSS
from passes.repeats.repeated_blocks import folded_runs
from passes.rules import forward_flops, rule_for
from planner.auditing.graph_walk import GraphWalk
from planner.auditing.repriced_step import RepricedStep, reprice
from planner.inspection.objective_ledger import StageShares
from planner.sharding_ilp.assignment import Assignment, Conversion, complete
from planner.sharding_ilp.bundles import bundles_of
from planner.sharding_ilp.constraints import keep_plan, user_constraints
from planner.sharding_ilp.explain import ShardingDemands, restricted
from planner.sharding_ilp.lattice import Lattices
from planner.sharding_ilp.options import OperatorChoices, Option
from planner.sharding_ilp.plan_of_assignment import make_plan
from planner.sharding_ilp.sharding_prices import Pricing
from planner.sharding_ilp.sharding_problem import Element, Problem, ValueStream, build_structure
from planner.sharding_ilp.sharding_program import ShardingIlp, build_ilp
from planner.sharding_ilp.space import fill_options
from planner.solvers.pulp_solver import HIGHS
from planner.whole_step.candidates.mesh_layout import MeshLayout
from planner.whole_step.costs.fusion import fuse
from planner.whole_step.costs.sharding import Cut, ShardingSpace
from planner.whole_step.costs.solved_sharding import solved_sharding
from planner.whole_step.costs.stage_devices import conversion_at, level_one_of, option_at
from planner.whole_step.costs.step_prices import CONTEXT, DATA, TENSOR
from planner.whole_step.costs.unit_costs import StepUnits


@dataclass(frozen=True)
class ShardingProgram:
    """The sharding program of a plan's layout.

    Attributes:
        chosen: by element, the option that the plan takes; elements whose option is not among those of the program
            (it was found under other prices of bytes) are left out.
        space: what shardings of a step are made of, None on a given mesh.
    """

    graph: Graph
    plan: Plan
    cluster: Cluster
    ilp: ShardingIlp
    pricing: Pricing
    lattices: Lattices
    chosen: dict[str, Option]
    space: ShardingSpace | None = None

    @property
    def problem(self) -> Problem:
        return self.ilp.problem

    def forced(self, element: str, options: Collection[Option]) -> Assignment | None:
        """The best sharding whose ``element`` takes one of ``options``; None if there is none."""
        program = dataclasses.replace(self.ilp.program, uppers=list(self.ilp.program.uppers))
        for column, option in zip(self.ilp.x[element], self.problem.elements[element].options):
            if option not in options:
                program.uppers[column] = 0.0
        solved = solved_sharding(dataclasses.replace(self.ilp, program=program), self.lattices, HIGHS)
        return None if solved is None else solved.assignment

    def alone(self, element: str, options: Collection[Option]) -> Assignment | None:
        """The plan's sharding with the best of ``options`` for ``element``, and the conversions that this needs."""
        if self.chosen.keys() != self.problem.elements.keys():
            return None
        changed = [complete(self.problem, {**self.chosen, element: option}, self.lattices) for option in options]
        return min((each for each in changed if each is not None), key=lambda each: each.seconds, default=None)

    def option_on(self, stage: StageShares, element: Element, option: Option) -> Option:
        """An option at the prices of a stage's devices."""
        if not self.plan.step.stage_devices or self.space is None or stage.pricing is None:
            return option
        return option_at(self.space, stage.pricing, element, option)

    def conversion_on(self, stage: StageShares, stream: ValueStream, item: Conversion) -> Conversion:
        """A conversion at the prices of a stage's devices."""
        if not self.plan.step.stage_devices or stage.pricing is None:
            return item
        return conversion_at(stage.pricing, stream, item)

    def priced(self, assignment: Assignment) -> RepricedStep:
        """The plan's step under another sharding.

        Raises:
            ValueError: if the step cannot run so (a loss in chunks, whose logits are converted).
        """
        plan, step = self.plan, self.plan.step
        other = make_plan(
            self.problem,
            assignment,
            self.pricing,
            certificate=plan.certificate,
            cluster=plan.cluster,
            constraints=plan.constraints,
            step=step,
        )
        return reprice(self.graph, dataclasses.replace(other, mesh=plan.mesh, fusion=plan.fusion), self.cluster)


def sharding_program(
    graph: Graph, plan: Plan, cluster: Cluster, walk: GraphWalk, *, states_stay: bool = False
) -> ShardingProgram | None:
    """The program of ``plan``'s layout, None if nothing divides; ``walk`` is of the plan.

    Args:
        states_stay: of a plan on a mesh: parameters and buffers lie where the plan has them.

    Raises:
        ValueError: if the graph does not repeat the blocks of the plan.
    """
    space = None
    if plan.step.decides_units:
        space = _space_of_step(graph, plan)
        posed = _of_step(space, plan, cluster)
    else:
        posed = _of_mesh(graph, plan, cluster, states_stay=states_stay)
    if posed is None:
        return None
    ilp, pricing, lattices = posed
    return ShardingProgram(graph, plan, cluster, ilp, pricing, lattices, _chosen(ilp.problem, plan, walk), space)


def _space_of_step(graph: Graph, plan: Plan) -> ShardingSpace:
    step = plan.step
    return ShardingSpace.of(
        graph,
        fusion=fuse(graph) if step.compiled else None,
        pins=plan.constraints,
        blocks=folded_runs(graph, plan.blocks),
        overlap_tensor=step.overlap_tensor,
    )


def _of_step(space: ShardingSpace, plan: Plan, cluster: Cluster) -> tuple[ShardingIlp, Pricing, Lattices] | None:
    """In weighted seconds if devices are unequal, as the search has it."""
    step, sizes = plan.step, plan.step.axes
    step_units = StepUnits.of(space, compiled=step.compiled, offload=step.offloads_activations)
    if CHUNKED_LOSS in step.recompute:
        space.unconverted = step_units.logits
    layout = MeshLayout.of_sizes(sizes)
    cut = Cut(sizes[DATA] * step.num_microbatches, sizes[CONTEXT], sizes[TENSOR], layout.expert)
    level_one = level_one_of(cluster, space, step_units)
    sharded = level_one.sharded(cut, layout, level_one.links_on(layout))
    if sharded is None:
        return None
    variant = sharded.variant
    return variant.ilp, variant.pricing, Lattices(variant.pricing)


def _of_mesh(
    graph: Graph, plan: Plan, cluster: Cluster, *, states_stay: bool
) -> tuple[ShardingIlp, Pricing, Lattices] | None:
    mesh, pins = plan.mesh, plan.constraints
    held = {path: state.placement for path, state in plan.states.items()} if states_stay else {}
    pricing = Pricing(CostModel(cluster, mesh.as_dict()), mesh, bundles_of(graph))
    offers = OperatorChoices(graph.values, rule_for=rule_for, flops_of=forward_flops)
    problem = build_structure(graph, folded_runs(graph, plan.blocks) or (), mesh, pinned_states=held)
    fill_options(problem, pricing, offers=offers, bound_frozen=bool(pins) or states_stay)
    forbidden = tuple(plan.certificate.demands.get("forbid_collectives", ()))
    demanded = user_constraints(problem, mesh, pins)
    if states_stay:
        demanded.append(keep_plan(problem, dataclasses.replace(plan, inputs={}, nodes={})))
    narrowed = restricted(problem, ShardingDemands(tuple(demanded), forbidden))
    if narrowed is None:
        return None
    lattices = Lattices(pricing, frozenset(forbidden))
    return build_ilp(narrowed, lattices, memory_limit=None), pricing, lattices


def _chosen(problem: Problem, plan: Plan, walk: GraphWalk) -> dict[str, Option]:
    chosen = {}
    for name, element in problem.elements.items():
        option = next((option for option in element.options if _is_taken(option, name, element, plan, walk)), None)
        if option is not None:
            chosen[name] = option
    return chosen


def _is_taken(option: Option, name: str, element: Element, plan: Plan, walk: GraphWalk) -> bool:
    """Whether the plan takes this option of an element."""
    if element.kind == "op":
        planned = plan.nodes[element.key]
        places = (list(option.inputs), list(option.outputs))
        return option.labels == tuple(planned.strategy) and places == (walk.inputs[name], walk.outputs[name])
    if element.kind == "carry":
        block, _, slot = element.key.removeprefix("carry:").partition("#")
        return option.outputs[0] == plan.blocks[int(block)].carried[int(slot)]
    if element.kind == "output":
        return option.inputs[0] == plan.outputs[element.key.removeprefix("output:")].placement
    if element.kind == "input":
        return option.outputs[0] == plan.inputs[element.key.removeprefix("input:")].placement
    if element.kind in ("parameter", "buffer"):
        return option.outputs[0] == plan.states[element.key.removeprefix("state:")].placement
    return True
