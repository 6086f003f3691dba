"""Put into a graph the copies of repeated entries that tracing skipped.

Unit 1 of every ``RepeatedEntries`` is the template: the graph of the whole model has it again for each unit that was
skipped, with that unit's states in place of its own, and what it took from unit 0 taken from the unit before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from passes.capture.naming import Namer, identifier, name_wishes
from passes.capture.repeats import RepeatedEntries
from passes.capture.shorten import SKIPPED, NotRepeated
from passes.ir.graph import Graph, Node, Ref, State, Value, map_refs, node_keys


def unfold(graph: Graph, repeats: Sequence[RepeatedEntries]) -> Graph:
    """The graph of the whole model from that of the shortened one.

    Raises:
        NotRepeated: if the graph does not show that the copies are all alike.
    """
    if graph.parameter_writes:
        raise NotRepeated(graph.parameter_writes[0].path)
    units = [_Units(graph, number, repeat) for number, repeat in enumerate(repeats)]
    for each in units:
        each.check()
    markers = _markers(graph, units)
    copies = {name: placed for each in units for name, placed in each.copies().items()}
    layout: list[_Placed] = []
    for node in graph.nodes:
        layout.extend(copies.get(node.name, ()))
        if node.op != SKIPPED:
            layout.append(_Placed(node, node.module_path, markers, tuple(value.name for value in node.outputs)))
    states = _with_copied_states(graph.states, repeats)
    return _named(graph, states, layout, markers)


@dataclass(frozen=True)
class _Placed:
    """A node where it will stand: its provisional output names, and which values its arguments really are."""

    node: Node
    module_path: str
    sources: Mapping[str, str]
    outputs: tuple[str, ...]


class _Units:
    """The units of one repeat, as far as the graph has them.

    A value of unit u is written ``@repeat:u:position of its node:output`` where units are compared and copied, a state
    ``@path``.
    """

    def __init__(self, graph: Graph, number: int, repeat: RepeatedEntries) -> None:
        self.graph = graph
        self.number = number
        self.repeat = repeat
        self.bodies: dict[int, list[Node]] = {0: [], 1: [], repeat.last: []}
        for node in graph.nodes:
            entry = repeat.entry_of(node.module_path)
            if entry is not None and node.op != SKIPPED and not (node.constant and repeat.unit(entry) == 0):
                self.expect(not repeat.is_copied(entry))
                self.bodies[repeat.unit(entry)].append(node)
        self.places = {
            value.name: (unit, position, index)
            for unit, body in self.bodies.items()
            for position, node in enumerate(body)
            for index, value in enumerate(node.outputs)
        }
        self.states = {
            state.value.name: state
            for state in graph.states
            if state.value.kind != "constant" and repeat.entry_of(state.path) is not None
        }
        self.sources = {
            node.name: (node.args[0].name, repeat.unit(node.args[2]))
            for node in graph.nodes
            if node.op == SKIPPED and node.args[1] == number
        }
        self.expect(self.bodies[1] and self.bodies[repeat.last])

    def expect(self, holds: Any) -> None:
        if not holds:
            raise NotRepeated(self.repeat.path)

    def check(self) -> None:
        """The traced units are alike, and the last takes from the last copy what unit 1 does of 0."""
        last = self.repeat.last
        self.expect(not any(node.constant for unit in (1, last) for node in self.bodies[unit]))
        self.expect(not any(state.aliases for state in self.states.values()))
        for node in self.graph.nodes:
            own = self.repeat.entry_of(node.module_path)
            owners = {self.repeat.entry_of(self.states[name].path) for name in node.inputs if name in self.states}
            self.expect(owners <= {own})
        self.expect(all(len(body) == len(self.bodies[1]) for body in self.bodies.values()))
        for first, template, final in zip(self.bodies[0], self.bodies[1], self.bodies[last]):
            self.expect(_same_call(first, template) and _same_call(final, template))
            self.expect(self.repeat.moved(template.module_path, unit=last) == final.module_path)
            expected = [self.in_unit(name, last) for name in template.inputs]
            self.expect([self.resolved(name) for name in final.inputs] == expected)

    def in_unit(self, name: str, unit: int) -> str:
        """What the template's input ``name`` is for another unit."""
        if name in self.states:
            state = self.states[name]
            self.expect(self.repeat.unit(self.repeat.entry_of(state.path) or 0) == 1)
            return f"@{self.repeat.moved(state.path, unit=unit)}"
        if name not in self.places:
            return name
        own, position, index = self.places[name]
        self.expect(own < 2)
        return f"@{self.number}:{unit - 1 + own}:{position}:{index}"

    def resolved(self, name: str) -> str:
        """What an input of the last unit is, in the same notation."""
        if name in self.states:
            return f"@{self.states[name].path}"
        if name in self.sources:
            source, unit = self.sources[name]
            return self.in_unit(source, unit)
        if name in self.places:
            unit, position, index = self.places[name]
            return f"@{self.number}:{unit}:{position}:{index}"
        return name

    def traced_values(self) -> dict[str, str]:
        """Values of unit 1 in this notation → their names."""
        return {
            f"@{self.number}:{unit}:{position}:{index}": name
            for name, (unit, position, index) in self.places.items()
            if unit == 1
        }

    def stretches(self) -> list[tuple[int, int]]:
        """The template cut where other nodes stand between (what writes buffers comes at the end of the graph)."""
        order = {node.name: index for index, node in enumerate(n for n in self.graph.nodes if n.op != SKIPPED)}
        template, last = ([order[node.name] for node in self.bodies[unit]] for unit in (1, self.repeat.last))
        cuts = [i for i in range(1, len(template)) if template[i] != template[i - 1] + 1]
        stretches = list(zip([0, *cuts], [*cuts, len(template)]))
        for start, stop in stretches:
            # The last unit follows the template at once: what is copied belongs between them.
            self.expect(last[start:stop] == list(range(template[stop - 1] + 1, template[stop - 1] + 1 + stop - start)))
        return stretches

    def copies(self) -> dict[str, list[_Placed]]:
        """The nodes of the units that were skipped, by the node of the last unit that they stand before."""
        template, last = self.bodies[1], self.bodies[self.repeat.last]
        copies: dict[str, list[_Placed]] = {last[start].name: [] for start, _ in self.stretches()}
        names = {name for node in template for name in node.inputs}
        paths = {node.module_path for node in template}
        for unit in range(2, self.repeat.last):
            sources = {name: self.in_unit(name, unit) for name in names}
            moved = {path: self.repeat.moved(path, unit=unit) for path in paths}
            for position, node in enumerate(template):
                if last[position].name in copies:
                    placed = copies[last[position].name]
                outputs = tuple(f"@{self.number}:{unit}:{position}:{index}" for index in range(len(node.outputs)))
                placed.append(_Placed(node, moved[node.module_path], sources, outputs))
        return copies


