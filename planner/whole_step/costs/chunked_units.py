"""Which units of a training step may compute their loss in chunks."""

from __future__ import annotations

from collections.abc import Sequence

from passes.ir.graph import Graph
from passes.losses import ChunkedUnits
from passes.repeats.model_units import ModelUnit
from passes.repeats.repeated_blocks import BlockRun


def chunked_units(graph: Graph, runs: Sequence[BlockRun], units: Sequence[ModelUnit]) -> ChunkedUnits:
    """Those in which a linear layer's output goes to cross-entropy alone; nothing but the loss comes out of a step."""
    if graph.loss is None or not graph.training:
        return ChunkedUnits(graph)
    chunked = ChunkedUnits.of(graph, runs, units, results={graph.outputs[graph.loss]})
    if chunked.pairs:
        # Registers the operator: rules and records of its calls ask torch about it.
        import runtime.kernels  # noqa: F401
    return chunked
