"""The graph as a chain of units: what a pipeline may cut between, and what crosses each cut.

A unit is one copy of a repeated block, or a stretch of operators between blocks. A stretch is cut further wherever only
one value with a gradient crosses and both sides compute something (a matrix product, a convolution, a recurrent layer),
so that models without repeated blocks can be cut too. Smaller values that only the end of the model uses, behind all
that is heavy, may cross with it: what routers say of each token, for a load-balancing loss. What is written to a buffer
crosses nothing, though writes stand at the end of the graph: each is done where its content is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from passes.ir.graph import Graph, Node
from passes.repeats.repeated_blocks import BlockRun
from passes.rules.flops import FLOPS
from passes.rules.kinds import ATTENTION, CONVOLUTION, MATMUL, kind_of

#: Kinds of operators that make a piece of a stretch worth a unit of its own; so do others that compute more than they
#: move (recurrent layers).
HEAVY_KINDS = frozenset((MATMUL, CONVOLUTION, ATTENTION))


@dataclass(frozen=True)
class ModelUnit:
    """``count`` copies in a row of the same operators.

    Attributes:
        name: module path of the first copy, for people.
        run: index of the repeated block, None for a stretch.
        nodes: names of the operators of the first copy, in order.
        entering: values that a pipeline must send if it cuts before a copy (of a run: between two copies).
        carried: of those, the ones that this unit takes from the one before (others only pass through).
    """

    name: str
    count: int
    run: int | None
    nodes: tuple[str, ...]
    entering: tuple[str, ...]
    carried: tuple[str, ...]


def find_units(graph: Graph, runs: Sequence[BlockRun]) -> tuple[ModelUnit, ...]:
    """The chain of units of ``graph``, whose repeated blocks are ``runs``."""
    return _Chain(graph, runs).units()


class _Chain:
    def __init__(self, graph: Graph, runs: Sequence[BlockRun]) -> None:
        self.graph = graph
        self.runs = runs
        self.values = graph.values
        self.nodes = {node.name: node for node in graph.nodes}
        self.order = [node.name for node in graph.nodes if not node.constant]
        self.position = {name: index for index, name in enumerate(self.order)}
        self.easy = made_anywhere(graph)
        self.maker: dict[str, int] = {}
        self.last_use: dict[str, int] = {}
        self.uses: dict[str, list[int]] = {}
        self.last_heavy = max((index for index, name in enumerate(self.order) if self._heavy(name)), default=-1)
        for index, name in enumerate(self.order):
            for value in self.nodes[name].outputs:
                self.maker[value.name] = index
            for used in () if self.nodes[name].writes_buffer else self.nodes[name].inputs:
                self.last_use[used] = index
                self.uses.setdefault(used, []).append(index)

    def units(self) -> tuple[ModelUnit, ...]:
        pieces = list(self._pieces())
        return tuple(self._unit(run, nodes) for run, nodes in pieces)

    def _pieces(self) -> Iterator[tuple[int | None, tuple[str, ...]]]:
        starts = {run.copies[0][0]: index for index, run in enumerate(self.runs)}
        inside = {name for run in self.runs for copy in run.copies for name in copy}
        stretch: list[str] = []
        for name in self.order:
            if name in starts:
                yield from self._cut(stretch)
                stretch = []
                yield starts[name], self.runs[starts[name]].copies[0]
            elif name not in inside:
                stretch.append(name)
        yield from self._cut(stretch)

    def _cut(self, stretch: Sequence[str]) -> Iterator[tuple[None, tuple[str, ...]]]:
        """Pieces of a stretch, each (but perhaps the first and last) with something heavy in it."""
        piece: list[str] = []
        left = sum(self._heavy(name) for name in stretch)
        for name in stretch:
            piece.append(name)
            left -= self._heavy(name)
            if left and any(self._heavy(other) for other in piece) and self._narrow(self.position[name]):
                yield None, tuple(piece)
                piece = []
        if piece:
            yield None, tuple(piece)

    def _heavy(self, name: str) -> bool:
        return is_heavy(self.nodes[name])

    def _narrow(self, position: int) -> bool:
        """Whether only one value crosses the edge behind ``position`` for the next operators, and it has a gradient."""
        crossing = list(self._crossing(position))
        near = [name for name in crossing if self._next_use(name, position) <= self.last_heavy]
        if len(near) != 1 or not self.values[near[0]].requires_grad:
            return False
        size = self.values[near[0]].num_elements
        others = [self.values[name] for name in crossing if name != near[0]]
        return all(value.requires_grad and value.num_elements < size for value in others)

    def _next_use(self, name: str, position: int) -> int:
        """The position of the first operator behind ``position`` that uses a value."""
        return next(use for use in self.uses[name] if use > position)

    def _crossing(self, position: int) -> Iterator[str]:
        """Values made up to ``position`` and used behind it that a stage cannot make itself (inputs are everywhere)."""
        for name, place in self.maker.items():
            if place <= position < self.last_use.get(name, -1) and name not in self.easy:
                yield name

    def _unit(self, run: int | None, nodes: tuple[str, ...]) -> ModelUnit:
        if run is None:
            start = self.position[nodes[0]]
            entering = tuple(self._crossing(start - 1))
            used = self._used(nodes)
            carried = tuple(name for name in entering if name in used)
            return ModelUnit(_path([self.nodes[n] for n in nodes]), 1, None, nodes, entering, carried)
        block = self.runs[run]
        end = self.position[block.copies[0][-1]]
        carried = tuple(names[0] for names in block.carried)
        outputs = set(block.carried_output)
        through = tuple(name for name in self._crossing(end) if name not in outputs)
        entering = (*carried, *through)
        return ModelUnit(" ".join(block.roots[0]), block.num_copies, run, nodes, entering, carried)

    def _used(self, nodes: Iterable[str]) -> frozenset[str]:
        return frozenset(value for name in nodes for value in self.nodes[name].inputs)


def _path(nodes: Sequence[Node]) -> str:
    """The deepest module path that all of ``nodes`` share, with the first and last module named if that is the root.

    Writes of buffers stand at the end of the graph and say nothing of where a unit ends.
    """
    paths = list(dict.fromkeys(node.module_path for node in nodes if node.module_path and not node.writes_buffer))
    if not paths:
        return nodes[0].key or nodes[0].name
    return paths[0] if len(paths) == 1 else f"{paths[0]} … {paths[-1]}"


def made_anywhere(graph: Graph) -> frozenset[str]:
    """Values that every stage makes for itself rather than being sent them: masks, positions, shifted labels.

    They are computed from the model's inputs, buffers and constants by light operators, and have no gradient.
    """
    available = {value.name for value in graph.inputs if not value.requires_grad}
    available.update(state.value.name for state in graph.states if state.value.kind != "parameter")
    for node in graph.nodes:
        light = not is_heavy(node) and not any(value.requires_grad for value in node.outputs)
        if light and all(name in available for name in node.inputs):
            available.update(value.name for value in node.outputs)
    return frozenset(available)


def is_heavy(node: Node) -> bool:
    """Whether a piece of a stretch with ``node`` in it is worth a unit of its own."""
    return kind_of(node) in HEAVY_KINDS or node.op in FLOPS


def unit_of_nodes(units: Sequence[ModelUnit]) -> Mapping[str, int]:
    """Operator name → index of its unit (first copies of runs only)."""
    return {name: index for index, unit in enumerate(units) for name in unit.nodes}
