"""Match a pattern in a graph: lay its tree over the operators that produce a value."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from passes.fuse.pattern_notation import PatternCall, PatternLiteral, Sequence, Tensor, Tree, depth_of, operators_of
from passes.ir.graph import ITEM_SIZE, Graph, Node, Ref
from passes.rules.operator_call import REQUIRED, signature

_CAST = "aten.to.dtype"
#: Operators whose dims count from the end of a tensor with one more dim than their first operand's.
_ADDS_DIM = ("aten.stack.default", "aten.unsqueeze.default")
_DIMS = ("dim", "dims", "dim0", "dim1")
#: How far above a node its operators are looked at before a pattern is tried, and how many casts may be among them.
DEEPEST, CASTS = 12, 3
#: What comes back for an argument that is not there.
_ABSENT = object()


class PatternMatch(NamedTuple):
    """A pattern laid over a graph.

    Attributes:
        tensors: name in the pattern → value of the graph.
        constants: name in the pattern → constant.
        inside: names of the nodes that match the pattern's operators.
        casts: names of casts to a wider type before the tensors that the pattern takes.
        num_found: number of the pattern's operators that are matched.
    """

    tensors: Mapping[str, str]
    constants: Mapping[str, Any]
    inside: frozenset[str] = frozenset()
    casts: frozenset[str] = frozenset()
    num_found: int = 0

    def with_node(self, name: str, *, count: int) -> PatternMatch:
        """The same with one node more."""
        return PatternMatch(self.tensors, self.constants, self.inside | {name}, self.casts, self.num_found + count)


@dataclass
class Attempt:
    """How far one tree matched: ``reached`` operators, and why no more."""

    reached: int = 0
    reason: str = ""

    def stop(self, count: int, reason: str) -> None:
        if count > self.reached:
            self.reached, self.reason = count, reason


class Sieve(NamedTuple):
    """Operators that must stand within ``depth`` of the end of a pattern, each as a bit mask of its overloads."""

    depth: int
    needed: tuple[int, ...]


class Matcher:
    """Lays trees over one graph."""

    def __init__(self, graph: Graph) -> None:
        self.values = graph.values
        self.makers: dict[str, tuple[Node, int]] = {
            value.name: (node, place) for node in graph.nodes for place, value in enumerate(node.outputs)
        }

        self.bits: dict[str, int] = {}
        self.upstream = self._upstream(graph)
        self.arguments: dict[str, dict[str, Any]] = {}

    def _upstream(self, graph: Graph) -> list[dict[str, int]]:
        """For each depth, node → bit mask of the operators above it that its value depends on."""
        for node in graph.nodes:
            self.bits.setdefault(node.op, 1 << len(self.bits))
        levels = [{node.name: self.bits[node.op] for node in graph.nodes}]
        sources = [
            (node.name, self.bits[node.op], {self.makers[name][0].name for name in node.inputs if name in self.makers})
            for node in graph.nodes
        ]
        for _ in range(DEEPEST):
            last = levels[-1]
            levels.append({})
            for name, mask, makers in sources:
                for maker in makers:
                    mask |= last[maker]
                levels[-1][name] = mask
        return levels

    def sieve(self, tree: PatternCall) -> Sieve | None:
        """The necessary condition on nodes that ``tree`` may end in; None if the graph lacks one of its operators."""
        operators, present = operators_of(tree), self.bits.keys()
        if any(present.isdisjoint(ops) for ops in operators):
            return None
        needed = [functools.reduce(int.__or__, (self.bits.get(op, 0) for op in ops)) for ops in operators]
        return Sieve(min(depth_of(tree) + CASTS, DEEPEST), tuple(needed))

    def may_end(self, sieve: Sieve, node: Node) -> bool:
        """Whether all operators of a tree stand somewhere above ``node``."""
        mask = self.upstream[sieve.depth][node.name]
        return all(mask & needed for needed in sieve.needed)

    def find(self, tree: PatternCall, node: Node) -> tuple[PatternMatch | None, Attempt]:
        """The match of ``tree`` whose result is ``node``'s first output, if any, and how far the attempt came."""
        attempt = Attempt()
        matched = next(self._tree(tree, Ref(node.output.name), PatternMatch({}, {}), attempt), None)
        return matched, attempt

    def maker(self, name: str) -> Node | None:
        """The node that makes a value."""
        producer = self.makers.get(name)
        return producer[0] if producer is not None else None

    def is_cast(self, node: Node) -> bool:
        """Whether ``node`` changes a floating-point type into another."""
        return node.op == _CAST and "float" in node.output.dtype and "float" in self.values[node.inputs[0]].dtype

    def without_casts(self, node: Node) -> Node:
        """The first node above ``node``, itself included, that is not a cast."""
        while self.is_cast(node):
            maker = self.maker(node.inputs[0])
            if maker is None:
                break
            node = maker
        return node

    def _tree(self, tree: Tree, argument: Any, match: PatternMatch, attempt: Attempt) -> Iterator[PatternMatch]:
        if isinstance(tree, Tensor):
            yield from self._tensor(tree, argument, match)
        elif isinstance(tree, PatternCall):
            if isinstance(argument, Ref):
                yield from self._call(tree, argument.name, match, attempt)
        elif isinstance(tree, Sequence):
            if isinstance(argument, (list, tuple)) and len(argument) == len(tree.items):
                yield from self._all(list(zip(tree.items, argument)), match, attempt)
        elif isinstance(tree, PatternLiteral):
            if same_constant(tree.value, argument):
                yield match
        elif not _has_ref(argument):
            bound = match.constants.get(tree.name, _ABSENT)
            if bound is _ABSENT:
                yield match._replace(constants={**match.constants, tree.name: argument})
            elif same_constant(bound, argument):
                yield match

    def _tensor(self, tree: Tensor, argument: Any, match: PatternMatch) -> Iterator[PatternMatch]:
        if tree.name == "_":
            yield match
            return
        if not isinstance(argument, Ref):
            return
        name, casts = self._before_widening(argument.name)
        bound = match.tensors.get(tree.name)
        if bound is None:
            yield match._replace(tensors={**match.tensors, tree.name: name}, casts=match.casts | casts)
        elif bound == name:
            yield match._replace(casts=match.casts | casts) if casts else match

    def _before_widening(self, name: str) -> tuple[str, set[str]]:
        casts: set[str] = set()
        while (maker := self.maker(name)) is not None and self.is_cast(maker):
            source = self.values[maker.inputs[0]]
            if ITEM_SIZE[source.dtype] >= ITEM_SIZE[maker.output.dtype]:
                break
            casts.add(maker.name)
            name = source.name
        return name, casts

    def _call(self, tree: PatternCall, name: str, match: PatternMatch, attempt: Attempt) -> Iterator[PatternMatch]:
        node, place = self.makers.get(name, (None, 0))
        if node is None or node.constant:
            return
        if node.op not in tree.ops or place != tree.output:
            if self.is_cast(node):
                extended = match.with_node(node.name, count=0)
                yield from self._call(tree, node.inputs[0], extended, attempt)
            else:
                attempt.stop(match.num_found, f"{_short(tree.ops[0])} expected, {_short(node.op)} found")
            return
        extended = match.with_node(node.name, count=1)
        orders = self._orders(tree, node)
        if not orders:
            attempt.stop(extended.num_found, f"{_short(node.op)} has other arguments")
        before = attempt.reached
        for pairs in orders:
            yield from self._all(pairs, extended, attempt)
        if attempt.reached == before:
            attempt.stop(extended.num_found, f"{_short(node.op)} has other arguments")

    def _orders(self, tree: PatternCall, node: Node) -> list[list[tuple[Tree, Any]]]:
        """The arguments of ``tree`` beside those of ``node``, in every order that means the same."""
        arguments = self.arguments.get(node.name)
        if arguments is None:
            arguments = self.arguments[node.name] = _bound(node)
        parameters = [name for name, _ in signature(node.op) or ()]
        if len(tree.args) > len(parameters):
            return []
        patterns = dict(zip(parameters, tree.args)) | dict(tree.kwargs)
        defaults = dict(signature(node.op) or ())
        for name, argument in arguments.items():
            if name not in patterns and not same_constant(defaults[name], argument):
                return []
        if not set(patterns) <= set(arguments):
            return []
        rank = self._rank(node)
        pairs = [(pattern, _from_the_end(pattern, arguments[name], name, rank)) for name, pattern in patterns.items()]
        if not tree.commutes:
            return [pairs]
        (first, first_argument), (second, second_argument) = pairs[:2]
        return [pairs, [(first, second_argument), (second, first_argument)]]

    def _rank(self, node: Node) -> int:
        first = self.values[node.inputs[0]] if node.inputs else node.output
        return len(first.shape) + (node.op in _ADDS_DIM)

    def _all(self, pairs: list[tuple[Tree, Any]], match: PatternMatch, attempt: Attempt) -> Iterator[PatternMatch]:
        if not pairs:
            yield match
            return
        (tree, argument), *rest = pairs
        for extended in self._tree(tree, argument, match, attempt):
            yield from self._all(rest, extended, attempt)


