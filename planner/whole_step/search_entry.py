"""What waits in the heap of the search: a candidate, or candidates that have a bound in common."""

from __future__ import annotations

from dataclasses import dataclass, field

from planner.pipeline_ilp.stage_ilp import Proofs
from planner.pipeline_ilp.stage_problem import StageProblem
from planner.whole_step.candidates.candidates import Candidate, Family
from planner.whole_step.costs.level_one import Sharded


@dataclass(order=True)
class SearchEntry:
    """A candidate, or all of a family, with its bound and how far it has come."""

    bound: float
    order: int
    candidate: Candidate = field(compare=False)
    stage: int = field(compare=False, default=0)
    problem: StageProblem | None = field(compare=False, default=None)
    sharded: Sharded | None = field(compare=False, default=None)
    weight: float = field(compare=False, default=0.0)
    recompute: float = field(compare=False, default=0.0)
    effort: float = field(compare=False, default=0.0)
    #: Where the entry stands for all candidates of a family.
    family: Family | None = field(compare=False, default=None)
    proofs: Proofs = field(compare=False, default_factory=dict)
