"""The load that flows put on the links of a network along its shortest routes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import networkx

Node = int | str
#: Source → target → amount that is sent.
Flows = Mapping[Node, Mapping[Node, float]]


class Routing:
    """Shortest routes of a directed ``networkx`` graph, by its edges' ``weight``; equally short ones share the traffic.

    Where several links lead on to a target by shortest routes, each carries the same share, as switches divide flows
    (equal-cost multi-path). Edges need ``weight`` above 0, ``bandwidth`` (bytes/s) and ``latency`` (s).
    """

    def __init__(self, graph: networkx.DiGraph) -> None:
        self.graph = graph
        self._trees: dict[Node, dict[Node, list[Node]]] = {}

    def loads(self, flows: Flows) -> dict[tuple[Node, Node], float]:
        """The amount that crosses each link that is used, in its direction."""
        loads: dict[tuple[Node, Node], float] = defaultdict(float)
        for source, targets in flows.items():
            passing = defaultdict(float, targets)
            for node, before in self._tree(source).items():
                if passing[node] and before:
                    share = passing[node] / len(before)
                    for previous in before:
                        loads[previous, node] += share
                        passing[previous] += share
        return loads

    def bandwidth(self, flows: Flows) -> float:
        """Units of ``flows`` per second that the bottleneck link allows."""
        edges = self.graph.edges
        return min(edges[edge]["bandwidth"] / load for edge, load in self.loads(flows).items())

    def hops(self, source: Node, target: Node) -> int:
        """Number of links that a message passes."""
        return sum(1 for _ in self._route(source, target))

    def latency(self, source: Node, target: Node) -> float:
        """Seconds before the first byte arrives."""
        return sum(self.graph.edges[edge]["latency"] for edge in self._route(source, target))

    def _route(self, source: Node, target: Node) -> Iterator[tuple[Node, Node]]:
        before = self._tree(source)
        while target != source:
            yield before[target][0], target
            target = before[target][0]

    def _tree(self, source: Node) -> dict[Node, list[Node]]:
        """Every node's neighbours on the shortest routes from ``source``, the farthest node first."""
        if source not in self._trees:
            import networkx  # imported here: it takes longer than everything else in this package

            before, distance = networkx.dijkstra_predecessor_and_distance(self.graph, source)
            self._trees[source] = {node: before[node] for node in sorted(distance, key=distance.__getitem__)[::-1]}
        return self._trees[source]
