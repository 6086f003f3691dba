"""Linear layers whose output goes to cross-entropy and nowhere else, fused into one operator that holds no logits."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from passes.autograd.logits_memory import CROSS_ENTROPY
from passes.autograd.operator_tables import base_name
from passes.ir.graph import Graph, Node, Ref, Value, map_refs
from passes.rules.operator_call import bind

LINEAR_CROSS_ENTROPY = "meshwright.linear_cross_entropy.default"

#: Casts that lose nothing, to the type that the fused operator computes in anyway.
_WIDENED = frozenset({("bfloat16", "float32"), ("float16", "float32")})
_CASTS = frozenset(("aten.to", "aten._to_copy", "aten.type_as"))
_COPIES = frozenset(("aten.contiguous", "aten.clone", "aten.alias"))
_VIEWS = frozenset(("aten.slice", "aten.select", "aten.narrow"))
_RESHAPES = frozenset(("aten.reshape", "aten.view", "aten._unsafe_view"))


@dataclass(frozen=True)
class LossPair:
    """A linear layer and the cross-entropy of its output.

    Attributes:
        between: what is done to the logits on the way, in order: casts, slices of positions, reshapes of positions.
        moved: those of them that change positions, as done to the layer's input instead.
        fused: what stands for layer and loss; its output is the loss's, and so is its key.
    """

    linear: Node
    between: tuple[Node, ...]
    loss: Node
    moved: tuple[Node, ...]
    fused: Node

    @property
    def replaced(self) -> tuple[Node, ...]:
        return (self.linear, *self.between, self.loss)

    @property
    def replacement(self) -> tuple[Node, ...]:
        return (*self.moved, self.fused)


def loss_pairs(graph: Graph, *, results: Collection[str]) -> tuple[LossPair, ...]:
    """Every such pair that a gradient goes through; ``results`` are the values that must come out of the graph."""
    return tuple(_PairFinder(graph, results).pairs())


def with_pairs_fused(graph: Graph, pairs: Collection[LossPair]) -> Graph:
    """The graph with the fused operators in the place of the losses."""
    removed = {node.name for pair in pairs for node in pair.replaced}
    replacements = {pair.loss.name: pair.replacement for pair in pairs}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.name in replacements:
            nodes.extend(replacements[node.name])
        elif node.name not in removed:
            nodes.append(node)
    return graph.replace(nodes=tuple(nodes))


class _PairFinder:
    def __init__(self, graph: Graph, results: Collection[str]) -> None:
        self.graph, self.results, self.values = graph, results, graph.values
        self.maker = {value.name: node for node in graph.nodes for value in node.outputs}
        self.users: dict[str, set[str]] = {}
        for node in graph.nodes:
            for name in node.inputs:
                self.users.setdefault(name, set()).add(node.name)

    def pairs(self) -> Iterator[LossPair]:
        for node in self.graph.nodes:
            if node.op == CROSS_ENTROPY and node.output.requires_grad:
                pair = self._pair(node)
                if pair is not None:
                    yield pair

    def _pair(self, loss: Node) -> LossPair | None:
        between: list[Node] = []
        node: Node | None = loss
        while node is not None:
            logits = node.inputs[0]
            if self.users[logits] != {node.name} or logits in self.results:
                return None
            node = self.maker.get(logits)
            if node is None or node.constant:
                return None
            if node.op == "aten.linear.default":
                return self._made(node, tuple(reversed(between)), loss)
            if not self._keeps_classes(node):
                return None
            between.append(node)
        return None

    def _keeps_classes(self, node: Node) -> bool:
        """Whether an operator leaves every row of logits as it is."""
        if len(node.outputs) != 1 or len(node.inputs) != 1:
            return False
        name, source, target = base_name(node.op), self.values[node.inputs[0]], node.output
        if name in _CASTS:
            return source.dtype == target.dtype or (source.dtype, target.dtype) in _WIDENED
        if name in _COPIES:
            return True
        return name in (_VIEWS | _RESHAPES) and self._leaves_rows(node, source.shape, target.shape)

    def _leaves_rows(self, node: Node, source: tuple[int, ...], target: tuple[int, ...]) -> bool:
        if not target or source[-1] != target[-1]:
            return False
        if base_name(node.op) in _RESHAPES:
            return True
        call = bind(node, self.values)
        return call is not None and call.dim("dim", len(source)) != len(source) - 1

    def _made(self, linear: Node, between: tuple[Node, ...], loss: Node) -> LossPair | None:
        linear_call, loss_call = bind(linear, self.values), bind(loss, self.values)
        if linear_call is None or loss_call is None or len(linear_call.shape("weight")) != 2:
            return None
        hidden = self.values[linear.inputs[0]]
        moved = []
        for node in between:
            if base_name(node.op) in (_VIEWS | _RESHAPES):
                moved.append(self._moved(node, hidden))
                hidden = moved[-1].output
        bias = linear.inputs[2] if linear_call.has("bias") else None
        dtype = None if loss.output.dtype == hidden.dtype else f"dtype:{loss.output.dtype}"
        fused = replace(
            loss,
            op=LINEAR_CROSS_ENTROPY,
            args=(
                Ref(hidden.name),
                Ref(linear.inputs[1]),
                None if bias is None else Ref(bias),
                Ref(loss.inputs[1]),
                loss_call["ignore_index"],
                float(loss_call["label_smoothing"]),
                0.0,
                None,
                dtype,
            ),
            kwargs={},
            module_path=linear.module_path,
            module_class=linear.module_class,
        )
        return LossPair(linear, between, loss, tuple(moved), fused)

    def _moved(self, node: Node, hidden: Value) -> Node:
        """What ``node`` does to positions of the logits, done to ``hidden``."""
        shape = (*node.output.shape[:-1], hidden.shape[-1])
        output = replace(hidden, name=self._free(f"{node.output.name}_hidden"), shape=shape, kind="node")

        def swapped(argument: Any) -> Any:
            return map_refs(argument, lambda _: Ref(hidden.name))

        args, kwargs = swapped(node.args), {key: swapped(item) for key, item in node.kwargs.items()}
        if base_name(node.op) in _RESHAPES:
            args, kwargs = (Ref(hidden.name), shape), {}
        return replace(node, name=output.name, args=args, kwargs=kwargs, outputs=(output,), key=f"{node.key}:hidden")

    def _free(self, wish: str) -> str:
        names_in_use: Mapping[str, object] = self.values
        while wish in names_in_use:
            wish += "_"
        return wish
