"""Which units of a training step may compute their loss in chunks."""

from __future__ import annotations

from collections.abc import Sequence

from passes.ir.graph import Graph
from passes.losses import ChunkedUnits
from passes.repeats.model_units import ModelUnit
from passes.repeats.repeated_blocks import BlockRun
from runtime.program_tools.fused_operators import register_before_asking


def chunked_units(graph: Graph, runs: Sequence[BlockRun], units: Sequence[ModelUnit]) -> ChunkedUnits:
    """Those in which a linear layer's output goes to cross-entropy alone; nothing but the loss comes out of a step."""
    if graph.loss is None or not graph.training:
        return ChunkedUnits(graph)
    chunked = ChunkedUnits.of(graph, runs, units, results={graph.outputs[graph.loss]})
    if chunked.pairs:
        register_before_asking()  # rules and records of the operator's calls
    return chunked
