"""Whether two graphs compute the same."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from passes.capture.draws import number_draws
from passes.ir.graph import Graph


def same_graph(first: Graph, second: Graph) -> bool:
    """Whether two graphs are equal, node by node, with the same literal tensors."""
    literals = [(one.data, other.data) for one, other in zip(first.states, second.states) if one.data is not None]
    return first == second and all(other is not None and torch.equal(one, other) for one, other in literals)


def same_from_constants(first: Graph, second: Graph, constants: Mapping[str, str]) -> bool:
    """Whether both have the same outputs, written buffers and draws, where ``second`` reads what ``first`` computes.

    Args:
        constants: states of ``second`` → outputs of ``first`` that it finds there, which ``second`` has not. They are
            constants if they are the same at every call.
    """
    numbers = ValueNumbers()
    one = numbers.of_values(first)
    constant = _same_at_every_call(first)
    if not constant.issuperset(first.outputs[output] for output in constants.values()):
        return False
    computed = {state: one[first.outputs[output]] for state, output in constants.items()}
    other = numbers.of_values(second, computed)
    outputs = {path: one[first.outputs[path]] for path in second.outputs if path in first.outputs}
    return (
        outputs == {path: other[name] for path, name in second.outputs.items()}
        and _effects(first, one) == _effects(second, other)
        and (first.loss, first.training, first.guards) == (second.loss, second.training, second.guards)
    )


def _same_at_every_call(graph: Graph) -> set[str]:
    """Values that come from shapes, literals and buffers that the graph does not write, without random numbers."""
    written = {node.inputs[0] for node in graph.nodes if node.writes_buffer}
    buffers = {state.value.name for state in graph.states if state.value.kind == "buffer"}
    same = {state.value.name for state in graph.states if state.data is not None} | (buffers - written)
    for node in number_draws(graph).nodes:
        if node.draw is None and same.issuperset(node.inputs):
            same.update(value.name for value in node.outputs)
    return same


def _effects(graph: Graph, numbers: Mapping[str, int]) -> tuple[list[int], int]:
    """The writes of buffers in their order, and how many random numbers are drawn."""
    writes = [numbers[node.output.name] for node in graph.nodes if node.writes_buffer]
    return writes, sum(node.draw is not None for node in number_draws(graph).nodes)


class ValueNumbers:
    """Numbers of values: equal for values that are computed alike."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}
        self._literals: list[torch.Tensor] = []

    def of_values(self, graph: Graph, computed: Mapping[str, int] | None = None) -> dict[str, int]:
        """The number of each value of a graph.

        Args:
            computed: numbers of states that hold what another graph computes.
        """
        computed = computed or {}
        numbers: dict[str, int] = {}
        for value, path in zip(graph.inputs, graph.input_paths):
            numbers[value.name] = self._number(("input", path, value.shape, value.dtype))
        for state in graph.states:
            what = self._literal(state.data) if state.data is not None else (state.value.kind, state.path)
            name = state.value.name
            numbers[name] = computed[name] if name in computed else self._number(what)
        for node in number_draws(graph).nodes:
            inputs = tuple(numbers[name] for name in node.inputs)
            for place, value in enumerate(node.outputs):
                numbers[value.name] = self._number((node.op, node.constants, inputs, node.draw, place))
        return numbers

    def _number(self, what: object) -> int:
        return self._numbers.setdefault(what, len(self._numbers))

    def _literal(self, data: torch.Tensor) -> tuple[str, int]:
        for place, other in enumerate(self._literals):
            if (data.shape, data.dtype) == (other.shape, other.dtype) and torch.equal(data, other):
                return "literal", place
        self._literals.append(data)
        return "literal", len(self._literals) - 1
