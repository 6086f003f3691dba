"""The pattern pass: replaces matched operators by calls of fused ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from passes.capture.naming import Namer, name_wishes
from passes.fuse.check import CannotRun, difference
from passes.fuse.copies import NOTHING, Copies, Ending
from passes.fuse.fused_nodes import CannotBuild, build, is_registered
from passes.fuse.match import Matcher, PatternMatch
from passes.fuse.patterns import ALREADY, Row
from passes.fuse.report import Match, NearMiss
from passes.ir.graph import Graph, Node, Ref, Value, assign_keys, map_refs

#: A near miss: this share of a pattern's operators matches, and at least so many operators.
NEARLY = 0.7
AT_LEAST = 4
#: Operators that cost nothing if they are done beside a fused operator that does them too.
_FREE = frozenset(
    (
        "aten.slice.Tensor", "aten.select.int", "aten.split_with_sizes.default", "aten.unbind.int",
        "aten.reshape.default", "aten.detach.default", "aten.to.dtype",
    )
)  # fmt: skip


@dataclass(frozen=True)
class Replaced:
    """One match in the graph: the nodes that go, those that come, and the root whose place they take."""

    row: Row
    root: Node
    gone: frozenset[str]
    nodes: tuple[Node, ...]


class Rewriter:
    """Replaces the matches of one table of patterns in one graph.

    Attributes:
        replaced: by the name of the root.
        near_misses: by the name of the node at which the pattern ends.
    """

    def __init__(self, graph: Graph, rows: Sequence[Row], *, tolerance: float) -> None:
        self.graph = graph
        self.tolerance = tolerance
        self.matcher = Matcher(graph)
        sieves = {row.pattern: self.matcher.sieve(row.tree) for row in rows}
        self.sieves = {pattern: sieve for pattern, sieve in sieves.items() if sieve is not None}
        self.rows = _by_root([row for row in rows if row.pattern in self.sieves])
        self.users: dict[str, list[str]] = {}
        for node in graph.nodes:
            for name in dict.fromkeys(node.inputs):
                self.users.setdefault(name, []).append(node.name)
        self.results = frozenset(graph.outputs.values())
        self.order = {node.name: place for place, node in enumerate(graph.nodes)}
        self.by_name = {node.name: node for node in graph.nodes}
        self.makers = {value.name: node for node in graph.nodes for value in node.outputs}
        self.readers: dict[str, list[str]] = {}
        self.taken: set[str] = set()
        self.replaced: dict[str, Replaced] = {}
        self.near_misses: dict[str, NearMiss] = {}
        self.inside_of_misses: set[str] = set()

    def run(self) -> Graph:
        """The graph with every match replaced."""
        copies = Copies(self.graph)
        if not (copies.runs and self._find(copies)):
            self._find(None)
        covered = self.taken | self.inside_of_misses
        self.near_misses = {name: miss for name, miss in self.near_misses.items() if name not in covered}
        return self._rewritten() if self.replaced else self.graph

    def _find(self, copies: Copies | None) -> bool:
        """Try all patterns everywhere, with ``copies`` once for all copies of a block; return whether these agree."""
        self.taken, self.replaced, self.near_misses, self.inside_of_misses = set(), {}, {}, set()
        self.readers = {}
        for node in reversed(self.graph.nodes):
            if node.constant or node.name in self.taken:
                continue
            ending = copies.ending_of(node) if copies is not None else None
            if ending == NOTHING:
                continue
            if isinstance(ending, Row):
                matched, _ = self.matcher.find(ending.tree, node)
                if matched is None or self._replace(ending, node, matched, checked=True) is not None:
                    return False
                continue
            self._at(node)
            if copies is not None:
                copies.note(node, self._ending(node))
        return copies is None or copies.agree()

    def _ending(self, node: Node) -> Ending:
        """What ends in ``node``."""
        if node.name in self.replaced:
            return self.replaced[node.name].row
        return None if node.name in self.near_misses else NOTHING

    def _at(self, node: Node) -> None:
        """Try every pattern that may end in ``node``, or in what it casts."""
        end = self.matcher.without_casts(node)
        best: tuple[float, NearMiss] | None = None
        for row in self.rows.get(end.op, ()):
            if not self.matcher.may_end(self.sieves[row.pattern], node):
                continue
            matched, attempt = self.matcher.find(row.tree, node)
            if matched is None:
                share = attempt.reached / row.tree.size
                if node is end and attempt.reached >= AT_LEAST and share >= NEARLY and (not best or share > best[0]):
                    best = share, NearMiss(row.name, node.module_path, attempt.reason)
                continue
            reason = self._replace(row, node, matched)
            if reason is None:
                return
            if reason and node is end and (best is None or best[0] < 1):
                best = 1.0, NearMiss(row.name, node.module_path, reason)
                self.inside_of_misses |= matched.inside - {node.name}
        if best is not None:
            self.near_misses[node.name] = best[1]

    def _replace(self, row: Row, root: Node, matched: PatternMatch, *, checked: bool = False) -> str | None:
        """Replace a match, or say why not ("" if it overlaps another); ``checked``: its like passed the check."""
        if matched.inside & self.taken:
            return ""
        shapes = {name: self.matcher.values[value].shape for name, value in matched.tensors.items()}
        failed = next((condition.text for condition in row.conditions if not condition.holds(shapes)), None)
        if failed is not None:
            return f"not so: {failed}"
        outside = self._used_outside(root, matched.inside)
        if outside:
            return outside
        reason = ""
        for candidate in (matched, *self._of_wider(root, matched)):
            try:
                nodes = build(
                    row.result, candidate.tensors, candidate.constants, self.matcher.values, prefix=f"{root.name}__"
                )
            except CannotBuild as error:
                return str(error)
            unlike = _unlike(root.output, nodes[-1].output)
            if not unlike:
                break
            reason = reason or unlike
        else:
            return reason
        reason = "" if checked else self._differs(candidate, nodes)
        if reason:
            return reason
        self._accept(row, root, matched, nodes)
        return None

    def _of_wider(self, root: Node, matched: PatternMatch) -> list[PatternMatch]:
        """The same match of what tensors are cast to, not of what they are, so that its result is as wide."""
        if not matched.casts or self.matcher.is_cast(root):
            return []
        uncast = {self.by_name[cast].inputs[0]: cast for cast in matched.casts}
        tensors = {name: uncast.get(value, value) for name, value in matched.tensors.items()}
        return [matched._replace(tensors=tensors, casts=frozenset())]

    def _used_outside(self, root: Node, inside: frozenset[str]) -> str:
        """Why values of the pattern are needed besides its result, "" if none is."""
        for name in inside - {root.name}:
            node = self.by_name[name]
            if self._may_stay(node, inside):
                continue
            for value in node.outputs:
                if value.name in self.results:
                    return f"{value.name} inside of it is an output of the model"
                users = (*self.users.get(value.name, ()), *self.readers.get(value.name, ()))
                others = [user for user in users if user not in inside]
                if others:
                    return f"{value.name} inside of it is used by {others[0]} too"
        return ""

    def _may_stay(self, node: Node, inside: frozenset[str]) -> bool:
        """Whether ``node`` can be done beside the fused operator: it costs nothing, and neither does what it reads."""
        within = (self.makers[name] for name in node.inputs if name in self.makers and self.makers[name].name in inside)
        return node.op in _FREE and all(self._may_stay(each, inside) for each in within)

    def _differs(self, match: PatternMatch, nodes: Sequence[Node]) -> str:
        matched_nodes = [self.by_name[name] for name in sorted(match.inside | match.casts, key=self.order.__getitem__)]
        try:
            distance = difference(matched_nodes, nodes, self.matcher.values)
        except CannotRun as error:
            return str(error)
        if distance <= self.tolerance:
            return ""
        return f"the fused operator gives something else: {distance:.1e} relative, {self.tolerance:.0e} allowed"

    def _accept(self, row: Row, root: Node, match: PatternMatch, nodes: Sequence[Node]) -> None:
        removed = {name for name in match.inside if self.by_name[name].op not in _FREE} | {root.name}
        self.taken |= removed
        for name in (name for node in nodes for name in node.inputs):
            self.readers.setdefault(name, []).append(root.name)
        self.replaced[root.name] = Replaced(row, root, frozenset(removed), tuple(nodes))

    def _rewritten(self) -> Graph:
        nodes: list[Node] = []
        removed = {name for replaced in self.replaced.values() for name in replaced.gone}
        for node in self.graph.nodes:
            if node.name in self.replaced:
                nodes.extend(self._placed(self.replaced[node.name]))
            elif node.name not in removed:
                nodes.append(node)
        return renamed(without_dead(self.graph.replace(nodes=tuple(nodes)), among=self.graph), before=self.by_name)

    def _placed(self, replaced: Replaced) -> list[Node]:
        """The new nodes, each in the module of the operator that it stands for."""
        old = {self.by_name[name].op: self.by_name[name] for name in replaced.gone}
        placed = []
        for node in replaced.nodes:
            last = node is replaced.nodes[-1]
            origin = replaced.root if last else old.get(node.op, replaced.root)
            outputs = (replaced.root.output,) if last else node.outputs
            placed.append(
                replace(
                    node,
                    name=outputs[0].name,
                    outputs=outputs,
                    module_path=origin.module_path,
                    module_class=origin.module_class,
                )
            )
        return placed


def _unlike(expected: Value, actual: Value) -> str:
    """How what is fused would differ in shape or type, "" if it does not."""
    if (actual.shape, actual.dtype) == (expected.shape, expected.dtype):
        return ""
    return f"it gives {list(expected.shape)} {expected.dtype}, the fused operator {list(actual.shape)} {actual.dtype}"


def _by_root(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by the operator that they end in, the largest pattern first; without those whose result torch lacks."""
    rows_by_root: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: -row.tree.size):
        if is_registered(row.result.ops[0]):
            for op in row.tree.ops:
                rows_by_root.setdefault(op, []).append(row)
    return rows_by_root


