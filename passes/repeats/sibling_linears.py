"""Linear layers of one input, which may share one exchange of its rows: queries, keys and values; gate and up."""

from __future__ import annotations

from collections.abc import Iterable

from passes.ir.derived_values import state_derived
from passes.ir.graph import Graph
from passes.rules.linear_rows import LINEAR

#: Of more layers the first are grouped, and the next: each subset of a group has a price of its own.
MOST_SIBLINGS = 6


def sibling_linears(graph: Graph, units: Iterable[Iterable[str]]) -> tuple[tuple[str, ...], ...]:
    """Names of linear layers of one input in one of ``units`` (names of operators), two or more, in the graph's order.

    Weights and biases are computed from states alone, so that those of all layers can be had before the first runs.
    """
    states = state_derived(graph)
    unit_of = {name: index for index, names in enumerate(units) for name in names}
    by_input: dict[tuple[int, str], list[str]] = {}
    for node in graph.nodes:
        if node.op == LINEAR and node.name in unit_of and states.issuperset(node.inputs[1:]):
            by_input.setdefault((unit_of[node.name], node.inputs[0]), []).append(node.name)
    return tuple(
        tuple(names[first : first + MOST_SIBLINGS])
        for names in by_input.values()
        for first in range(0, len(names), MOST_SIBLINGS)
        if len(names) - first > 1
    )
