"""Workspace of fused operators while they run, by operator: no record of their call shows it.

All sizes are of one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from cost_models.dtypes import item_size
from passes.ir.graph import Node, Value
from passes.rules.delta_rule_costs import GATED_DELTA_RULE, DeltaRuleCall

#: Bytes of a value on one device.
LocalBytes = Callable[[Value], float]
#: Fewest tokens of which a loss in chunks holds the logits at a time, as ``runtime.kernels.linear_cross_entropy`` does.
LEAST_CHUNK = 1024
#: Elements of rows whose float32 copies exist at a time, as in ``runtime.kernels.row_blocks``, and bytes of the three
#: copies of an element: two factors and their product.
WIDE_BLOCK, _WIDE_COPIES = 2**25, 12.0


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


def _experts(node: Node, values: Mapping[str, Value], local_bytes: LocalBytes) -> Working:
    """Rows sorted by expert (of width H), inner vectors (F) and their first products (beyond the one that is saved), as
    ``runtime.kernels.experts`` holds them, tokens routed evenly.

    Experts that axes cut that cut the tokens, too, leave the inner dim whole: any other axis cuts it. Backward
    the inner vectors go before the gradient of the first weight comes, which whoever asks counts from the start.
    """
    source, ids, _, first, second = (values[name] for name in node.inputs[:5])
    rows, size = local_bytes(ids) / item_size(ids.dtype), item_size(source.dtype)
    of_tokens = rows / max(1, ids.num_elements)
    of_weights = local_bytes(second) / (item_size(second.dtype) * second.num_elements)
    cut = min(1.0, of_weights / max(of_tokens, 1e-30))
    outer, inner, hidden = (rows * width for width in (first.shape[1] * cut, second.shape[2] * cut, source.shape[-1]))
    wide = _WIDE_COPIES * min(inner, WIDE_BLOCK) if size < 4 else 0.0
    later = local_bytes(first) if first.requires_grad else 0.0
    return Working(
        forward=size * (inner + 2.0 * hidden),
        backward=max(
            size * (hidden + 2.0 * inner) + wide - later,
            size * (inner + outer) - later,
            size * (outer + 2.0 * hidden),
        ),
    )


def _attention(node: Node, values: Mapping[str, Value], local_bytes: LocalBytes) -> Working:
    """Backward, the gradient of a bias as fused kernels give it: of every sample and head, then summed to the bias."""
    query, key = (values[name] for name in node.inputs[:2])
    bias = values[node.inputs[3]] if len(node.inputs) > 3 else None
    if bias is None or not bias.requires_grad:
        return Working()
    of_each = local_bytes(query) / query.shape[-1] * key.shape[-2]
    return Working(backward=max(0.0, of_each - local_bytes(bias)))


def _gated_delta_rule(node: Node, values: Mapping[str, Value], local_bytes: LocalBytes) -> Working:
    """Chunks, their pairs, solutions and states, in at least float32."""
    _, key, value, decay = (values[name] for name in node.inputs[:4])
    (tokens, width), size = key.shape[1::2], item_size(node.output.dtype)
    heads = local_bytes(key) / (item_size(key.dtype) * tokens * width)
    forward, backward = DeltaRuleCall(heads, tokens, width, value.shape[3], len(decay.shape)).held
    return Working(size * forward, size * backward)


_OPERATORS: Mapping[str, Callable[[Node, Mapping[str, Value], LocalBytes], Working]] = {
    "aten.scaled_dot_product_attention.default": _attention,
    "meshwright.expert_linear": _expert_linear,
    "meshwright.experts.default": _experts,
    GATED_DELTA_RULE: _gated_delta_rule,
    "meshwright.linear_cross_entropy.default": _linear_cross_entropy,
}
