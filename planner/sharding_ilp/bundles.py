"""How many bytes of gradients are reduced together: those of all parameters that a unit of the model uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from passes.ir.graph import ITEM_SIZE, Graph
from passes.repeats.model_units import ModelUnit, find_units
from passes.repeats.repeated_blocks import find_blocks

#: Parameter (name of its value) → bytes of the gradients of its bundle, whole.
Bundles = Mapping[str, int]


def bundles_of(graph: Graph) -> Bundles:
    """The bundles of a graph whose plan is on a given mesh; every copy of a repeated block is a unit.

    A parameter that several units use is a bundle of its own. All plans are priced this way, however they group copies.
    """
    runs = find_blocks(graph)
    parameters = {
        state.value.name: state.value
        for state in graph.states
        if state.value.kind == "parameter" and state.value.requires_grad
    }
    nodes = {node.name: node for node in graph.nodes}
    users: dict[str, list[int]] = {}
    for index, names in enumerate(_nodes_of_copies(find_units(graph, runs), [run.copies for run in runs])):
        for used in dict.fromkeys(used for name in names for used in nodes[name].inputs if used in parameters):
            users.setdefault(used, []).append(index)
    bundles: dict[tuple[int | str, str], list[str]] = {}
    for name, units in users.items():
        unit = units[0] if len(units) == 1 else name
        bundles.setdefault((unit, parameters[name].dtype), []).append(name)
    num_bytes: dict[str, int] = {}
    for (_, dtype), together in bundles.items():
        size = sum(parameters[name].num_elements for name in together) * ITEM_SIZE[dtype]
        num_bytes.update(dict.fromkeys(together, size))
    return num_bytes


def _nodes_of_copies(
    units: tuple[ModelUnit, ...], copies_of: list[tuple[tuple[str, ...], ...]]
) -> Iterator[tuple[str, ...]]:
    """The operators of every unit, copy by copy."""
    for unit in units:
        if unit.run is None:
            yield unit.nodes
        else:
            yield from copies_of[unit.run]