def _same_call(node: Node, template: Node) -> bool:
    return (
        (node.op, node.constants, node.module_class, len(node.inputs))
        == (template.op, template.constants, template.module_class, len(template.inputs))
        and [(value.shape, value.dtype) for value in node.outputs]
        == [(value.shape, value.dtype) for value in template.outputs]
    )  # fmt: skip


def _markers(graph: Graph, units: Sequence[_Units]) -> dict[str, str]:
    """What stands for an output of a copy → that output. Only the last unit and the model's outputs may use it.

    Values of unit 1 that are written as such → their names too.
    """
    markers: dict[str, str] = {}
    for each in units:
        markers.update((marker, each.resolved(marker)) for marker in each.sources)
        markers.update(each.traced_values())
    allowed = {node.name for each in units for node in each.bodies[each.repeat.last]}
    for node in graph.nodes:
        uses = not markers.keys().isdisjoint(node.inputs)
        if (uses and node.name not in allowed) or (node.op == SKIPPED and node.constant):
            raise NotRepeated(node.module_path)
    return markers


def _with_copied_states(states: Sequence[State], repeats: Sequence[RepeatedEntries]) -> list[State]:
    """States in the order of the whole model, those of a copy after those of the units before it."""
    ordered = list(states)
    for repeat in repeats:
        for kind in ("parameter", "buffer"):
            units = {index: _unit_of(state, repeat) for index, state in enumerate(ordered) if state.value.kind == kind}
            templates = [ordered[index] for index, unit in units.items() if unit == 1]
            if templates:
                after = max(index for index, unit in units.items() if unit == 1) + 1
                ordered[after:after] = [
                    replace(state, path=repeat.moved(state.path, unit=unit))
                    for unit in range(2, repeat.last)
                    for state in templates
                ]
    return ordered


def _unit_of(state: State, repeat: RepeatedEntries) -> int | None:
    entry = repeat.entry_of(state.path)
    return None if entry is None else repeat.unit(entry)


def _named(graph: Graph, states: Sequence[State], layout: Sequence[_Placed], markers: Mapping[str, str]) -> Graph:
    """The graph of all these states and nodes, with the names that capturing the whole model gives them."""
    namer = Namer()
    final: dict[str, str] = {}
    named_states = []
    for state in states:
        name = namer.name(state.path)
        named_states.append(replace(state, value=replace(state.value, name=name)))
        final.setdefault(f"@{state.path}", name)
    final.update((state.value.name, final[f"@{state.path}"]) for state in graph.states)
    inputs = [replace(value, name=namer.name(value.name)) for value in graph.inputs]
    final.update((old.name, new.name) for old, new in zip(graph.inputs, inputs))

    def name_of(source: str, sources: Mapping[str, str]) -> str:
        while source in sources:
            source, sources = sources[source], markers
        return final[source]

    nodes = []
    calls = [(placed.module_path, placed.node.op) for placed in layout]
    for placed, wish, key in zip(layout, name_wishes(calls), node_keys(calls)):
        names = [namer.name(each) for each in _output_wishes(placed.node, wish)]
        refs = {name: Ref(name_of(name, placed.sources)) for name in placed.node.inputs}
        nodes.append(_renamed(placed, names, refs, key))
        final.update(zip(placed.outputs, names))
    outputs = {path: name_of(name, markers) for path, name in graph.outputs.items()}
    return graph.replace(inputs=tuple(inputs), states=tuple(named_states), nodes=tuple(nodes), outputs=outputs)


def _renamed(placed: _Placed, names: Sequence[str], refs: Mapping[str, Ref], key: str) -> Node:
    node = placed.node
    args, kwargs = map_refs((node.args, node.kwargs), lambda ref: refs[ref.name])
    values = tuple(
        Value(name, value.shape, value.dtype, value.kind, value.requires_grad)
        for value, name in zip(node.outputs, names)
    )
    return Node(names[0], node.op, args, kwargs, values, placed.module_path, node.module_class, node.constant, key)


def _output_wishes(node: Node, wish: str) -> list[str]:
    """One name for each output; of an operator that gives a list, numbered from 0 (also if the list has one entry)."""
    # The namer numbers single values from 1 on.
    first = f"{identifier(wish)}_0"
    listed = node.name == first or (node.name.startswith(f"{first}_") and node.name[len(first) + 1 :].isdigit())
    return [f"{wish}_{index}" for index in range(len(node.outputs))] if listed else [wish]
