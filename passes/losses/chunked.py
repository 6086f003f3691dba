"""Units whose loss may be computed in chunks: the graph and the chain of units as they are then."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from passes.ir.graph import Graph
from passes.losses.loss_pairs import LossPair, loss_pairs, with_pairs_fused
from passes.repeats.model_units import ModelUnit, find_units
from passes.repeats.repeated_blocks import BlockRun


@dataclass(frozen=True)
class ChunkedUnits:
    """The units of a graph in which a linear layer's output goes to cross-entropy and nowhere else.

    Attributes:
        graph: the graph with all of these pairs as one operator each.
        nodes: by index of such a unit, the names of its operators then.
        pairs: by the same.
    """

    graph: Graph
    nodes: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    pairs: Mapping[int, tuple[LossPair, ...]] = field(default_factory=dict)

    @staticmethod
    def of(
        graph: Graph,
        runs: Sequence[BlockRun],
        units: Sequence[ModelUnit],
        *,
        results: Collection[str],
        among: Collection[int] | None = None,
    ) -> ChunkedUnits:
        """Find them (of ``among`` alone, if given); ``results`` are the values that must come out of the graph.

        A unit that occurs several times is none of them: its copies share one choice of placements, and a loss in
        every layer is small. Nor is any where the chain of units would be cut elsewhere.
        """
        pairs_by_unit: dict[int, list[LossPair]] = {}
        for pair in loss_pairs(graph, results=results):
            for index, unit in enumerate(units):
                inside = {node.name for node in pair.replaced} <= set(unit.nodes)
                if inside and unit.run is None and (among is None or index in among):
                    pairs_by_unit.setdefault(index, []).append(pair)
        pairs = {index: tuple(each) for index, each in pairs_by_unit.items()}
        if not pairs:
            return ChunkedUnits(graph)
        fused = with_pairs_fused(graph, [pair for each in pairs.values() for pair in each])
        nodes = {index: _with_fused(units[index].nodes, each) for index, each in pairs.items()}
        expected_units = tuple(
            dataclasses.replace(unit, nodes=nodes.get(i, unit.nodes)) for i, unit in enumerate(units)
        )
        if [unit.nodes for unit in find_units(fused, runs)] != [unit.nodes for unit in expected_units]:
            return ChunkedUnits(graph)
        return ChunkedUnits(fused, nodes, pairs)


def _with_fused(nodes: Sequence[str], pairs: Sequence[LossPair]) -> tuple[str, ...]:
    stands_for: dict[str, list[str]] = {node.name: [] for pair in pairs for node in pair.replaced}
    stands_for |= {pair.loss.name: [node.name for node in pair.replacement] for pair in pairs}
    return tuple(name for node in nodes for name in stands_for.get(node, [node]))
