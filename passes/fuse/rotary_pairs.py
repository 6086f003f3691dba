"""Two rotary embeddings with the same angles as one call, once it is known how they are sharded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from passes.ir.graph import Graph, Node, Ref, map_refs
from passes.rules.rule import AxisChoice
from passes.shard import Compute, Convert, Local, ShardedGraph
from passes.shard.operations import Operation
from passes.shard.rewritten_sections import Body, with_rewritten_sections

ROTARY = "meshwright.rotary.default"
PAIR = "meshwright.rotary_pair.default"
#: An operator whose name contains one of these gives a different result at each call.
_RANDOM = ("rand", "dropout", "bernoulli", "multinomial")


def share_angles(graph: Graph) -> Graph:
    """``graph`` with equal cosines and sines of a module computed once.

    GPT-J computes them anew for queries and for keys.
    """
    feeding: set[str] = set()
    for node in reversed(graph.nodes):
        if node.op == ROTARY:
            feeding.update(node.inputs[1:])
        elif any(value.name in feeding for value in node.outputs) and not node.op.startswith("meshwright."):
            feeding.update(node.inputs)
    first: dict[Any, Node] = {}
    same: dict[str, str] = {}
    nodes = []
    for node in graph.nodes:
        if same and any(name in same for name in node.inputs):
            node = replace(node, args=_renamed(node.args, same), kwargs=_renamed(dict(node.kwargs), same))
        if node.output.name in feeding and not any(word in node.op for word in _RANDOM):
            earlier = first.setdefault((node.module_path, node.op, repr((node.args, node.kwargs))), node)
            if earlier is not node:
                same.update((value.name, other.name) for value, other in zip(node.outputs, earlier.outputs))
                continue
        nodes.append(node)
    return graph.replace(nodes=tuple(nodes)) if same else graph


def _renamed(arguments: Any, names: Mapping[str, str]) -> Any:
    return map_refs(arguments, lambda ref: Ref(names.get(ref.name, ref.name)))


def pair_rotaries(sharded: ShardedGraph) -> ShardedGraph:
    """``sharded`` with rotary embeddings of the same angles, layout and sharding two by two in one call."""
    return with_rewritten_sections(sharded, _with_pairs)


def _with_pairs(body: Body) -> tuple[Operation, ...]:
    rewritten: list[Operation | None] = []
    waiting: dict[Any, int] = {}
    for operation in body:
        if isinstance(operation, Compute) and operation.node.op == ROTARY:
            key = _angles(operation)
            place = waiting.pop(key, None)
            first = rewritten[place] if place is not None else None
            if place is not None and isinstance(first, Compute) and not _used(first.outputs[0], rewritten[place:]):
                rewritten[place] = None
                operation = _pair(first, operation)
            else:
                waiting[key] = len(rewritten)
        rewritten.append(operation)
    return tuple(operation for operation in rewritten if operation is not None)


def _angles(rotary: Compute) -> tuple[Any, ...]:
    """What two calls must have in common: angles, layout, rank, dtype, gradients, and how every axis cuts them.

    Outputs of one operator get gradients together, so one that needs none (of frozen weights) would be paid for.
    """
    turned = rotary.inputs[0]
    types = tuple((choice.inputs, choice.outputs) for choice in rotary.choices)
    value = turned.value
    return (*rotary.inputs[1:], rotary.node.constants, len(turned.shape), value.dtype, value.requires_grad, types)


def _used(local: Local, operations: list[Operation | None]) -> bool:
    for operation in operations:
        if isinstance(operation, Compute):
            used: tuple[Local, ...] = operation.inputs
        elif isinstance(operation, Convert):
            used = (operation.source,)
        else:
            used = () if operation is None else operation.entries
        if local in used:
            return True
    return False


def _pair(query: Compute, key: Compute) -> Compute:
    node = replace(
        query.node,
        op=PAIR,
        args=(query.node.args[0], *key.node.args),
        outputs=(query.node.output, key.node.output),
    )
    choices = tuple(
        AxisChoice(
            choice.label,
            (choice.inputs[0], *other.inputs),
            (choice.outputs[0], other.outputs[0]),
            choice.factor,
        )
        for choice, other in zip(query.choices, key.choices)
    )
    return Compute(node, (query.inputs[0], *key.inputs), (query.outputs[0], key.outputs[0]), choices, None)
