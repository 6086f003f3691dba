"""Fold a residual addition into the norm of its sum, where both belong to one layer.

A reshape that leaves rows whole may stand between them (OPT): the norm is then made of the sum, and reshaped instead.

Across layers they stay apart: what goes from layer to layer is then one tensor, as blocks, pipelines and recomputation
want it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from passes.fuse.check import CannotRun, difference
from passes.fuse.fuse import renamed
from passes.fuse.fused_nodes import is_registered
from passes.fuse.report import Match, NearMiss
from passes.ir.graph import Graph, Node, Ref
from passes.repeats.repeated_blocks import find_blocks

#: A norm → the same of a sum.
OF_A_SUM = {
    "meshwright.rms_norm.default": "meshwright.add_rms_norm.default",
    "meshwright.layer_norm.default": "meshwright.add_layer_norm.default",
}
_ADD = "aten.add.Tensor"
_RESHAPE = "aten.reshape.default"


@dataclass(frozen=True)
class Folded:
    """The graph, the norms that became norms of a sum (by module path), and those that nearly did."""

    graph: Graph
    norms: Mapping[str, Match]
    near_misses: tuple[NearMiss, ...]


def fold_residuals(graph: Graph, *, tolerance: float) -> Folded:
    """``graph`` with ``add`` and norm as one operator wherever it can be."""
    folder = _Folder(graph, tolerance)
    for node in graph.nodes:
        if OF_A_SUM.get(node.op) is not None and is_registered(OF_A_SUM[node.op]):
            folder.try_at(node)
    return Folded(folder.result(), folder.matches, tuple(folder.near_misses))


class _Folder:
    def __init__(self, graph: Graph, tolerance: float) -> None:
        self.graph = graph
        self.tolerance = tolerance
        self.values = graph.values
        self.makers = {value.name: node for node in graph.nodes for value in node.outputs}
        self.place = {node.name: place for place, node in enumerate(graph.nodes)}
        self.uses = Counter(name for node in graph.nodes for name in node.inputs)
        self.alike: dict[tuple[str, str], list[str]] = {}
        for node in graph.nodes:
            self.alike.setdefault((node.module_path, node.op), []).append(node.name)
        self.first_use: dict[str, int] = {}
        self.copy_of = {
            name: (number, copy)
            for number, run in enumerate(find_blocks(graph))
            for copy, names in enumerate(run.copies)
            for name in names
        }
        self.gone: set[str] = set()
        self.placed: dict[str, Node] = {}
        self.matches: dict[str, Match] = {}
        self.near_misses: list[NearMiss] = []

    def try_at(self, norm: Node) -> None:
        """Fold the addition in front of ``norm`` into it, if there is one of its layer."""
        add = self.makers.get(norm.args[0].name)
        view = add if add is not None and self._keeps_rows(add) else None
        if view is not None:
            add = self.makers.get(view.inputs[0])
        if add is None or add.op != _ADD or add.constant or add.kwargs or add.name in self.gone:
            return
        if len(add.inputs) != 2 or not self._same_layer(add, norm):
            return
        whole = norm if view is None else _of_rows(add, norm)
        fused = replace(whole, op=OF_A_SUM[norm.op], name=add.name, outputs=(add.output, whole.output))
        fused = replace(fused, args=(*add.args, *norm.args[1:]))
        reason = self._unfit(add, view, norm) or self._differs(add, whole, fused)
        if reason:
            self.near_misses.append(NearMiss(_short(fused.op), norm.module_path, reason))
            return
        self.gone |= {add.name, norm.name}
        self.placed[norm.name if view is None and self._may_wait(add, norm) else add.name] = fused
        if view is not None:
            args = (Ref(whole.output.name), *view.args[1:])
            self.placed[norm.name] = replace(norm, op=view.op, args=args, kwargs=view.kwargs)
        self.matches[norm.name] = Match(_short(fused.op), norm.module_path)

    def _keeps_rows(self, node: Node) -> bool:
        """Whether ``node`` only lays rows out in other dims."""
        return node.op == _RESHAPE and self.values[node.inputs[0]].shape[-1:] == node.output.shape[-1:]

    def _same_layer(self, add: Node, norm: Node) -> bool:
        layer = _layer(add.module_path)
        # Paths do not tell the calls of a layer that is called again and again (ALBERT).
        once = all(self.uses[name] == 1 for name in norm.inputs[1:])
        calls = 1 if once else len(self.alike[norm.module_path, norm.op])
        if layer and layer == _layer(norm.module_path) and self._call(add, calls) == self._call(norm, calls):
            return True
        copy = self.copy_of.get(add.name)
        return copy is not None and copy == self.copy_of.get(norm.name)

    def _call(self, node: Node, calls: int) -> int:
        """In which of so many calls of its module ``node`` runs, if each runs as many like it."""
        alike = self.alike[node.module_path, node.op]
        return alike.index(node.name) * calls // len(alike)

    def _unfit(self, add: Node, view: Node | None, norm: Node) -> str:
        """Why the norm cannot compute the sum, "" if it can."""
        shapes = {(self.values[name].shape, self.values[name].dtype) for name in (*add.inputs, add.output.name)}
        if len(shapes) > 1:
            return "what is added is of different shapes or types"
        if not (view is None and self._may_wait(add, norm)) and not self._may_hurry(add, norm):
            return f"{add.output.name} is used before the weights of the norm are made"
        return ""

    def _may_wait(self, add: Node, norm: Node) -> bool:
        """Whether nothing uses the sum before the norm does."""
        if not self.first_use:
            for place, node in reversed(list(enumerate(self.graph.nodes))):
                self.first_use.update(dict.fromkeys(node.inputs, place))
        return self.first_use[add.output.name] >= self.place[norm.name]

    def _may_hurry(self, add: Node, norm: Node) -> bool:
        """Whether the norm could run where the sum is computed."""
        makers = (self.makers.get(name) for name in norm.inputs[1:])
        return all(maker is None or self.place[maker.name] < self.place[add.name] for maker in makers)

    def _differs(self, add: Node, norm: Node, fused: Node) -> str:
        results = [add.output.name, norm.output.name]
        try:
            distance = difference([add, norm], [fused], self.values, results=(results, results))
        except CannotRun as error:
            return str(error)
        return "" if distance <= self.tolerance else f"the fused operator gives something else: {distance:.1e} relative"

    def result(self) -> Graph:
        if not self.placed:
            return self.graph
        nodes = [
            self.placed.get(node.name, node)
            for node in self.graph.nodes
            if node.name in self.placed or node.name not in self.gone
        ]
        nodes_by_name = {node.name: node for node in self.graph.nodes}
        return renamed(self.graph.replace(nodes=tuple(nodes)), before=nodes_by_name)


def _of_rows(add: Node, norm: Node) -> Node:
    """``norm`` of the sum itself, before its rows are laid out in other dims."""
    output = replace(norm.output, name=f"{norm.output.name}__of_sum", shape=add.output.shape)
    return replace(norm, name=output.name, args=(Ref(add.output.name), *norm.args[1:]), outputs=(output,))


def _layer(path: str) -> str:
    """The innermost module with a number for a name that ``path`` is in, "" for none."""
    parts = path.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[-1] + 1]) if numbers else ""


def _short(op: str) -> str:
    return op.split(".")[1]
