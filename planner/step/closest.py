"""The candidate that comes closest to fitting in memory, and by how many bytes it misses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.search.linear import SECOND
from planner.step.candidates import Candidate, candidates
from planner.step.layout import ORDERS
from planner.step.level_one import Sharded
from planner.step.search import BYTE_WEIGHTS, Search
from planner.step.stages.bounds import memory_shortfall
from planner.step.stages.ilp import StageSolution, solve_stages
from planner.step.stages.problem import StageProblem

#: Candidates that are looked at closely, those of least memory by their bound first.
TRIES = 24
#: The solver's effort to find out what fills the stages of one candidate; any assignment that fits will do.
STAGE_EFFORT = 2 * SECOND
#: What a shortfall may be off by, relative (it is found by bisection).
PRECISION = 4e-6


@dataclass
class Looks:
    """How many candidates may still be looked at closely; the first of each question always may."""

    left: int

    def take(self) -> bool:
        """Whether there was one left."""
        self.left -= 1
        return self.left >= 0


@dataclass(frozen=True)
class Closest:
    """A candidate under one sharding, and the bytes that its fullest device lacks (0: it fits)."""

    candidate: Candidate
    sharded: Sharded
    problem: StageProblem
    missing: float

    @property
    def order(self) -> tuple[bool, float]:
        """What comes first is closer; with several chunks a rank what is missing is only a lower bound."""
        return self.candidate.chunks_per_rank > 1, self.missing

    def stages(self) -> StageSolution | None:
        """What the stages would run if every device had the bytes that are missing; None if that is not found."""
        memory = tuple((limit + self.missing) * (1 + PRECISION) for limit in self.problem.memory)
        found = solve_stages(replace(self.problem, memory=memory), effort=STAGE_EFFORT, gap=1.0)
        return None if found is None or found.assignment is None else found


def allowed(search: Search) -> Iterator[Candidate]:
    """All candidates that the demands of ``search`` allow."""
    return candidates(
        search.cluster,
        global_batch=search.level_one.global_batch,
        num_units=sum(unit.count for unit in search.level_one.kept.units),
        demands=search.demands,
        micro_batches=search.level_one.micro_batches,
    )


def closest(search: Search, *, looks: Looks, only_fitting: bool = False) -> Closest | None:
    """The candidate that lacks least, the first that fits if one does; None if nothing can be divided.

    At most ``TRIES`` candidates are looked at, lowest bound first, while ``looks`` are left.
    ``only_fitting``: leave out candidates that their bound says do not fit.
    """
    best: Closest | None = None
    any_order = "order" in search.demands.fixed
    ranked = sorted(
        (search.bounds.memory(each), each.chunks_per_rank, each.num_chunks, index, each)
        for index, each in enumerate(allowed(search))
        if each.layout.order == ORDERS[0] or any_order
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
        for found in _weighed(search, candidate):
            if found.missing == 0 and found.stages() is not None:
                return found
            if found.missing > 0 and (best is None or found.order < best.order):
                best = found
    return best


def _weighed(search: Search, candidate: Candidate) -> Iterator[Closest]:
    """The candidate under the sharding of fewest bytes, and where that lacks some under the fastest too."""
    for weight in sorted({0.0, BYTE_WEIGHTS[-1]} if candidate.layout.tensor > 1 else {0.0}, reverse=True):
        sharded = search.sharded(candidate, weight)
        if sharded is not None:
            problem = search.problem(candidate, sharded)
            yield Closest(candidate, sharded, problem, memory_shortfall(problem))


def size_text(num_bytes: float) -> str:
    """Bytes for people: in GiB, or MiB if there are few."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 / 10 else f"{num_bytes / 2**20:.3g} MiB"
