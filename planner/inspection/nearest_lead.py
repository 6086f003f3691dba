"""The least distance at which another plan leads: a root for each plan that a search finds, until searches find none.

A distance is how far a figure of the cluster is from what it is assumed to be, the absolute logarithm of the factor.
Every plan's objective is known at every distance, so that where one found plan begins to lead is a root; which plan
leads at a distance only a search there can say.

1. Search at the farthest distance. If nothing leads there, search in the middle.
2. Of the plan that leads, take the root. Search ``tolerance`` before it; what leads there has a nearer root, and so on.
   After ``NEAR_SEARCHES`` of them halve the distance to where nothing leads, so that many plans that each lead a little
   earlier than the last end, too.
3. Where nothing leads ``tolerance`` before the root, search half way, unless some search was near there.

Where objectives are linear in the inverse of the figure (terms that are constant, and terms in proportion to it) the
best of all plans is concave in it and nothing can lead between two distances at which nothing does: 1 and 2 suffice. A
step also takes maxima of such terms (streams beside each other, arithmetic beside memory), for which that is not
proved: 3 is for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

#: Roots that are each searched just before; searches in all.
NEAR_SEARCHES, MAX_SEARCHES = 3, 14
#: How precise the tolerance is.
_ROUNDING = 1.0 + 1e-6

Winner = TypeVar("Winner")


@dataclass(frozen=True)
class Lead(Generic[Winner]):
    """Where another plan begins to lead.

    Attributes:
        distance: the least found, None if nothing leads.
        winner: what leads from there on.
        ended: whether searches found nothing ``tolerance`` before it; not if their number ended first.
        searches: how many there were.
    """

    distance: float | None
    winner: Winner | None
    ended: bool
    searches: int


@dataclass
class _Searched(Generic[Winner]):
    """What searches have found: the distances where nothing leads, and the nearest lead."""

    search_at: Callable[[float], Winner | None]
    lead_begins: Callable[[Winner, float, float], float]
    silent: list[float]
    left: int = MAX_SEARCHES
    distance: float = float("inf")
    winner: Winner | None = None

    def search(self, distance: float) -> bool:
        """Search at a distance; whether something leads there."""
        self.left -= 1
        winner = self.search_at(distance)
        if winner is None:
            self.silent.append(distance)
            return False
        self.winner = winner
        self.distance = min(distance, self.lead_begins(winner, self.silent_before(distance), distance))
        return True

    def silent_before(self, distance: float) -> float:
        """The last distance before this one at which nothing leads."""
        return max(silent for silent in self.silent if silent <= distance)

    def approach(self, tolerance: float) -> None:
        """Move the lead nearer until nothing leads ``tolerance`` before it."""
        near = NEAR_SEARCHES
        while self.left > 0 and self.winner is not None:
            before = self.silent_before(self.distance)
            if self.distance - before <= tolerance * _ROUNDING:
                return
            self.search(self.distance - tolerance if near > 0 else (before + self.distance) / 2)
            near -= 1

    def is_open(self, farthest: float) -> bool:
        """Whether no search was about half way to ``farthest``."""
        return not any(farthest / 4 <= silent <= 3 * farthest / 4 for silent in self.silent)


def nearest_lead(
    search_at: Callable[[float], Winner | None],
    lead_begins: Callable[[Winner, float, float], float],
    *,
    farthest: float,
    tolerance: float,
    leads_on: bool = False,
) -> Lead[Winner]:
    """The least distance from which on some plan leads, up to ``tolerance``, in at most ``MAX_SEARCHES`` searches.

    Args:
        search_at: the plan that leads at a distance, None if none does.
        lead_begins: the distance between the second argument, where the plan does not lead, and the third, where it
            does, from which on it leads.
        leads_on: whether what leads at a distance leads at all that are farther, so that no half way is searched.
    """
    searched = _Searched(search_at, lead_begins, [0.0])
    searched.search(farthest)
    while searched.left > 0:
        searched.approach(tolerance)
        nearest = min(searched.distance, farthest)
        if leads_on or nearest <= tolerance or searched.left <= 0 or not searched.is_open(nearest):
            break
        if not searched.search(nearest / 2):
            break
    number = MAX_SEARCHES - searched.left
    if searched.winner is None:
        return Lead(None, None, True, number)
    before = searched.silent_before(searched.distance)
    return Lead(searched.distance, searched.winner, searched.distance - before <= tolerance * _ROUNDING, number)
