"""The search problem as plain data: elements that choose an option, and streams that carry values between them.

An *element* is an operator, or a pseudo-operator that stands for where a value comes from (input, parameter, buffer,
constant), where it goes (output), or what a repeated block hands to its next copy (carry: an identity whose option is
the one type that every copy takes). A *stream* is one value with all its uses. Of a repeated block only the first copy
is in the problem; ``copies`` says how often its parts count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from passes.ir.graph import Graph, Node, Value
from passes.ir.types import MeshShape, Placement
from passes.repeats.repeated_blocks import BlockRun
from passes.rules.rule import TABLE
from planner.sharding_ilp.liveness import live_nodes, saved_values
from planner.sharding_ilp.options import Option

Kind = Literal["op", "input", "parameter", "buffer", "constant", "carry", "output"]
#: Where a use stands, seen from a value of a repeated block: in the same copy, in the next copy, behind the block.
Scope = Literal["inner", "next", "exit"]


@dataclass
class Element:
    """Something that chooses one of ``options``.

    ``key`` names it for people and in plans: node key, ``input:…``, ``state:…``, ``carry:…#…``, ``output:…``.
    ``streams`` are the names of the streams of its inputs, one per entry of ``Option.inputs``. ``follows``: it costs
    the same however it is placed, so its placement is told by its uses once those are chosen. ``rule_source`` says
    where its sharding rule is from (``ShardingRule.source``).
    """

    key: str
    kind: Kind
    copies: int
    streams: tuple[str, ...] = ()
    node: Node | None = None
    has_rule: bool = True
    rule_source: str = TABLE
    matmul: bool = False
    follows: bool = False
    options: list[Option] = field(default_factory=list)


@dataclass(frozen=True)
class Use:
    """A use of a stream: which input of which element needs it; ``live``: a gradient comes back from there."""

    element: str
    index: int
    scope: Scope
    live: bool


@dataclass
class ValueStream:
    """A value, the element and output that make it, and its uses; ``name`` is its key in a plan's conversions.

    ``saved_copies``: how many of ``copies`` keep it for the backward pass (what follows the last may need it less).
    """

    key: str
    value: Value
    source: str
    output: int
    copies: int
    saved_copies: int = 0
    uses: list[Use] = field(default_factory=list)

    @property
    def saved(self) -> bool:
        """Whether any copy keeps it."""
        return self.saved_copies > 0


@dataclass
class Problem:
    """Elements and streams by name; ``runs`` are the repeated blocks that are folded.

    ``settled``: axes (by index) on which nothing is left to choose: a value that everybody takes alike stays so.
    ``sampled``: axes outside of those that are searched on which the same holds of a value that is cut alike at all its
    ends, which no gathering there makes cheaper to convert on an inner axis, or whole at all of them.
    ``siblings``: elements that share one exchange of their input's rows where they exchange these alike
    (``planner.sharding_ilp.shared_rows``); ``overlap_slowdown``: by how much a hidden second slows down computing.
    Element names: the node's name for operators, the value's name for sources, the key for carries and outputs.
    """

    graph: Graph
    runs: tuple[BlockRun, ...]
    mesh: MeshShape
    pinned_outputs: dict[str, tuple[bool, ...]] = field(default_factory=dict)
    pinned_states: dict[str, Placement] = field(default_factory=dict)
    elements: dict[str, Element] = field(default_factory=dict)
    streams: dict[str, ValueStream] = field(default_factory=dict)
    last_to_first: dict[str, str] = field(default_factory=dict)
    settled: frozenset[int] = frozenset()
    sampled: frozenset[int] = frozenset()
    siblings: tuple[tuple[str, ...], ...] = ()
    overlap_slowdown: float = 0.0

    def first_name(self, name: str) -> str:
        """The stream of a value as it is seen from outside of blocks (of a last copy's value: the first copy's)."""
        return self.last_to_first.get(name, name)

    def needed(self, use: Use) -> list[Placement]:
        """The placement that ``use`` needs under each option of its element."""
        return [option.inputs[use.index] for option in self.elements[use.element].options]

    def parts(self, stream: ValueStream) -> list[tuple[str, int, frozenset[int]]]:
        """How often a conversion step of ``stream`` counts: (phase, copies, uses); any of the uses makes it count.

        In a block of n copies, a step is done by the first n - 1 copies if an inner use or the next copy asks for
        it, and by the last copy if an inner use or something behind the block does.
        """
        n = stream.copies
        copies_of: dict[tuple[str, frozenset[int]], int] = {}
        for phase in ("forward", "backward"):
            scope_of_use = [(i, use.scope) for i, use in enumerate(stream.uses) if phase == "forward" or use.live]
            for copies, scopes in ((n - 1, ("inner", "next")), (1, ("inner", "exit"))):
                uses = frozenset(i for i, scope in scope_of_use if scope in scopes)
                if copies and uses:
                    copies_of[phase, uses] = copies_of.get((phase, uses), 0) + copies
        return [(phase, copies, uses) for (phase, uses), copies in copies_of.items()]

    def produced(self, stream: ValueStream) -> list[Placement]:
        """The placement that the source of ``stream`` produces under each of its options."""
        return [option.outputs[stream.output] for option in self.elements[stream.source].options]


def build_structure(
    graph: Graph,
    runs: tuple[BlockRun, ...],
    mesh: MeshShape,
    *,
    pinned_outputs: Mapping[str, tuple[bool, ...]] | None = None,
    pinned_states: Mapping[str, Placement] | None = None,
) -> Problem:
    """The problem of ``graph`` without its options.

    Beside a loss, other outputs stay as they are made and are no uses, except ``pinned_outputs``: for
    each path, which axes may be other than whole. Buffers are whole, except ``pinned_states``, by path, which
    parameters may also be held as.
    """
    live = live_nodes(graph)
    foldable = tuple(run for run in runs if _can_fold(run, live))
    problem = Problem(graph, foldable, mesh, dict(pinned_outputs or {}), dict(pinned_states or {}))
    return _StructureBuilder(problem, live).build()


def _can_fold(run: BlockRun, live: frozenset[str]) -> bool:
    """Whether all copies see their gradients alike, and no value is both handed on and shared by all copies."""
    alive = {tuple(name in live for name in copy) for copy in run.copies}
    entries = {names[0] for names in run.carried}
    return len(alive) == 1 and not entries & set(run.shared)


class _StructureBuilder:
    def __init__(self, problem: Problem, live: frozenset[str]) -> None:
        self.problem = problem
        self.graph = graph = problem.graph
        self.values = graph.values
        self.live = live
        saved = saved_values(graph, self.live)
        self.nodes = {node.name: node for node in graph.nodes}
        self.run_of: dict[str, int] = {}  # nodes of first copies → their run
        self.skipped: set[str] = set()  # nodes of later copies
        self.first_name = self.problem.last_to_first  # values of last copies → the first copy's
        self.saved_copies = Counter(saved)  # values outside of runs and of first copies → how many copies are saved
        for index, run in enumerate(problem.runs):
            self.run_of.update((name, index) for name in run.copies[0])
            self.skipped.update(name for copy in run.copies[1:] for name in copy)
            self.first_name.update(_value_pairs(self.nodes, run.copies[-1], run.copies[0]))
            for copy in run.copies[1:]:
                pairs = _value_pairs(self.nodes, copy, run.copies[0])
                self.saved_copies.update(first for own, first in pairs if own in saved)
        self.own_states = {names[0]: run.num_copies for run in problem.runs for names in run.states}
        self.other_states = {name for run in problem.runs for names in run.states for name in names[1:]}

    def build(self) -> Problem:
        self._add_sources()
        for index, run in enumerate(self.problem.runs):
            for slot in range(len(run.carried)):
                self._add_carry(index, slot)
        for node in self.graph.nodes:
            if node.name not in self.skipped:
                self._add_node(node)
        self._add_carry_uses()
        for path, name in self.graph.outputs.items():
            self._add_output(path, name)
        return self.problem

    def _add_element(self, name: str, element: Element, outputs: tuple[Value, ...]) -> None:
        self.problem.elements[name] = element
        for index, value in enumerate(outputs):
            key = f"node:{element.key}#{index}" if element.node is not None else element.key
            stream = name if element.kind == "carry" else value.name
            saved = self.saved_copies[value.name]
            self.problem.streams[stream] = ValueStream(key, value, name, index, element.copies, saved)

    def _add_sources(self) -> None:
        for path, value in zip(self.graph.input_paths, self.graph.inputs):
            key = "input:" + ".".join(map(str, path))
            self._add_element(value.name, Element(key, "input", 1), (value,))
        for state in self.graph.states:
            value = state.value
            if value.name not in self.other_states:
                kind: Kind = value.kind if value.kind in ("parameter", "buffer") else "constant"  # type: ignore[assignment]
                copies = self.own_states.get(value.name, 1)
                self._add_element(value.name, Element(f"state:{state.path}", kind, copies), (value,))

    def _add_carry(self, index: int, slot: int) -> None:
        run = self.problem.runs[index]
        key = f"carry:{index}#{slot}"
        value = self.values[run.carried_output[slot]]
        self._add_element(key, Element(key, "carry", run.num_copies, (run.carried[slot][0],)), (value,))

    def _add_node(self, node: Node) -> None:
        if node.constant:
            self._add_element(node.name, Element(node.key, "constant", 1, node=node), node.outputs)
            return
        run = self.run_of.get(node.name)
        streams = tuple(self._stream_of(name, run) for name in node.inputs)
        copies = 1 if run is None else self.problem.runs[run].num_copies
        self._add_element(node.name, Element(node.key, "op", copies, streams, node), node.outputs)
        for position, (stream, name) in enumerate(zip(streams, node.inputs)):
            live = node.name in self.live and self.values[name].requires_grad
            carried = self.problem.elements[self.problem.streams[stream].source].kind == "carry"
            scope: Scope = "inner" if carried else self._scope(name)  # every copy takes it, also right behind a block
            self.problem.streams[stream].uses.append(Use(node.name, position, scope, live))

    def _stream_of(self, name: str, run: int | None) -> str:
        """The stream that a node in ``run`` (None: outside) reads under the value name ``name``."""
        if run is None:
            return self.first_name.get(name, name)
        for slot, names in enumerate(self.problem.runs[run].carried):
            if names[0] == name:
                return f"carry:{run}#{slot}"
        return self.first_name.get(name, name)

    def _scope(self, name: str) -> Scope:
        return "exit" if name in self.first_name else "inner"

    def _add_carry_uses(self) -> None:
        """A carry's option is needed by what enters the block, and by what each copy gives the next."""
        for index, run in enumerate(self.problem.runs):
            for slot, (names, output) in enumerate(zip(run.carried, run.carried_output)):
                carry, entry = f"carry:{index}#{slot}", names[0]
                live = any(use.live for use in self.problem.streams[carry].uses)
                stream = self.problem.streams[self._stream_of(entry, None)]
                stream.uses.append(Use(carry, 0, self._scope(entry), live))
                self.problem.streams[output].uses.append(Use(carry, 0, "next", live))

    def _add_output(self, path: str, name: str) -> None:
        if self.graph.loss not in (None, path) and path not in self.problem.pinned_outputs:
            return  # stays as the plan makes it
        key = f"output:{path}"
        stream = self._stream_of(name, None)
        self.problem.elements[key] = Element(key, "output", 1, (stream,))
        live = self.values[name].requires_grad and self.graph.loss in (None, path)
        self.problem.streams[stream].uses.append(Use(key, 0, self._scope(name), live))


def _value_pairs(
    nodes: Mapping[str, Node], these: tuple[str, ...], those: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    """Names of the outputs of nodes that match, pair by pair."""
    for this, that in zip(these, those):
        yield from ((a.name, b.name) for a, b in zip(nodes[this].outputs, nodes[that].outputs))
