"""Why a model cannot be run in micro-batches: the operators that need all samples of a batch at once, or no loss."""

from __future__ import annotations

from collections.abc import Collection

from passes.ir.graph import Node
from passes.ir.types import P
from planner.whole_step.best_first import Search

_WITHOUT_LOSS = (
    "the model returns no loss, and what a call returns is of the whole batch, so num_microbatches must be 1: give "
    "loss_fn, or let the model return its loss"
)
#: How many operators the message names.
_NAMED = 3


def mixed_samples(search: Search) -> str:
    """What mixes the samples of a batch, or that there is no loss, and what would help, as text; "" if neither."""
    followed = search.level_one.space.followed
    graph = search.level_one.space.graph
    if not followed.mixing:
        return "" if graph.loss is not None else _WITHOUT_LOSS
    nodes = {node.name: node for node in graph.nodes}
    mixers = [nodes[name] for name in dict.fromkeys(followed.mixers)]
    named = "; ".join(_described(node, followed.mixing) for node in mixers[:_NAMED])
    more = f"; and {len(mixers) - _NAMED} more" if len(mixers) > _NAMED else ""
    text = f"the model mixes the samples of a batch, so num_microbatches must be 1: {named}{more}"
    if any(followed.types.get(name) == P for node in mixers for name in node.inputs):
        text += (
            ". What is computed from means over the batch that have gradients (the square of a mean, say) has another "
            "value on each micro-batch: train with num_microbatches = 1, or leave it out of the loss"
        )
    return text


def _described(node: Node, mixing: Collection[str]) -> str:
    place = f"module {node.module_path!r} ({node.module_class})" if node.module_path else "the model itself or its loss"
    needed = [name for name in dict.fromkeys(node.inputs) if name in mixing]
    what = "writes a buffer once a step" if node.writes_buffer else f"needs {', '.join(needed[:2])} of all samples"
    return f"{node.op} in {place} {what}"
