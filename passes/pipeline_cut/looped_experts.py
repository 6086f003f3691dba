"""Experts whose weights are parameters of their own, which a loop over experts was: whose weight is whose.

On one device such a loop leaves None as the gradient of an expert without tokens. Stacked, its gradient is of zeros,
which optimizers do not pass over: weight decay and momentum would move it. Who knows where tokens went can tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from passes.ir.graph import Graph, Node, Ref, iterate_refs
from passes.rules.expert_rules import EXPERT_LINEAR, EXPERTS, stacked_by_loop

_INDEX = "aten.index.Tensor"
#: Operators through which an expert's weight is still that expert's.
_CARRIES = frozenset(
    ("aten.transpose.int", "aten.permute.default", "aten.t.default", "aten.cat.default", "aten.contiguous.default",
     "aten.to.dtype", "aten._to_copy.default", "aten.clone.default", "aten.unsqueeze.default", "aten.reshape.default",
     "aten.view.default")
)  # fmt: skip


@dataclass(frozen=True)
class LoopedExperts:
    """What of a graph's experts are parameters of their own.

    Attributes:
        parameters: key of each operator that is given ids of such experts → for each expert, the paths of its
            parameters that nothing else uses.
        unknown: paths of parameters that were stacked, but no operator tells which of them tokens choose.
    """

    parameters: Mapping[str, tuple[frozenset[str], ...]] = field(default_factory=dict)
    unknown: frozenset[str] = frozenset()


def looped_experts(graph: Graph) -> LoopedExperts:
    """Those of ``graph``."""
    if not any(stacked_by_loop(node) for node in graph.nodes):
        return LoopedExperts()
    sources = _WeightSources(graph)
    stacks_of: dict[str, dict[str, Node]] = {}
    for node in graph.nodes:
        for ids, table in _ids_and_tables(node):
            stacks_of.setdefault(ids, {}).update((stack.name, stack) for stack in sources.stacks(table))
    parameters = {}
    for node in graph.nodes:
        if node.op in (EXPERTS, EXPERT_LINEAR):
            rows = [sources.parameters(stack) for stack in stacks_of.get(_ids_of(node), {}).values()]
            if len({len(row) for row in rows}) == 1:
                parameters[node.key] = tuple(frozenset[str]().union(*own) for own in zip(*rows))
    followed = {path for experts in parameters.values() for own in experts for path in own}
    stacks = [node for node in graph.nodes if stacked_by_loop(node)]
    stacked = {path for stack in stacks for own in sources.parameters(stack) for path in own}
    return LoopedExperts(parameters, frozenset(stacked - followed))


def _ids_of(node: Node) -> str:
    ids = node.args[1]
    assert isinstance(ids, Ref), "ids of experts are a tensor"
    return ids.name


def _ids_and_tables(node: Node) -> Iterator[tuple[str, str]]:
    """Pairs of ids of experts and a tensor of which they choose entries along the first dim."""
    if node.op in (EXPERTS, EXPERT_LINEAR):
        first_table = 3 if node.op == EXPERTS else 2
        yield from ((_ids_of(node), table.name) for table in iterate_refs(node.args[first_table:]))
    elif node.op == _INDEX and len(node.args[1]) == 1:
        yield from ((ids.name, table.name) for table, ids in [tuple(iterate_refs(node.args))])


class _WeightSources:
    """Where the values of a graph come from, and who reads them."""

    def __init__(self, graph: Graph) -> None:
        self._producers = {value.name: node for node in graph.nodes for value in node.outputs}
        self._paths = {state.value.name: state.path for state in graph.parameters}
        self._readers: dict[str, list[Node]] = {}
        for node in graph.nodes:
            for name in node.inputs:
                self._readers.setdefault(name, []).append(node)
        self._outputs = set(graph.outputs.values())

    def stacks(self, name: str) -> Iterator[Node]:
        """The stacks of experts' weights that ``name`` consists of."""
        node = self._producers.get(name)
        if node is not None and stacked_by_loop(node):
            yield node
        elif node is not None and node.op in _CARRIES:
            for operand in node.inputs:
                yield from self.stacks(operand)

    def parameters(self, stack: Node) -> list[frozenset[str]]:
        """For each expert, the parameters that its entry of a stack is made of."""
        return [frozenset(path for name in own for path in self._parameters(name)) for own in stacked_by_loop(stack)]

    def _parameters(self, name: str) -> Iterator[str]:
        if name in self._paths and self._is_stacked_alone(name):
            yield self._paths[name]
        node = self._producers.get(name)
        if node is not None and node.op in _CARRIES:
            for operand in node.inputs:
                yield from self._parameters(operand)

    def _is_stacked_alone(self, name: str) -> bool:
        """Whether ``name`` goes into stacks of experts' weights and nowhere else."""
        if name in self._outputs:
            return False
        return all(
            bool(stacked_by_loop(node))
            or (node.op in _CARRIES and all(self._is_stacked_alone(output.name) for output in node.outputs))
            for node in self._readers.get(name, ())
        )
