"""What a collective's algorithms send between the parts of a level: flows for ``link_loads``.

``groups`` are the members of each group in ring order, all groups of a mesh axis at once. Unless said otherwise every
member sends one unit in all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from cost_models.link_loads import Flows, Node

Groups = Sequence[Sequence[int]]


def ring_flows(groups: Groups) -> Flows:
    """Half to the next member, half to the one before: rings in both directions."""
    flows = _empty()
    for group in groups:
        for position, member in enumerate(group):
            flows[member][group[(position + 1) % len(group)]] += 0.5
            flows[member][group[position - 1]] += 0.5
    return flows


def message_flows(groups: Groups) -> Flows:
    """All to the next member, as a pipeline passes activations on; the last to the first."""
    flows = _empty()
    for group in groups:
        for position, member in enumerate(group):
            flows[member][group[(position + 1) % len(group)]] += 1.0
    return flows


def exchange_flows(groups: Groups) -> Flows:
    """The same to each other member: an all-to-all."""
    flows = _empty()
    for group in groups:
        for member in group:
            for other in group:
                if other != member:
                    flows[member][other] += 1.0 / (len(group) - 1)
    return flows


def tree_flows(groups: Groups) -> Flows:
    """Half of a unit up and down each edge of two binary trees, about two units for each member."""
    flows = _empty()
    for group in groups:
        for tree in double_tree(len(group)):
            for child, parent in tree.items():
                flows[group[child]][group[parent]] += 0.5
                flows[group[parent]][group[child]] += 0.5
    return flows


def farthest_flows(parts: int) -> Flows:
    """From every part to the one half of the parts away: no even traffic between parts takes longer ways."""
    return {part: {(part + parts // 2) % parts: 1.0} for part in range(parts)}


def double_tree(size: int) -> tuple[dict[int, int], dict[int, int]]:
    """Two binary trees over ``range(size)``, child → parent; what is a leaf of one is mostly inside the other."""
    first = dict(_halves(0, size, None))
    return first, {(child + 1) % size: (parent + 1) % size for child, parent in first.items()}


def _halves(first: int, end: int, parent: int | None) -> Iterator[tuple[int, int]]:
    """The edges of a tree whose root is the middle of a range and whose subtrees are those of its halves."""
    if first == end:
        return
    root = (first + end) // 2
    if parent is not None:
        yield root, parent
    yield from _halves(first, root, root)
    yield from _halves(root + 1, end, root)


def _empty() -> defaultdict[Node, defaultdict[Node, float]]:
    return defaultdict(lambda: defaultdict(float))