def _bound(node: Node) -> dict[str, Any]:
    """Every argument of a call by name, defaults filled in."""
    parameters = signature(node.op) or ()
    arguments = {name: default for name, default in parameters if default is not REQUIRED}
    arguments.update(zip((name for name, _ in parameters), node.args))
    return arguments | dict(node.kwargs)


def _from_the_end(tree: Tree, argument: Any, name: str, rank: int) -> Any:
    """A dim as the pattern counts it: from the end if it is negative there, and alone if it is one in a list."""
    if name not in _DIMS or not isinstance(tree, PatternLiteral):
        return argument
    dims = argument if isinstance(argument, (list, tuple)) else (argument,)
    if len(dims) != 1 or not isinstance(dims[0], int):
        return argument
    return dims[0] - rank if tree.value < 0 <= dims[0] else dims[0]


def same_constant(first: Any, second: Any) -> bool:
    """Whether two constants are the same, floats to six digits."""
    if isinstance(first, bool) or isinstance(second, bool) or not isinstance(first, (int, float)):
        if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
            return len(first) == len(second) and all(map(same_constant, first, second))
        return type(first) is type(second) and bool(first == second)
    return isinstance(second, (int, float)) and math.isclose(first, second, rel_tol=1e-6)


def _has_ref(argument: Any) -> bool:
    return isinstance(argument, Ref) or (isinstance(argument, (list, tuple)) and any(map(_has_ref, argument)))


def _short(op: str) -> str:
    return op.split(".")[1] if op.count(".") else op
