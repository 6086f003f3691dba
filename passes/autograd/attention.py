"""Attention calls as the untraced model makes them.

A model that is traced cannot look at its masks, so it forms a causal mask that depends on shapes alone and passes it to
every call, and repeats the keys and values of grouped heads to go with it. Untraced it passes ``is_causal`` and
``enable_gqa``, and fused kernels need neither tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from passes.ir.graph import Node, Ref, Value

ATTENTION = "aten.scaled_dot_product_attention.default"


def untraced(
    node: Node, *, makers: Mapping[str, Node], values: Mapping[str, Value], constants: Collection[str], grouped: bool
) -> Node:
    """The call that the untraced model makes for ``node``; ``node`` itself if it would make the same.

    Args:
        makers: the node that makes each value.
        constants: names of values that depend on shapes alone.
        grouped: whether the kernels take fewer heads of keys than of queries.
    """
    if node.op != ATTENTION:
        return node
    masked = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    if isinstance(masked, Ref) and masked.name not in constants:
        return node
    args: list[Any] = [None if argument == masked else argument for argument in node.args]
    kwargs = {name: argument for name, argument in node.kwargs.items() if name != "attn_mask"}
    if grouped:
        sources = [_before_repeat(argument, makers, values) for argument in args[1:3]]
        if all(sources):
            args[1:3] = sources
            kwargs["enable_gqa"] = True
    return dataclasses.replace(node, args=tuple(args), kwargs=kwargs)


def _before_repeat(argument: Any, makers: Mapping[str, Node], values: Mapping[str, Value]) -> Ref | None:
    """What ``[b, groups, …]`` was before each head was repeated: ``reshape(expand(unsqueeze(x, 2)))``."""
    for op in ("aten.reshape.default", "aten.expand.default", "aten.unsqueeze.default"):
        maker = makers.get(argument.name) if isinstance(argument, Ref) else None
        if maker is None or maker.op != op:
            return None
        argument = maker.args[0]
    return argument if isinstance(argument, Ref) and len(values[argument.name].shape) == 4 else None
