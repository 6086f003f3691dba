"""How a loss in chunks is sharded: as its linear layer and its cross-entropy are, with nothing converted between."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from passes.ir.graph import Graph, Node, Value
from passes.ir.types import Placement
from passes.losses.chunked import ChunkedUnits
from passes.losses.loss_pairs import LossPair
from passes.plan import NodePlan, Plan
from passes.plan.step_plan import CHUNKED_LOSS
from passes.repeats.model_units import find_units
from passes.repeats.repeated_blocks import folded_runs
from passes.rules import rule_for
from passes.rules.rule import AxisChoice
from passes.shard.context import RuleFor, offered_choices


class Placed(NamedTuple):
    """Placements of an operator's inputs and outputs, in their order."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]


class Strategy(NamedTuple):
    """Labels of an operator by mesh axis, and what it takes and gives under them."""

    labels: tuple[str, ...]
    placed: Placed


def strategies(
    pair: LossPair, values: Mapping[str, Value], placed: Mapping[str, Placed], *, rules: RuleFor = rule_for
) -> dict[str, Strategy] | None:
    """By name of every operator that stands for ``pair``, how it is sharded; None if the pair cannot be fused so.

    Args:
        values: of the graph with the pair fused.
        placed: by name of every operator of the pair, how that is sharded.
    """
    chain = pair.replaced
    for before, after in itertools.pairwise(chain):
        if placed[before.name].outputs[0] != placed[after.name].inputs[0]:
            return None
    linear, loss = placed[pair.linear.name], placed[pair.loss.name]
    strategy_of: dict[str, Strategy] = {}
    hidden = linear.inputs[0]
    for node in pair.moved:
        strategy = _matching(node, values, (hidden,), None, rules)
        if strategy is None:
            return None
        strategy_of[node.name] = strategy
        hidden = strategy.placed.outputs[0]
    inputs = (hidden, *linear.inputs[1:], loss.inputs[1])
    strategy = _matching(pair.fused, values, inputs, loss.outputs, rules)
    return None if strategy is None else strategy_of | {pair.fused.name: strategy}


def _matching(
    node: Node,
    values: Mapping[str, Value],
    inputs: Sequence[Placement],
    outputs: Sequence[Placement] | None,
    rules: RuleFor,
) -> Strategy | None:
    """The choices under which ``node`` takes ``inputs`` (and gives ``outputs``), None if there are none."""
    offered = offered_choices(node, rules(node, values), values)
    selected: list[AxisChoice] = []
    for axis in range(len(inputs[0])):
        input_types = tuple(where[axis] for where in inputs)
        output_types = None if outputs is None else tuple(where[axis] for where in outputs)
        fitting = [c for c in offered if c.inputs == input_types and output_types in (None, c.outputs)]
        if not fitting:
            return None
        selected.append(fitting[0])
    output_placements = tuple(tuple(choice.outputs[place] for choice in selected) for place in range(len(node.outputs)))
    return Strategy(tuple(choice.label for choice in selected), Placed(tuple(inputs), output_placements))


def with_chunked_losses(
    graph: Graph, plan: Plan, *, results: Collection[str], rules: RuleFor = rule_for
) -> tuple[Graph, Plan]:
    """The graph, and the plan for it, with the losses in chunks where the plan's step has units that compute them so.

    Args:
        results: values that must come out of the graph. Logits among them are computed as they are.
    """
    if CHUNKED_LOSS not in plan.step.recompute:
        return graph, plan
    runs = folded_runs(graph, plan.blocks)
    if runs is None:
        raise ValueError("the graph does not repeat the blocks of the plan: plan again")
    units = find_units(graph, runs)
    chunked_units, index, num_copies = set(), 0, 0
    for group in (group for chunk in plan.step.chunks for group in chunk.groups):
        if index < len(units) and group.recompute == CHUNKED_LOSS:
            chunked_units.add(index)
        num_copies += group.count
        if index < len(units) and num_copies >= units[index].count:
            index, num_copies = index + 1, 0
    chunked = ChunkedUnits.of(graph, runs, units, results=results, among=chunked_units)
    nodes = dict(plan.nodes)
    for pair in (pair for pairs in chunked.pairs.values() for pair in pairs):
        placed = {node.name: placed_by(node, plan.nodes[node.key], graph.values, rules) for node in pair.replaced}
        strategy_of = strategies(pair, chunked.graph.values, placed, rules=rules)
        if strategy_of is None:
            raise ValueError(
                f"the plan computes the loss of {pair.linear.key!r} in chunks, but converts its logits: plan again"
            )
        for node in pair.replacement:
            strategy = strategy_of[node.name]
            nodes[node.key] = NodePlan(node.op, strategy.labels, strategy.placed.outputs)
    return chunked.graph, dataclasses.replace(plan, nodes=nodes)


def placed_by(node: Node, planned: NodePlan, values: Mapping[str, Value], rules: RuleFor = rule_for) -> Placed:
    """What an operator takes and gives under a plan."""
    offered = {choice.label: choice for choice in offered_choices(node, rules(node, values), values)}
    choices = [offered[label] for label in planned.strategy]
    return Placed(
        tuple(tuple(choice.inputs[place] for choice in choices) for place in range(len(node.inputs))),
        tuple(tuple(choice.outputs[place] for choice in choices) for place in range(len(node.outputs))),
    )
