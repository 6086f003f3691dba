"""Where two traces of a model that took different branches differ, and where they come together again.

Values that both traces compute alike are shared. From the outputs upwards, operators that both call alike on operands
that differ are matched, as deep as that goes: below, two values are joined. ``f(select(x, y))`` is
``select(f(x), f(y))``, so a join is right wherever it is.

    loss = a.square() + b.exp()      add is matched, a.square() is shared,
    loss = a.square() + b.sum() * 0  b.exp() and b.sum() * 0 are joined
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from passes.capture.same_program import ValueNumbers
from passes.ir.errors import CaptureError
from passes.ir.graph import Graph, Node


@dataclass
class BranchPairs:
    """How a graph differs from the first one.

    Attributes:
        shared: values of the other graph → values of the first one that are computed alike.
        matched: nodes of the first graph, by name → those of the other one, whose operands differ.
        joins: (node of the first graph or "", number of its operand, or name of an output) → the two values that are
            joined there.
    """

    shared: dict[str, str]
    matched: dict[str, Node] = field(default_factory=dict)
    joins: dict[tuple[str, object], tuple[str, str]] = field(default_factory=dict)

    @property
    def names(self) -> dict[str, str]:
        """Values of the other graph → values of the first one, of shared and of matched nodes."""
        return self.shared | self._outputs_of_matched

    _outputs_of_matched: dict[str, str] = field(default_factory=dict)


def pairs_of(first: Graph, other: Graph, outputs: Mapping[object, tuple[str, str]]) -> BranchPairs:
    """How ``other`` differs from ``first``.

    Args:
        outputs: pairs of values that the graphs are asked for.

    Raises:
        CaptureError: if what differs has other shapes.
    """
    return _Pairing(first, other).run(outputs)


class _Pairing:
    def __init__(self, first: Graph, other: Graph) -> None:
        self.first, self.other = first, other
        numbers = ValueNumbers()
        self.numbers, self.of_other = numbers.of_values(first), numbers.of_values(other)
        names = {number: name for name, number in reversed(self.numbers.items())}
        shared = {name: names[number] for name, number in self.of_other.items() if number in names}
        self.pairs = BranchPairs(shared)
        self.producers = producers(first)
        self.producers_of_other = producers(other)
        self.numbers_of_other = set(self.of_other.values())
        self.partners: dict[str, str] = {}

    def run(self, outputs: Mapping[object, tuple[str, str]]) -> BranchPairs:
        waiting = [("", key, *pair) for key, pair in outputs.items()]
        while waiting:
            user, place, one, other = waiting.pop()
            if self.numbers[one] == self.of_other[other]:
                continue
            if self.pairs._outputs_of_matched.get(other) == one:
                continue
            nodes = self._alike(one, other)
            if nodes is None:
                self._join(user, place, one, other)
                continue
            node, of_other = nodes
            self._match(node, of_other)
            waiting += [(node.name, n, *pair) for n, pair in enumerate(zip(node.inputs, of_other.inputs))]
        return self.pairs

    def _match(self, node: Node, other: Node) -> None:
        self.partners[node.name] = other.name
        self.pairs.matched[node.name] = other
        self.pairs._outputs_of_matched.update(
            (value.name, own.name) for own, value in zip(node.outputs, other.outputs, strict=True)
        )

    def _alike(self, one: str, other: str) -> tuple[Node, Node] | None:
        """The nodes that give two values, if one node can take the place of both."""
        node, of_other = self.producers.get(one), self.producers_of_other.get(other)
        if node is None or of_other is None or (node.op, node.constants) != (of_other.op, of_other.constants):
            return None
        places = [[value.name for value in each.outputs] for each in (node, of_other)]
        if node.draw != of_other.draw or (node.writes_buffer and not self._same_target(node, of_other)):
            return None
        is_same_output = places[0].index(one) == places[1].index(other)
        is_common = self.numbers[one] in self.numbers_of_other or other in self.pairs.shared
        if not is_same_output or is_common or node.name in self.partners or other in self.pairs._outputs_of_matched:
            return None
        operands = zip((*node.inputs, *places[0]), (*of_other.inputs, *places[1]))
        are_alike = all(self._same_form(*pair) for pair in operands)
        return (node, of_other) if are_alike and len(places[0]) == len(places[1]) else None

    def _same_target(self, node: Node, other: Node) -> bool:
        return self.numbers[node.inputs[0]] == self.of_other[other.inputs[0]]

    def _join(self, user: str, place: object, one: str, other: str) -> None:
        producer = self.producers.get(one)
        if not self._same_form(one, other) or (producer is not None and producer.writes_buffer):
            raise CaptureError("its branches give tensors of several shapes or dtypes")
        self.pairs.joins[user, place] = (one, other)

    def _same_form(self, one: str, other: str) -> bool:
        first, second = self.first.values[one], self.other.values[other]
        return (first.shape, first.dtype) == (second.shape, second.dtype)


def producers(graph: Graph) -> dict[str, Node]:
    """The node that gives each value."""
    return {value.name: node for node in graph.nodes for value in node.outputs}


def exclusive_nodes(graph: Graph, ends: Iterable[str], common: Iterable[str]) -> list[Node]:
    """The nodes that lead to ``ends`` and are not ``common`` values', in the order of the graph."""
    nodes_of, common = producers(graph), set(common)
    names: set[str] = set()
    waiting = list(ends)
    while waiting:
        name = waiting.pop()
        node = nodes_of.get(name)
        if node is not None and name not in common and node.name not in names:
            names.add(node.name)
            waiting += node.inputs
    return [node for node in graph.nodes if node.name in names]
