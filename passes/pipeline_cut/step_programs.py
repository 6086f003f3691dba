"""One sharded graph for each pipeline chunk of a step, for one micro-batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from passes.ir.graph import Graph, Node, Value
from passes.ir.types import MeshShape
from passes.losses import with_chunked_losses, with_logits_reused
from passes.losses.scalar import scalar_loss
from passes.pipeline_cut.cut import ChunkBody, constants_used, cut
from passes.pipeline_cut.deferral import BATCH_AXIS, Deferral, deferral_of
from passes.pipeline_cut.totals import Additive, DependentSamplesError, additive
from passes.pipeline_cut.unit_chain import ChainPart, Whereabouts, parts_of
from passes.plan import Plan
from passes.plan.step_plan import StepPlan
from passes.rules.rule import REPLICATE
from passes.shard import Compute, Local, Repeat, Section, ShardedGraph, StateRef, UnitPolicy, shard
from passes.shard.context import RuleFor
from passes.shard.operations import Operation, used_by

#: The ZeRO stage from which on weights are gathered for every use.
_GATHERED_PER_USE = 3


@dataclass(frozen=True)
class StageUnit:
    """The weights of one unit: what is used together, gathered and freed together.

    ``states`` are (index of the block's root, path below it, full path) of every parameter and buffer; ``num_roots``
    those that the block names, some of which may have none.
    """

    name: str
    states: tuple[tuple[int, str, str], ...]
    policy: UnitPolicy
    num_roots: int = 1


@dataclass(frozen=True)
class StageGraph:
    """What one chunk does with a micro-batch.

    Attributes:
        sharded: its program as data. Its inputs are first those received, then inputs of the model, then totals.
        received, sent: values that cross the cut before and behind it.
        units: in the order in which the program uses them.
        shared: paths of parameters that are used outside of units (by all copies of a block).
    """

    index: int
    sharded: ShardedGraph
    received: tuple[Local, ...]
    sent: tuple[Local, ...]
    units: tuple[StageUnit, ...]
    shared: tuple[str, ...]

    @property
    def all_units(self) -> tuple[StageUnit, ...]:
        """``units``, and behind them one of ``shared`` if there is anything."""
        if not self.shared:
            return self.units
        zero = max((unit.policy.zero for unit in self.units), default=0)
        # Used all through a micro-batch, so never gathered for a use alone.
        policy = UnitPolicy("none", min(zero, _GATHERED_PER_USE - 1))
        return (*self.units, StageUnit("shared", tuple((0, path, path) for path in self.shared), policy))


@dataclass(frozen=True)
class StepPrograms:
    """The chunks of a step, and what computes a micro-batch's share of the totals (None: there are none).

    The outputs of ``totals`` are partial sums over the batch axis, named as the chunks' inputs ``("total", name)``.
    ``graph`` is what was cut: losses that the plan computes in chunks are in it. ``counting``: the chunks of
    a pass without gradients before the step, for totals that come from activations; empty if there are none.
    """

    stages: tuple[StageGraph, ...]
    totals: ShardedGraph | None
    num_microbatches: int
    graph: Graph
    counting: tuple[StageGraph, ...] = ()


def step_programs(
    graph: Graph,
    plan: Plan,
    *,
    num_microbatches: int | None = None,
    batch_ranks: int | None = None,
    outputs: Collection[str] | None = None,
    like: StepPrograms | None = None,
    deferral: Deferral | None = None,
    rule_for: RuleFor | None = None,
) -> StepPrograms:
    """Cut ``graph``, captured for the whole batch of a step, as ``plan.step`` says.

    A plan on a given mesh is one chunk of one micro-batch, whose units are the graph's own.

    Args:
        num_microbatches: another number than the plan's.
        batch_ranks: how many ranks of the batch axis share the samples, if not all do (1: each computes all of them).
        outputs: paths of the outputs to keep; None for the loss alone.
        like: programs of the plan's own graph, for another graph of the model (without a loss, say), whose units need
            not be the plan's: its operators go where these have their weights.
        deferral: where the gradients of parameters are reduced outside of programs; None for ``deferral_of(plan)``.

    Raises:
        PlanMismatch: as ``shard``, and if the plan's stages are not this graph's.
        ValueError: as ``shard``; if there is no loss and no outputs are named; if the samples of several micro-batches
            depend on each other.
    """
    step = plan.step
    count = step.num_microbatches if num_microbatches is None else num_microbatches
    sizes = plan.mesh.as_dict()
    if BATCH_AXIS in sizes:
        sizes[BATCH_AXIS] = (sizes[BATCH_AXIS] if batch_ranks is None else batch_ranks) * count
    mesh = MeshShape(plan.mesh.names, tuple(sizes.values()))
    if sizes.get(BATCH_AXIS) == 1:
        plan = _uncut(plan, plan.mesh.names.index(BATCH_AXIS))
    output_paths = _kept_outputs(graph, outputs)
    cut_graph = graph.replace(outputs={path: graph.outputs[path] for path in output_paths})
    if like is None and graph.loss is not None:
        results = set(cut_graph.outputs.values())
        cut_graph, plan = with_chunked_losses(cut_graph, plan, results=results)
        # Who takes the outputs may run the backward pass twice.
        cut_graph = (
            with_logits_reused(cut_graph, results=results) if cut_graph.training and outputs is None else cut_graph
        )
    deferred = deferral_of(plan) if deferral is None else deferral
    whole = shard(cut_graph, dataclasses.replace(plan, mesh=mesh), rule_for=rule_for, deferred=deferred)
    cut_as = f" ({BATCH_AXIS}: {sizes[BATCH_AXIS] // count} ranks × {count} micro-batches)" if count > 1 else ""
    if count > 1:
        sums = additive(whole.main, axis=mesh.names.index(BATCH_AXIS), paths=output_paths)
        whole = dataclasses.replace(whole, batch_axis=BATCH_AXIS)
    else:
        sums = Additive(whole.main.body, whole.main.results, (), ())
    parts = parts_of(cut_graph, whole.runs, sums.body, step, where=_whereabouts(step, like))
    stages = _stages(whole, sums, parts, len(step.chunks), cut_as)
    _check_buffers(stages)
    totals = _totals_graph(dataclasses.replace(whole, part=f"{cut_as}, totals"), sums)
    counting: tuple[StageGraph, ...] = ()
    if sums.counted:
        outputs_counted = {total.target.value.name: total.source.value.name for total in sums.counted}
        ahead = dataclasses.replace(whole, graph=whole.graph.replace(outputs=outputs_counted, loss=None))
        counting = _stages(ahead, sums.counting, parts, len(step.chunks), f"{cut_as}, counted ahead")
        _check_counting(counting, stages)
    return StepPrograms(stages, totals, count, cut_graph, counting)


def _stages(
    whole: ShardedGraph, sums: Additive, parts: Sequence[ChainPart], num_chunks: int, cut_as: str
) -> tuple[StageGraph, ...]:
    """The chunks that compute the results of ``sums``."""
    bodies = cut(whole, sums, parts, num_chunks=num_chunks)
    return tuple(
        _stage(index, body, dataclasses.replace(whole, part=_part(cut_as, index, len(bodies))))
        for index, body in enumerate(bodies)
    )


def _uncut(plan: Plan, axis: int) -> Plan:
    """``plan`` with operators that a mesh axis of one rank does not cut; what has one sample cannot be cut at all."""
    nodes = {
        key: dataclasses.replace(node, strategy=(*node.strategy[:axis], REPLICATE, *node.strategy[axis + 1 :]))
        for key, node in plan.nodes.items()
    }
    return dataclasses.replace(plan, nodes=nodes)


def _check_buffers(stages: Sequence[StageGraph]) -> None:
    """Raise ValueError if a stage writes a buffer that another one has: it would not see what was written."""
    users: dict[str, set[int]] = {}
    for stage in stages:
        for state in stage.sharded.graph.states:
            users.setdefault(state.path, set()).add(stage.index)
    for stage in stages:
        paths = {state.value.name: state.path for state in stage.sharded.graph.states}
        for node in _nodes_of(stage.sharded.main.body):
            path = paths.get(node.inputs[0]) if node.writes_buffer else None
            if path is not None and len(users[path]) > 1:
                raise ValueError(
                    f"the model writes its buffer {path!r} in another pipeline chunk than one that reads it: plan "
                    "without a pipeline"
                )


def _check_counting(counting: Sequence[StageGraph], stages: Sequence[StageGraph]) -> None:
    """Raise DependentSamplesError if a pass before the step needs a trained weight that the chunk does not have then.

    Such a weight gets no gradient, so that no unit of the step gathers it.
    """
    for ahead, stage in zip(counting, stages):
        held = {path for unit in stage.all_units for _, _, path in unit.states}
        for state in ahead.sharded.graph.states:
            if state.value.requires_grad and state.path not in held:
                raise DependentSamplesError(
                    f"{state.path!r} is needed for a total of the whole batch alone, and gets no gradient: freeze it "
                    "(requires_grad_(False)), or plan with num_microbatches=1"
                )


def _nodes_of(operations: Sequence[Operation]) -> Iterator[Node]:
    for operation in operations:
        if isinstance(operation, Repeat):
            yield from _nodes_of(operation.block.section.body)
        elif isinstance(operation, Compute):
            yield operation.node


def _part(cut_as: str, index: int, count: int) -> str:
    """Which part of a step a chunk is, for people; nothing where there are no parts."""
    return f"{cut_as}, chunk {index + 1} of {count}" if count > 1 else cut_as


def _whereabouts(step: StepPlan, programs: StepPrograms | None) -> Whereabouts | None:
    """The chunks that use each weight; None where the plan's groups say it."""
    if not step.decides_units:
        return {}
    if programs is None:
        return None
    places: dict[str, list[tuple[int, UnitPolicy]]] = {}
    for stage in programs.stages:
        for unit in stage.units:
            for _, _, path in unit.states:
                places.setdefault(path, []).append((stage.index, unit.policy))
    return places


def _kept_outputs(graph: Graph, outputs: Collection[str] | None) -> tuple[str, ...]:
    if outputs is not None:
        return tuple(path for path in graph.outputs if path in outputs)
    return (scalar_loss(graph),)


def _stage(index: int, body: ChunkBody, whole: ShardedGraph) -> StageGraph:
    graph = whole.graph
    paths = dict(zip(whole.main.arguments, graph.input_paths))
    inputs: list[tuple[Local, tuple[str | int, ...]]] = [
        (local, ("received", place)) for place, local in enumerate(body.received)
    ]
    inputs += [(local, paths[local]) for local in body.inputs]
    inputs += [(total.target, ("total", total.target.value.name)) for total in body.totals]
    is_last = body.is_last
    results = body.sent
    names = list(graph.outputs) if is_last else [str(place) for place in range(len(results))]
    units = tuple(_unit(part, copy) for part in body.parts for copy in range(len(part.repeat.block.roots)))
    shared = _shared_states(body, graph)
    used = {path for unit in units for _, _, path in unit.states} | set(shared) | body.constant_states
    stage_graph = graph.replace(
        inputs=tuple(_as_input(local) for local, _ in inputs),
        input_paths=tuple(path for _, path in inputs),
        states=tuple(state for state in graph.states if state.path in used),
        outputs={name: local.value.name for name, local in zip(names, results)},
        loss=graph.loss if is_last else None,
        unflatten=None,
    )
    main = Section(tuple(local for local, _ in inputs), body.operations, tuple(results))
    sharded = dataclasses.replace(
        whole,
        graph=stage_graph,
        constants=body.constants,
        main=main,
        output_placements={name: local.placement for name, local in zip(names, results)},
    )
    return StageGraph(index, sharded, body.received, body.sent, units, tuple(shared))


def _as_input(local: Local) -> Value:
    return dataclasses.replace(local.value, kind="input")


def _unit(part: ChainPart, copy: int) -> StageUnit:
    repeat = part.repeat
    roots = repeat.block.roots[copy]
    states = [
        (ref.root or 0, ref.path, f"{roots[ref.root or 0]}.{ref.path}" if roots[ref.root or 0] else ref.path)
        for ref in _state_refs(repeat.block.section)
    ]
    assert repeat.policy is not None
    name = " ".join(roots) or repeat.block.module_class
    return StageUnit(name, tuple(dict.fromkeys(states)), repeat.policy, len(roots))


def _state_refs(section: Section) -> list[StateRef]:
    return [local.state for operation in section.body for local in used_by(operation) if local.state is not None]


def _shared_states(body: ChunkBody, graph: Graph) -> Sequence[str]:
    """Paths of the states that operations outside of units take, and of those that are results as they are."""
    used = [local for operation in body.operations for local in used_by(operation)]
    return list(dict.fromkeys(local.state.path for local in (*used, *body.sent) if local.state is not None))


def _totals_graph(whole: ShardedGraph, sums: Additive) -> ShardedGraph | None:
    """What computes one micro-batch's share of every total, from the inputs."""
    if not sums.totals:
        return None
    graph = whole.graph
    used = {local for operation in sums.before for local in used_by(operation)}
    used.update(total.source for total in sums.totals)
    arguments = [local for local in whole.main.arguments if local in used]
    paths: Mapping[Local, tuple[str | int, ...]] = dict(zip(whole.main.arguments, graph.input_paths))
    constants, constant_states = constants_used(whole.constants, used)
    states = constant_states.union(local.state.path for local in used if local.state is not None)
    outputs = {total.target.value.name: total.source.value.name for total in sums.totals}
    return dataclasses.replace(
        whole,
        graph=graph.replace(
            inputs=tuple(local.value for local in arguments),
            input_paths=tuple(paths[local] for local in arguments),
            states=tuple(state for state in graph.states if state.path in states),
            outputs=outputs,
            loss=None,
            unflatten=None,
        ),
        constants=constants,
        main=Section(tuple(arguments), sums.before, tuple(total.source for total in sums.totals)),
        output_placements={total.target.value.name: total.source.placement for total in sums.totals},
    )
