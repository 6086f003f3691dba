"""Small tools that the passes on FX graphs share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from passes.torch_compat.operators import OpOverload, schema, tree_leaves

aten = torch.ops.aten


def value(node: fx.Node) -> torch.Tensor:
    """The fake tensor that a node gives."""
    return node.meta["val"]


def shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(value(node).shape)


def is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def calls(graph: fx.Graph, *targets: Any) -> Iterator[fx.Node]:
    """Nodes that call one of ``targets`` (any operator if none is given), in order; safe while nodes are erased."""
    for node in list(graph.nodes):
        if node.op == "call_function" and (not targets or node.target in targets):
            yield node


def argument(node: fx.Node, name: str, default: Any = None) -> Any:
    """The argument that the operator's schema calls ``name``, or its default there."""
    assert isinstance(node.target, OpOverload)
    for index, entry in enumerate(schema(node.target).arguments):
        if entry.name == name:
            if name in node.kwargs:
                return node.kwargs[name]
            if index < len(node.args) and not entry.kwarg_only:
                return node.args[index]
            return entry.default_value if entry.has_default_value() else default
    return default


def insert(
    before: fx.Node,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    like: fx.Node | None = None,
) -> fx.Node:
    """A new call of ``target`` before a node, its fake value computed, its module that of ``like`` (or ``before``)."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args, kwargs)
    source = before if like is None else like
    node.meta = {key: entry for key, entry in source.meta.items() if key in ("nn_module_stack", "stack_trace")}
    node.meta["val"] = evaluate(target, args, kwargs or {}, like=source)
    return node


def evaluate(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, like: fx.Node) -> Any:
    """The fake value of a call whose tensor arguments are nodes; if it has none it is as fake as that of ``like``."""
    values, named = fx.map_arg((args, kwargs), lambda node: node.meta["val"])
    leaves = tree_leaves((values, named, like.meta.get("val")))
    mode = next((leaf.fake_mode for leaf in leaves if hasattr(leaf, "fake_mode")), None)
    if mode is None:
        return target(*values, **named)
    with mode, torch.no_grad():
        return target(*values, **named)


def source_of(node: fx.Node) -> fx.Node:
    """What a node is computed of alone, through any number of operators of one operand."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    return node


def replace(old: fx.Node, new: fx.Node) -> None:
    """``new`` takes the place of ``old`` everywhere, and ``old`` goes."""
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def retarget(node: fx.Node, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Make ``node`` call something else that gives the same value."""
    node.target = target
    node.args = args
    node.kwargs = {}


def is_random(node: fx.Node) -> bool:
    """Whether a call draws random numbers."""
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def writes(node: fx.Node) -> list[int]:
    """Positions of the arguments that a call writes to by its schema."""
    if not isinstance(node.target, OpOverload):
        return []
    return [
        index
        for index, entry in enumerate(schema(node.target).arguments)
        if entry.alias_info is not None and entry.alias_info.is_write
    ]
