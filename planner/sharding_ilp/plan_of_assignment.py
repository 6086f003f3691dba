"""Turn an assignment into a Plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from passes.ir.fingerprint import fingerprint
from passes.ir.graph import Graph, Value
from passes.ir.types import Placement, R
from passes.plan import (
    BlockPlan,
    Certificate,
    CollectivePlan,
    ConversionPlan,
    Costs,
    NodePlan,
    Plan,
    TensorPlan,
)
from passes.plan.step_plan import StepPlan
from passes.repeats.repeated_blocks import BlockRun
from passes.rules.rule import PROBED, TABLE
from planner.sharding_ilp.assignment import Assignment, Conversion
from planner.sharding_ilp.options import Option
from planner.sharding_ilp.sharding_prices import Pricing
from planner.sharding_ilp.sharding_problem import Element, Problem, ValueStream
from planner.sharding_ilp.step_on_mesh import step_on_mesh

#: (collective, axis, phase) → (count, bytes)
Tally = dict[tuple[str, str, str], tuple[int, int]]


def make_plan(
    problem: Problem,
    assignment: Assignment,
    pricing: Pricing,
    *,
    certificate: Certificate,
    cluster: Mapping[str, Any],
    constraints: Mapping[str, Any],
    step: StepPlan | None = None,
    memory_limit: float | None = None,
) -> Plan:
    """The plan that records what ``assignment`` decided, with its costs by part.

    Without ``step``, of the whole batch at once; ``memory_limit``: bytes that it was then allowed on a device.
    """
    graph, inputs, costs = problem.graph, _inputs(problem.graph, assignment), _costs(problem, assignment, pricing)
    if step is None:
        step = step_on_mesh(
            graph, mesh=pricing.mesh, inputs=inputs, costs=costs, cluster=cluster, memory_limit=memory_limit
        )
    return Plan(
        model=graph.model_name,
        fingerprint=fingerprint(graph),
        mesh=pricing.mesh,
        cluster=dict(cluster),
        training=graph.training,
        inputs=inputs,
        states=_states(problem, assignment, pricing),
        outputs=_outputs(problem, assignment),
        nodes=_nodes(problem, assignment),
        conversions=tuple(_conversions(problem, assignment, pricing)),
        shared_gathers=tuple(_shared_gathers(problem, assignment)),
        blocks=tuple(_block(problem, assignment, index, run) for index, run in enumerate(problem.runs)),
        collectives=collectives_of(_tally(problem, assignment, pricing)),
        costs=costs,
        certificate=certificate,
        step=step,
        constraints=dict(constraints),
        notes=_notes(problem, assignment),
    )


def add_to_tally(tally: Tally, key: tuple[str, str, str], count: int, num_bytes: int) -> None:
    """Count ``count`` collectives of ``num_bytes`` each."""
    so_far = tally.get(key, (0, 0))
    tally[key] = (so_far[0] + count, so_far[1] + count * num_bytes)


def collectives_of(tally: Tally) -> tuple[CollectivePlan, ...]:
    """Collectives in a fixed order."""
    return tuple(CollectivePlan(*key, *tally[key]) for key in sorted(tally))


def _tensor(value: Value, placement: Placement, *, aliases: tuple[str, ...] = (), state: bool = False) -> TensorPlan:
    return TensorPlan(value.shape, value.dtype, placement, state and value.requires_grad, aliases)


def _inputs(graph: Graph, assignment: Assignment) -> dict[str, TensorPlan]:
    return {
        ".".join(map(str, path)): _tensor(value, assignment.options[value.name].outputs[0])
        for path, value in zip(graph.input_paths, graph.inputs)
    }


def _states(problem: Problem, assignment: Assignment, pricing: Pricing) -> dict[str, TensorPlan]:
    """Every state of every copy."""
    first = {name: names[0] for run in problem.runs for names in run.states for name in names}
    whole = (R,) * len(pricing.mesh.names)
    states = {}
    for state in problem.graph.states:
        name = first.get(state.value.name, state.value.name)
        placement = assignment.options[name].outputs[0] if name in assignment.options else whole
        states[state.path] = _tensor(state.value, placement, aliases=state.aliases, state=True)
    return states


def _outputs(problem: Problem, assignment: Assignment) -> dict[str, TensorPlan]:
    """Outputs in the requested placement, or (beside a loss) as they are computed."""
    values, streams = problem.graph.values, problem.streams
    outputs = {}
    for path, name in problem.graph.outputs.items():
        element = problem.elements.get(f"output:{path}")
        if element is not None:
            placement = assignment.options[f"output:{path}"].inputs[0]
        else:
            stream = streams[problem.first_name(name)]
            placement = assignment.options[stream.source].outputs[stream.output]
        outputs[path] = _tensor(values[name], placement)
    return outputs


def _operators(problem: Problem) -> Iterable[tuple[str, Element]]:
    return ((name, element) for name, element in problem.elements.items() if element.kind == "op")


def _nodes(problem: Problem, assignment: Assignment) -> dict[str, NodePlan]:
    plans = {}
    for name, element in _operators(problem):
        option = assignment.options[name]
        assert element.node is not None
        plans[element.key] = NodePlan(element.node.op, option.labels, option.outputs, element.has_rule)
    return plans


def _shared_gathers(problem: Problem, assignment: Assignment) -> Iterable[tuple[str, ...]]:
    for name, _ in _operators(problem):
        members = assignment.options[name].shared
        if members[:1] == (name,):
            yield tuple(problem.elements[member].key for member in members)


def _conversions(problem: Problem, assignment: Assignment, pricing: Pricing) -> Iterable[ConversionPlan]:
    for name, stream in problem.streams.items():
        for item in assignment.trees[name]:
            yield _conversion(stream, item, pricing)


def _conversion(stream: ValueStream, item: Conversion, pricing: Pricing) -> ConversionPlan:
    step = item.arc.step
    forward, backward = step.collectives
    return ConversionPlan(
        value=stream.key,
        axis=step.axis_name(pricing.mesh),
        source=step.source,
        target=step.target,
        copies=item.copies,
        forward=forward,
        backward=backward if item.backward_copies else None,
        num_bytes=pricing.step_bytes(step, stream.value),
    )


def _block(problem: Problem, assignment: Assignment, index: int, run: BlockRun) -> BlockPlan:
    first = problem.elements[run.copies[0][0]]
    carried = tuple(assignment.options[f"carry:{index}#{slot}"].outputs[0] for slot in range(len(run.carried)))
    return BlockPlan(run.roots, first.key, carried)


def _tally(problem: Problem, assignment: Assignment, pricing: Pricing) -> Tally:
    """Every collective of one step: those of conversions and those that operators issue themselves."""
    tally: Tally = {}
    for name, stream in problem.streams.items():
        for item in assignment.trees[name]:
            step, axis = item.arc.step, item.arc.step.axis_name(pricing.mesh)
            num_bytes = pricing.step_bytes(step, stream.value)
            phases = zip(("forward", "backward"), step.collectives, (item.copies, item.backward_copies))
            for phase, collective, count in phases:
                if collective and count:
                    add_to_tally(tally, (collective, axis, phase), count, num_bytes)
    for name, element in problem.elements.items():
        for issued in assignment.options[name].collectives:
            add_to_tally(tally, (issued.collective, issued.axis, issued.phase), element.copies, issued.num_bytes)
    return tally


def _costs(problem: Problem, assignment: Assignment, pricing: Pricing) -> Costs:
    compute, communication = [0.0, 0.0], [0.0, 0.0]
    activations = converted = 0
    memory = {"parameters": 0, "gradients": 0, "optimizer": 0}
    for name, element in problem.elements.items():
        option = assignment.options[name]
        for phase in (0, 1):
            compute[phase] += element.copies * option.compute[phase]
            communication[phase] += element.copies * option.communication[phase]
        if element.kind in ("parameter", "buffer"):
            state = pricing.state_bytes(problem.streams[name].value, option.outputs[0])
            memory["parameters"] += element.copies * state.parameters
            memory["gradients"] += element.copies * state.gradients
            memory["optimizer"] += element.copies * state.optimizer
        else:
            activations += _saved_bytes(problem, element, option, pricing)
    for tree in assignment.trees.values():
        for item in tree:
            communication[0] += item.copies * item.arc.forward
            communication[1] += item.backward_copies * item.arc.backward
            converted += item.copies * item.arc.memory
    memory.update(activations=activations, converted=converted)
    return Costs(compute[0], compute[1], communication[0], communication[1], memory)


def _saved_bytes(problem: Problem, element: Element, option: Option, pricing: Pricing) -> int:
    """Bytes that all copies of an element keep for the backward pass."""
    if element.node is None or not option.memory:
        return element.copies * option.memory
    return sum(
        problem.streams[value.name].saved_copies * pricing.local_bytes(value, where)
        for value, where in zip(element.node.outputs, option.outputs)
    )


def _notes(problem: Problem, assignment: Assignment) -> tuple[str, ...]:
    """One line for each operator kind without a rule (how many run whole on every device, and what that costs), or with
    one that is not from the tables."""
    totals: dict[tuple[str, str], tuple[int, float]] = {}
    for name, element in _operators(problem):
        source = element.rule_source if element.has_rule else ""
        if source != TABLE and element.node is not None:
            count, seconds = totals.get((element.node.op, source), (0, 0.0))
            cost = element.copies * assignment.options[name].seconds
            totals[element.node.op, source] = (count + element.copies, seconds + cost)
    return tuple(_note(op, source, *total) for (op, source), total in sorted(totals.items()))


def _note(op: str, source: str, count: int, seconds: float) -> str:
    if not source:
        return f"{op} has no sharding rule: {count} run whole on every device ({seconds:.3g} s of compute a step)"
    origin = "rule found by running it on small shards" if source == PROBED else "rule registered by the user"
    return f"{op}: {origin} ({count} of them)"
