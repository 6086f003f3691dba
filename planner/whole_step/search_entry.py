"""What waits in the heap of the search: a candidate, or candidates that have a bound in common."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from planner.pipeline_ilp.stage_problem import StageProblem
from planner.pipeline_ilp.stage_proofs import Proofs
from planner.whole_step.candidates.candidates import Candidate, Family
from planner.whole_step.costs.level_one import Sharded

#: Stages that bound a candidate no further than to the cutoff, by the place of the stage after them.
CUT_OFF = (3, 6, 7)
#: The share of what is missing that twice the effort must raise a bound by.
STUCK = 0.1
#: A later search tries what is stuck again if this share of what was missing is missing now, or less.
AGAIN = 0.5


@dataclass(eq=False)
class SearchEntry:
    """A candidate, or all of a family, with its bound and how far it has come; in the order of ``bound``, ``order``."""

    bound: float
    order: int
    candidate: Candidate
    stage: int = 0
    problem: StageProblem | None = None
    sharded: Sharded | None = None
    weight: float = 0.0
    #: Least seconds of a micro-batch beside its operators as level 1 counts them: computed again, gradients copied.
    beside: float = 0.0
    #: How many of those copy gradients.
    copied: float = 0.0
    #: Least seconds in which the host launches a micro-batch, during which the device computes.
    launched: float = 0.0
    effort: float = 0.0
    #: What a search had to beat when it got stuck with this effort; infinite where none did.
    stuck_at: float = math.inf
    #: Whether the candidate's layout says over how many ranks ZeRO divides; before its stages are bounded it need not.
    is_divided: bool = False
    #: Where the entry stands for all candidates of a family.
    family: Family | None = None
    proofs: Proofs = field(default_factory=Proofs)

    def __lt__(self, other: SearchEntry) -> bool:
        # not by tuples, as ``order=True`` compares: a search compares a hundred thousand times
        return self.order < other.order if self.bound == other.bound else self.bound < other.bound

    def is_stuck(self, bound: float, *, cutoff: float) -> bool:
        """Whether twice the effort raised the bound to ``bound``, by next to nothing of what ``cutoff`` asks for."""
        return self.effort > 0.0 and bound - self.bound < STUCK * (cutoff - self.bound)

    def given_up(self, bound: float, *, effort: float, cutoff: float) -> SearchEntry:
        """The entry as a search leaves it that had to beat ``cutoff``: stuck with this effort, or not at all with 0."""
        return replace(self, bound=bound, effort=effort, stuck_at=cutoff if effort else math.inf)

    def is_worth_trying(self, cutoff: float) -> bool:
        """Whether it may beat ``cutoff``, and no search got stuck where little more had to be proved."""
        return self.bound < cutoff and cutoff - self.bound <= AGAIN * (self.stuck_at - self.bound)

    def __copy__(self) -> SearchEntry:
        # what ``copy.copy`` does by itself takes five times as long: a search copies ten thousand times
        other = object.__new__(SearchEntry)
        other.__dict__.update(self.__dict__)
        return other


def redone(entry: SearchEntry) -> SearchEntry:
    """A pruned entry before the stage that pruned it, which may bound it further under a later cutoff."""
    return replace(entry, stage=entry.stage - 1) if entry.stage in CUT_OFF else entry
