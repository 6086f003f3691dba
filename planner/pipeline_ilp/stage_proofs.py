"""What is proved of a stage problem whatever has to be beaten, so that it is asked once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from cost_models.order_path import Counts
from planner.pipeline_ilp.ranks import Shares
from planner.pipeline_ilp.segments import Segments
from planner.pipeline_ilp.stage_problem import Assignment
from planner.pipeline_ilp.stage_program import StageProgram


@dataclass
class Proofs:
    """Bounds, assignments and rows of one problem; a solve with another cutoff, gap or effort goes on from them.

    Attributes:
        shares: rank-by-rank proofs, without (False) and with (True) the problem's memory limits.
        bound: lower bound in seconds over all assignments within memory.
        best: the fastest assignment so far, and its seconds (``objective``).
        paths: paths through the order that are longest for some assignment.
        stage: the integer program, and the seconds of the slowest step that its rows allow (``within``).
        is_relaxed: whether the bound of the relaxation of ``stage``, with all its rows, is in ``bound``.
        targets: bounds that branching over the units of ranks has tried to prove.
        tried: heuristics whose assignments have been offered, and whether they are good enough.
    """

    shares: dict[bool, Shares | Segments | None] = field(default_factory=dict)
    bound: float = 0.0
    best: Assignment | None = None
    objective: float = math.inf
    paths: dict[Counts, None] = field(default_factory=dict)
    stage: StageProgram | None = None
    within: float = math.inf
    is_relaxed: bool = False
    targets: set[float] = field(default_factory=set)
    tried: dict[str, bool] = field(default_factory=dict)
