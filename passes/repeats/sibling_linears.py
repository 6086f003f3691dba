"""Linear layers of one input, which may share one exchange of its rows: queries, keys and values; gate and up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from passes.ir.derived_values import state_derived
from passes.ir.graph import Graph
from passes.repeats.repeated_blocks import BlockRun
from passes.rules.linear_rows import LINEAR

#: Of more layers the first are grouped, and the next: each subset of a group has a price of its own.
MOST_SIBLINGS = 6


def sibling_linears(
    graph: Graph, unit_of: Mapping[str, int], blocks: Sequence[BlockRun]
) -> tuple[tuple[str, ...], ...]:
    """Names of linear layers of one input, two or more, in the graph's order.

    Weights and biases are computed from states alone, so that those of all layers can be had before the first runs.

    Args:
        unit_of: unit of each operator that is planned: what a pipeline may cut, or recomputation leave out, is apart.
        blocks: the shortest blocks that repeat: copies of one are apart, also where several are planned as one.
    """
    states = state_derived(graph)
    copy_of = {
        name: (index, number)
        for index, run in enumerate(blocks)
        for number, copy in enumerate(run.copies)
        for name in copy
    }
    by_input: dict[tuple[object, ...], list[str]] = {}
    for node in graph.nodes:
        if node.op == LINEAR and node.name in unit_of and states.issuperset(node.inputs[1:]):
            place = (unit_of[node.name], copy_of.get(node.name))
            by_input.setdefault((place, node.inputs[0]), []).append(node.name)
    return tuple(
        tuple(names[first : first + MOST_SIBLINGS])
        for names in by_input.values()
        for first in range(0, len(names), MOST_SIBLINGS)
        if len(names) - first > 1
    )
