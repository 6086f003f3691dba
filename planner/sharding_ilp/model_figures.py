"""What a model is, whatever the plan: samples of its batch, flops of its step, the dtype that it computes in."""

from __future__ import annotations

from typing import Any

from passes.ir.graph import Graph
from passes.rules import forward_flops

#: Forward and backward of a model are three forward passes: one product forward, two backward (Narayanan et al. 2021).
PASSES = 3.0


def batch_size_of(graph: Graph) -> int:
    """Samples of the captured batch: the first dim that most inputs share (1 if no input has a dim)."""
    sizes = [value.shape[0] for value in graph.inputs if value.shape]
    return max(set(sizes), key=lambda size: (sizes.count(size), size)) if sizes else 1


def model_flops(graph: Graph) -> float:
    """Floating point operations of one step on the global batch, forward and backward, attention counted whole.

    That is the convention of model flops utilisation (Chowdhery et al. 2022, appendix B): nothing recomputed, and
    causal attention not halved.
    """
    values = graph.values
    total = 0.0
    for node in graph.nodes:
        flops = forward_flops(node, values) if not node.constant else 0.0
        if flops and "scaled_dot_product_attention" in node.op and node.kwargs.get("is_causal", _causal(node.args)):
            flops *= 2.0
        total += flops
    return total * (PASSES if graph.training and graph.loss is not None else 1.0)


def _causal(args: tuple[Any, ...]) -> bool:
    """``is_causal`` among positional arguments of attention."""
    return len(args) > 5 and args[5] is True


def compute_dtype(graph: Graph) -> str:
    """The dtype of most parameters' bytes."""
    sizes: dict[str, int] = {}
    for state in graph.parameters:
        sizes[state.value.dtype] = sizes.get(state.value.dtype, 0) + state.value.num_bytes
    return max(sizes, key=lambda dtype: sizes[dtype], default="float32")
