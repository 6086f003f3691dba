"""Reuse the matches of one copy of a repeated block in the other copies.

Patterns are tried at every operator from the last to the first. Two copies near the end of a run are looked at as any
other operators are; where both agree on a place, the copies between those and the first two take the result
over: no pattern there, or one, which is then laid over each copy again but not checked again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from passes.fuse.patterns import Row
from passes.ir.graph import Graph, Node
from passes.repeats.repeated_blocks import BlockRun, find_blocks

#: What stands for an operator at which no pattern ends.
NOTHING: Literal["nothing"] = "nothing"
#: What ends at an operator; None: to be looked at in every copy, as what is said of it names its copy's values.
Ending = Row | Literal["nothing"] | None
#: Copies that are looked at themselves: at the end, and before which nothing is like what is before the others.
LAST, FIRST = 4, 2


@dataclass(frozen=True)
class _Place:
    """An operator of a run: which run and copy, and the position that all copies have in common."""

    run: int
    copy: int
    position: int


class Copies:
    """Endings by place: recorded in two copies, predicted for the others."""

    def __init__(self, graph: Graph) -> None:
        self.runs: tuple[BlockRun, ...] = tuple(run for run in find_blocks(graph) if run.num_copies > LAST + FIRST)
        self.places = {
            name: _Place(number, copy, position)
            for number, run in enumerate(self.runs)
            for copy, names in enumerate(run.copies)
            for position, name in enumerate(names)
        }
        self.noted: dict[_Place, Ending] = {}

    def note(self, node: Node, ending: Ending) -> None:
        """Remember what ended in ``node``."""
        place = self.places.get(node.name)
        if place is not None:
            self.noted[place] = ending

    def ending_of(self, node: Node) -> Ending:
        """The pattern that ends in ``node``, as in the recorded copies; None if the node must be looked at itself."""
        place = self.places.get(node.name)
        if place is None or not FIRST <= place.copy < self.runs[place.run].num_copies - LAST:
            return None
        return self._of_models(place)

    def agree(self) -> bool:
        """Whether the second copy of every run, looked at itself, has the endings that the recorded copies predict."""
        seconds = (place for place in self.noted if place.copy == 1)
        return all(self._of_models(place) in (None, self.noted[place]) for place in seconds)

    def _of_models(self, place: _Place) -> Ending:
        """The ending on which both recorded copies agree, else None."""
        last = self.runs[place.run].num_copies - LAST
        first, second = (self.noted.get(_Place(place.run, copy, place.position)) for copy in (last, last + 1))
        return first if first == second else None
