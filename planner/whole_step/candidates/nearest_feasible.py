"""The candidate that comes closest to fitting in memory, and its memory shortfall in bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.pipeline_ilp.stage_bounds import memory_shortfall
from planner.pipeline_ilp.stage_ilp import solve_stages
from planner.pipeline_ilp.stage_problem import StageProblem
from planner.pipeline_ilp.stage_search import StageSolution
from planner.solvers.linear import SECOND
from planner.whole_step.best_first import Search
from planner.whole_step.candidates.candidates import Candidate, candidates
from planner.whole_step.candidates.mesh_layout import ORDERS
from planner.whole_step.costs.byte_weights import ALL_WEIGHTS
from planner.whole_step.costs.level_one import Sharded

#: How many candidates are examined, in order of their lower bound of memory.
TRIES = 24
#: The solver's effort to find any assignment of one candidate that fits.
STAGE_EFFORT = 2 * SECOND
#: Relative error of a shortfall (it comes from bisection).
PRECISION = 4e-6


@dataclass
class Looks:
    """Budget of candidates that may still be examined; the first of each question is always examined."""

    left: int

    def take(self) -> bool:
        """Use up one; whether the budget allowed it."""
        self.left -= 1
        return self.left >= 0


@dataclass(frozen=True)
class Closest:
    """A candidate under one sharding, and the memory shortfall of its fullest device in bytes (0: it fits)."""

    candidate: Candidate
    sharded: Sharded
    problem: StageProblem
    missing: float

    @property
    def order(self) -> tuple[bool, float]:
        """Sort key, closest first; with several chunks a rank ``missing`` is only a lower bound, so these come last."""
        return self.candidate.chunks_per_rank > 1, self.missing

    def stages(self) -> StageSolution | None:
        """The stages' solution if every device had the missing bytes too; None if the solver finds none."""
        memory = tuple((limit + self.missing) * (1 + PRECISION) for limit in self.problem.memory)
        solution = solve_stages(replace(self.problem, memory=memory), effort=STAGE_EFFORT, gap=1.0)
        return None if solution is None or solution.assignment is None else solution


def allowed(search: Search) -> Iterator[Candidate]:
    """All candidates that the demands of ``search`` allow, each with ZeRO over as many data ranks as may be."""
    matching = candidates(
        search.cluster,
        global_batch=search.level_one.global_batch,
        num_units=sum(unit.count for unit in search.level_one.step_units.units),
        demands=search.demands,
        micro_batches=search.level_one.micro_batches,
        num_experts=search.level_one.num_experts,
    )
    return map(search.leanest, matching)


def closest(search: Search, *, looks: Looks, only_fitting: bool = False) -> Closest | None:
    """The first candidate that fits, else the one with the least shortfall; None if nothing can be divided.

    Examines at most ``TRIES`` candidates, lowest bound first, within the budget ``looks``.
    ``only_fitting``: skip candidates whose bound exceeds the memory.
    """
    best: Closest | None = None
    any_order = "order" in search.demands.fixed
    ranked = sorted(
        (search.bounds.memory(candidate), candidate.chunks_per_rank, candidate.num_chunks, index, candidate)
        for index, candidate in enumerate(allowed(search))
        if candidate.layout.order == ORDERS[0] or any_order
    )
    for least, _, _, _, candidate in ranked[:TRIES]:
        missing = max(0.0, least - search.memory)
        late = not looks.take() and best is not None
        if (
            late
            or missing == float("inf")
            or (best and best.order <= (False, missing))
            or (only_fitting and missing > 0)
        ):
            break
        for option in _weighed(search, candidate):
            if option.missing == 0 and option.stages() is not None:
                return option
            if option.missing > 0 and (best is None or option.order < best.order):
                best = option
    return best


def _weighed(search: Search, candidate: Candidate) -> Iterator[Closest]:
    """Yield the candidate under the sharding of fewest bytes, then under the fastest one."""
    for weight in sorted({0.0, ALL_WEIGHTS[-1]} if candidate.layout.tensor > 1 else {0.0}, reverse=True):
        sharded = search.sharded(candidate, weight)
        if sharded is not None:
            problem = search.problem(candidate, sharded)
            yield Closest(candidate, sharded, problem, memory_shortfall(problem))


def size_text(num_bytes: float) -> str:
    """Bytes as text, in GiB or, if small, in MiB."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 / 10 else f"{num_bytes / 2**20:.3g} MiB"


def enough_text(num_bytes: float) -> str:
    """Bytes that suffice, as ``size_text`` writes them but never fewer: rounded up."""
    unit = 2**30 / 10 if num_bytes >= 2**30 / 10 else 10.0 ** (math.floor(math.log10(num_bytes / 2**20)) - 2) * 2**20
    return size_text(math.ceil(num_bytes / unit) * unit)
