"""What a model is, whatever the plan: samples of its batch, flops of its step, the dtype that it computes in."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from passes.ir.graph import Graph, Node, Value
from passes.rules import forward_flops

#: Products going backward for each going forward: the gradient of either operand is one (Narayanan et al. 2021).
BACKWARD = 2.0


def batch_size_of(graph: Graph) -> int:
    """Samples of the captured batch: the first dim that most inputs share (1 if no input has a dim)."""
    sizes = [value.shape[0] for value in graph.inputs if value.shape]
    return max(set(sizes), key=lambda size: (sizes.count(size), size)) if sizes else 1


def model_flops(graph: Graph) -> float:
    """Floating point operations of one step on the global batch, forward and backward, attention counted whole.

    That is the convention of model flops utilisation (Chowdhery et al. 2022, appendix B): nothing recomputed, and
    causal attention not halved. Gradients that nobody needs since parameters are frozen are no part of it.
    """
    values, trains = graph.values, graph.training and graph.loss is not None
    frozen = _frozen_values(graph)
    total = 0.0
    for node in graph.nodes:
        flops = forward_flops(node, values) if not node.constant else 0.0
        if flops and "scaled_dot_product_attention" in node.op and node.kwargs.get("is_causal", _causal(node.args)):
            flops *= 2.0
        if flops:
            total += flops * (1.0 + BACKWARD * _trained_share(node, values, frozen) * trains)
    return total


def _frozen_values(graph: Graph) -> set[str]:
    """Names of frozen parameters, and of what has no gradient because it is computed of them."""
    values = graph.values
    frozen = {state.value.name for state in graph.parameters if not state.value.requires_grad}
    for node in graph.nodes:
        if not frozen.isdisjoint(node.inputs) and not any(values[name].requires_grad for name in node.inputs):
            frozen.update(value.name for value in node.outputs)
    return frozen


def _trained_share(node: Node, values: Mapping[str, Value], frozen: Collection[str]) -> float:
    """Of a product's operands (biases and indices are none), the share whose gradients are computed."""
    if node.output.name in frozen:
        return 0.0
    inputs = [values[name] for name in node.inputs]
    operands = [value for value in inputs if len(value.shape) > 1 and (value.name in frozen or "float" in value.dtype)]
    return sum(value.name not in frozen for value in operands) / len(operands) if operands else 1.0


def _causal(args: tuple[Any, ...]) -> bool:
    """``is_causal`` among positional arguments of attention."""
    return len(args) > 5 and args[5] is True


def compute_dtype(graph: Graph) -> str:
    """The dtype of most parameters' bytes."""
    sizes: dict[str, int] = {}
    for state in graph.parameters:
        sizes[state.value.dtype] = sizes.get(state.value.dtype, 0) + state.value.num_bytes
    return max(sizes, key=lambda dtype: sizes[dtype], default="float32")
