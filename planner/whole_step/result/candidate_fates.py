"""What became of every candidate of a search: each counts once, however often searches come back to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import IntEnum

from planner.whole_step.candidates.candidates import Candidate
from planner.whole_step.search_entry import SearchEntry


class Fate(IntEnum):
    """Of a candidate that met several, under other shardings or in a later search, the largest counts."""

    ENUMERATED = 0
    UNDIVIDED = 1
    OUT_OF_MEMORY = 2
    LEFT = 3
    PRUNED = 4
    SOLVED = 5


#: What a plan calls them.
_NAMES = {
    Fate.UNDIVIDED: "cannot be divided",
    Fate.OUT_OF_MEMORY: "out of memory",
    Fate.LEFT: "not tried",
    Fate.PRUNED: "pruned by bound",
    Fate.SOLVED: "solved",
}


class CandidateFates:
    """The fate of each candidate, those that differ only in how ZeRO divides as one."""

    def __init__(self) -> None:
        self.by_candidate: dict[Candidate, Fate] = {}
        self._counts = dict.fromkeys(Fate, 0)

    def note(self, fate: Fate, candidates: Iterable[Candidate]) -> None:
        """Note what became of ``candidates``, where it says more than what was noted before."""
        for candidate in candidates:
            self._note(fate, candidate.undivided)

    def note_entry(self, fate: Fate, entry: SearchEntry) -> None:
        """The same of what waited in the heap; a family that nobody opened was not enumerated."""
        if entry.family is None:
            self._note(fate, entry.candidate.undivided)

    def note_left(self, entries: Iterable[SearchEntry], cutoff: float) -> None:
        """Note what waits when a search ends: what cannot beat ``cutoff``, and what a limit kept it from."""
        for entry in entries:
            self.note_entry(Fate.PRUNED if entry.bound >= cutoff else Fate.LEFT, entry)

    def go_on_from(self, other: CandidateFates) -> None:
        """Take over what another search noted."""
        for candidate, fate in other.by_candidate.items():
            self._note(fate, candidate)

    @property
    def num_solved(self) -> int:
        return self._counts[Fate.SOLVED]

    @property
    def counts(self) -> Counter[str]:
        """How many were enumerated, and of those how many met which fate."""
        met = {name: self._counts[fate] for fate, name in _NAMES.items()}
        return +Counter({"enumerated": len(self.by_candidate), **met})

    def _note(self, fate: Fate, candidate: Candidate) -> None:
        before = self.by_candidate.get(candidate)
        if before is not None:
            if before >= fate:
                return
            self._counts[before] -= 1
        self.by_candidate[candidate] = fate
        self._counts[fate] += 1
