"""The cheapest tree of conversions from the placement a value is made in to the placements its uses need.

Exact (Dreyfus and Wagner's dynamic program over sets of ends) for as many distinct ends as values really have;
beyond that ends are joined one by one, each by the cheapest way from what is already there.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from planner.sharding_ilp.lattice import Arc, Lattice

#: Above this many distinct ends, ends are joined one by one.
MAX_EXACT_ENDS = 7
#: Breaks ties in favour of fewer steps: each step adds this share of the dearest arc's cost.
TIE_BREAK = 1e-12

#: Cost of an arc for a set of ends (a bit mask) that go through it.
ArcCost = Callable[[Arc, int], float]


def cheapest_tree(lattice: Lattice, root: int, ends: Sequence[int], cost: ArcCost) -> dict[int, tuple[Arc, int]] | None:
    """For every node of the tree but the root: the arc into it, and the mask of ends behind it.

    None if an end cannot be reached.
    """
    search = _TreeSearch(lattice, root, ends, cost)
    return search.exact() if len(ends) <= MAX_EXACT_ENDS else search.one_by_one()


class _TreeSearch:
    def __init__(self, lattice: Lattice, root: int, ends: Sequence[int], cost: ArcCost) -> None:
        self.root = root
        self.ends = list(ends)
        dearest = max((arc.forward + arc.backward for arc in lattice.arcs), default=0.0)
        step = TIE_BREAK * (dearest or 1.0)
        self.cost: ArcCost = lambda arc, mask: cost(arc, mask) + step
        self.into: list[list[Arc]] = [[] for _ in lattice.placements]
        for arc in lattice.arcs:
            self.into[arc.target].append(arc)

    def exact(self) -> dict[int, tuple[Arc, int]] | None:
        full = (1 << len(self.ends)) - 1
        best: dict[int, dict[int, float]] = {}
        choice: dict[int, dict[int, Arc | int]] = {}
        for mask in range(1, full + 1):
            best[mask], choice[mask] = self._for_mask(mask, best)
        if full and self.root not in best[full]:
            return None
        tree: dict[int, tuple[Arc, int]] = {}
        pending = [(self.root, full)] if full else []
        while pending:
            node, mask = pending.pop()
            step = choice[mask].get(node)
            if isinstance(step, int):
                pending.extend(((node, step), (node, mask ^ step)))
            elif step is not None:
                self._join(tree, step, mask)
                pending.append((step.target, mask))
        return with_masks(tree, self.root, self.ends)

    def _for_mask(self, mask: int, best: dict[int, dict[int, float]]) -> tuple[dict[int, float], dict[int, Arc | int]]:
        """Cheapest tree from every node to the ends in ``mask``: split the set here, or take a step first."""
        costs: dict[int, float] = {}
        choice: dict[int, Arc | int] = {}
        if mask & (mask - 1) == 0:
            costs[self.ends[mask.bit_length() - 1]] = 0.0
        part = (mask - 1) & mask
        while part > mask ^ part:
            for node, value in best[part].items():
                total = value + best[mask ^ part].get(node, float("inf"))
                if total < costs.get(node, float("inf")):
                    costs[node], choice[node] = total, part
            part = (part - 1) & mask
        heap = [(value, node) for node, value in costs.items()]
        heapq.heapify(heap)
        while heap:
            value, node = heapq.heappop(heap)
            if value > costs[node]:
                continue
            for arc in self.into[node]:
                total = value + self.cost(arc, mask)
                if total < costs.get(arc.source, float("inf")):
                    costs[arc.source], choice[arc.source] = total, arc
                    heapq.heappush(heap, (total, arc.source))
        return costs, choice

    def _join(self, tree: dict[int, tuple[Arc, int]], arc: Arc, mask: int) -> None:
        """Add an arc; a node that two branches reach keeps its first incoming arc, which then serves both."""
        node, present = arc.target, tree.get(arc.target)
        tree[node] = (arc, mask) if present is None else (present[0], present[1] | mask)

    def one_by_one(self) -> dict[int, tuple[Arc, int]] | None:
        tree: dict[int, tuple[Arc, int]] = {}
        for position, end in enumerate(self.ends):
            mask = 1 << position
            costs, choice = self._for_mask(mask, {})
            starts = [node for node in (self.root, *tree) if node in costs]
            if not starts:
                return None
            node = min(starts, key=lambda start: (costs[start], start))
            while node != end:
                arc = choice[node]
                assert isinstance(arc, Arc)  # a single end is never split
                self._join(tree, arc, mask)
                node = arc.target
        return with_masks(tree, self.root, self.ends)


def with_masks(tree: dict[int, tuple[Arc, int]], root: int, ends: Sequence[int]) -> dict[int, tuple[Arc, int]]:
    """The tree with every arc's mask set to the ends that its way from the root serves; unused arcs dropped."""
    masks: dict[int, int] = {}
    for position, end in enumerate(ends):
        node = end
        while node != root:
            masks[node] = masks.get(node, 0) | 1 << position
            node = tree[node][0].source
    return {node: (arc, masks[node]) for node, (arc, _) in tree.items() if node in masks}
