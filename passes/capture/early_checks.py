"""Checks of a model's values near what they check, so that a pipeline can be cut behind it.

A check stands on the way of the loss: the flag of a layer's check would cross every cut between both::

    scale = max(x)                             scale = max(x)
    y = linear(x, w)                           y = checked(linear(x, w), isnan(scale), False)
    loss = checked(f(y), isnan(scale), False)  loss = f(y)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from passes.ir.graph import Graph, Node, Ref, Value, assign_keys, map_refs
from passes.repeats.model_units import is_heavy

_CHECKED = "meshwright.checked.default"


def with_early_checks(graph: Graph) -> Graph:
    """``graph`` with each check that has matrix products between its flag and the loss right behind its flag."""
    checks = {node.name: node for node in graph.nodes if node.op == _CHECKED}
    anchors = _anchors(graph, checks) if checks else {}
    if not anchors:
        return graph
    moved = {name for names in anchors.values() for name in names}
    current: dict[str, str] = {}
    nodes: list[Node] = []

    def now(ref: Ref) -> Ref:
        return Ref(current.get(ref.name, ref.name))

    for node in graph.nodes:
        args, kwargs = map_refs((node.args, dict(node.kwargs)), now)
        if node.name in moved:
            current[node.output.name] = args[0].name
            continue
        nodes.append(dataclasses.replace(node, args=args, kwargs=kwargs))
        for name in anchors.get(node.name, ()):
            checked = _check(checks[name], current.get(node.output.name, node.output.name), node)
            current[node.output.name] = checked.name
            nodes.append(checked)
    outputs = {path: now(Ref(name)).name for path, name in graph.outputs.items()}
    return graph.replace(nodes=assign_keys(tuple(nodes)), outputs=outputs)


def _anchors(graph: Graph, checks: Mapping[str, Node]) -> dict[str, list[str]]:
    """The first node behind the flag of a check that is on the way of what is checked → the checks behind it."""
    position = {value.name: place for place, node in enumerate(graph.nodes) for value in node.outputs}
    last_heavy = max((place for place, node in enumerate(graph.nodes) if is_heavy(node)), default=-1)
    anchors: dict[str, list[str]] = {}
    for check in checks.values():
        flag = position.get(check.inputs[1], len(graph.nodes))
        if flag < last_heavy:
            leading = _leading_to(graph, check.inputs[0])
            behind = (node for node in graph.nodes[flag + 1 :] if node.name in leading and node.name not in checks)
            anchor = next((node for node in behind if len(node.outputs) == 1 and node.output.requires_grad), None)
            if anchor is not None:
                anchors.setdefault(anchor.name, []).append(check.name)
    return anchors


def _leading_to(graph: Graph, end: str) -> set[str]:
    names: set[str] = set()
    needed = {end}
    for node in reversed(graph.nodes):
        if any(value.name in needed for value in node.outputs):
            names.add(node.name)
            needed.update(node.inputs)
    return names


def _check(check: Node, operand: str, node: Node) -> Node:
    """A check of what ``node`` gives, which goes by the name ``operand`` now."""
    like = node.output
    value = Value(check.output.name, like.shape, like.dtype, "node", like.requires_grad)
    args = (Ref(operand), *check.args[1:])
    place = (node.module_path, node.module_class)
    return dataclasses.replace(check, args=args, outputs=(value,), module_path=place[0], module_class=place[1])