def without_dead(graph: Graph, *, among: Graph) -> Graph:
    """``graph`` without the nodes that nothing uses and that something used in ``among``."""
    used_before = {name for node in among.nodes for name in node.inputs} | set(among.outputs.values())
    used = set(graph.outputs.values())
    live_nodes: list[Node] = []
    for node in reversed(graph.nodes):
        names = {value.name for value in node.outputs}
        if names & used or not names & used_before:
            used.update(node.inputs)
            live_nodes.append(node)
    return graph.replace(nodes=tuple(reversed(live_nodes)))


def renamed(graph: Graph, *, before: Mapping[str, Node]) -> Graph:
    """The graph with keys set, and values of new nodes named after their operator or module."""
    namer = Namer()
    for name in [*(v.name for v in graph.inputs), *(state.value.name for state in graph.states)]:
        namer.name(name)
    new = [node.name not in before or before[node.name].op != node.op for node in graph.nodes]
    for node, is_new in zip(graph.nodes, new):
        if not is_new:
            for value in node.outputs:
                namer.name(value.name)
    names: dict[str, str] = {}
    wishes = name_wishes([(node.module_path, node.op) for node in graph.nodes])
    for node, is_new, wish in zip(graph.nodes, new, wishes):
        if is_new:
            several = len(node.outputs) > 1
            for place, value in enumerate(node.outputs):
                names[value.name] = namer.name(f"{wish}_{place}" if several else wish)
    nodes = assign_keys(tuple(_with_names(node, names) for node in graph.nodes))
    outputs = {path: names.get(name, name) for path, name in graph.outputs.items()}
    return graph.replace(nodes=nodes, outputs=outputs)


def _with_names(node: Node, names: Mapping[str, str]) -> Node:
    if not any(name in names for name in (*node.inputs, *(value.name for value in node.outputs))):
        return node

    def rename(arguments: Any) -> Any:
        return map_refs(arguments, lambda ref: Ref(names.get(ref.name, ref.name)))

    outputs = tuple(replace(value, name=names.get(value.name, value.name)) for value in node.outputs)
    return replace(
        node, name=outputs[0].name, args=rename(node.args), kwargs=rename(dict(node.kwargs)), outputs=outputs
    )


def already_fused(graph: Graph) -> list[Match]:
    """Operators of a graph that are fused as they were captured."""
    return [Match(ALREADY[node.op], node.module_path) for node in graph.nodes if node.op in ALREADY]
