"""Workspace of fused operators while they run, by operator: no record of their call shows it.

All sizes are of one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from cost_models.dtypes import item_size
from passes.ir.graph import Node, Value

#: Bytes of a value on one device.
LocalBytes = Callable[[Value], float]
#: Fewest tokens of which a loss in chunks holds the logits at a time, as ``runtime.kernels.linear_cross_entropy`` does.
LEAST_CHUNK = 1024


class Working(NamedTuple):
    """Bytes held while an operator runs, beyond what it takes and gives."""

    forward: float = 0.0
    backward: float = 0.0


def working(node: Node, values: Mapping[str, Value], local_bytes: LocalBytes) -> Working:
    """What ``node`` holds while it runs; nothing if it is not in the table."""
    workspace_of = _OPERATORS.get(node.op)
    return Working() if workspace_of is None else workspace_of(node, values, local_bytes)


def _linear_cross_entropy(node: Node, values: Mapping[str, Value], local_bytes: LocalBytes) -> Working:
    """The logits of one chunk; backward the weight's gradient in float32 too, where the weight is narrower."""
    hidden, weight = (values[name] for name in node.inputs[:2])
    size = item_size(hidden.dtype)
    width = hidden.shape[-1]
    tokens = local_bytes(hidden) / (size * width)
    classes = local_bytes(weight) / (item_size(weight.dtype) * width)
    logits = size * classes * min(max(tokens * width / max(classes, 1.0), LEAST_CHUNK), tokens)
    narrow = weight.requires_grad and item_size(weight.dtype) < 4
    return Working(logits, logits + (4.0 * classes * width if narrow else 0.0))


def _expert_linear(node: Node, values: Mapping[str, Value], local_bytes: LocalBytes) -> Working:
    """Rows sorted by expert, and their products before these are put back; backward also gradients of the rows."""
    source, ids, weight = (values[name] for name in node.inputs)
    rows = local_bytes(ids) / item_size(ids.dtype) * weight.shape[2] * item_size(source.dtype)
    products = local_bytes(node.output)
    return Working(rows + products, 2.0 * rows + products)


_OPERATORS: Mapping[str, Callable[[Node, Mapping[str, Value], LocalBytes], Working]] = {
    "meshwright.expert_linear": _expert_linear,
    "meshwright.linear_cross_entropy.default": _linear_cross_entropy,
}
