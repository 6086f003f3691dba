"""Level 2: best-first search over all candidates for a training step, with a certificate.

Candidates (layout × micro-batch × schedule) wait in a heap, ordered by a lower bound of their step's seconds. The
candidate at the top gets a tighter bound, in several stages, and returns to the heap; once its shardings, cuts,
recompute and ZeRO are solved (``planner.pipeline_ilp.stage_ilp``) it is an incumbent. Over how many data ranks ZeRO
divides changes no sharding: once it has one a candidate becomes several, and earlier bounds hold for all. The search
stops when the bound at the top is within the gap of the incumbent: everything below is pruned by its bound, which is
the certificate. What is pruned is left for a search with a smaller gap, which goes on from there.
"""

from __future__ import annotations

import copy
import heapq
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from cost_models import Cluster
from planner.pipeline_ilp.stage_bounds import memory_shortfall
from planner.pipeline_ilp.stage_ilp import bound_within_memory, solve_stages
from planner.pipeline_ilp.stage_search import CUTOFF
from planner.solvers.linear import OPTIMAL, SECOND, UNPROVED
from planner.whole_step.bounded_search import BoundedSearch
from planner.whole_step.candidates.candidates import Candidate, Family, families
from planner.whole_step.candidates.demands import Demands
from planner.whole_step.candidates.mesh_layout import ORDERS
from planner.whole_step.costs.byte_weights import ALL_WEIGHTS, STATE_WEIGHTS
from planner.whole_step.costs.level_one import LevelOne, Sharded
from planner.whole_step.result.candidate_fates import CandidateFates, Fate
from planner.whole_step.result.outcome import Outcome, StepSolution, with_solution
from planner.whole_step.result.search_progress import SEARCHING, Progress, Report, SearchTeller
from planner.whole_step.search_entry import SearchEntry, redone

#: The largest context axis of candidates that are solved before the search begins.
MOST_CONTEXT = 2
#: Sizes of the axis of experts that are tried, least bound first, until one fits in memory.
EXPERT_SIZES = 4
#: If the best of these exceeds the least bound by more than this factor, others are solved too.
FAR = 2.0
#: How much slower than the best these may be, so that the simulator can choose among several.
TIES = 0.02
#: Solutions that are kept, unless more alternatives are asked for.
KEPT = 8
#: Schedules of the candidates that are solved before the search begins.
PLAIN = ("1f1b", "interleaved_1f1b")
#: The solver's first effort for a stage program, less before the search begins. If it does not suffice, the candidate
#: returns to the heap under its proved bound, and then gets twice the effort.
DIVE_EFFORT, STAGE_EFFORT = 0.25 * SECOND, SECOND


class Search(BoundedSearch):
    """Best-first search over all candidates of one model on one cluster."""

    def __init__(
        self, level_one: LevelOne, cluster: Cluster, demands: Demands, *, progress: Progress | None = None
    ) -> None:
        super().__init__(level_one, cluster, demands)
        self.teller = SearchTeller(progress)
        self.fates = CandidateFates()
        self.shortfalls: dict[Candidate, float] = {}
        self.solutions: list[StepSolution] = []
        self.order = itertools.count()
        #: Entries that no plan needs to be looked for in, below the cutoff that they were pruned by.
        self.left: list[SearchEntry] = []
        self.earlier: list[SearchEntry] | None = None
        self.finished: set[Candidate] = set()
        self.diving = False

    def go_on_from(self, other: Search) -> None:
        """Take over all that ``other``, for the same demands but for gap and limits, has left of its candidates; prices
        alone if it was of other candidates."""
        self.share_prices(other)
        self.fates.go_on_from(other.fates)
        if other.demands.left_out != self.demands.left_out or other.demands.fixed != self.demands.fixed:
            return
        self.earlier, self.solutions = [redone(entry) for entry in other.left], list(other.solutions)
        self.finished, self.shortfalls = set(other.finished), dict(other.shortfalls)

    def run(self) -> Outcome:
        """Search until the gap is closed, the heap is empty, or a limit is reached."""
        self.deadline = time.monotonic() + self.time_limit
        heap: list[SearchEntry] = []
        if self.earlier is None:
            heap.extend(self._first_entries())
            heapq.heapify(heap)
            self._dive(heap)
        else:
            self._push(heap, self.earlier)
        while heap and heap[0].bound < self._cutoff():
            if self._is_stopped():
                break
            entry = heapq.heappop(heap)
            if entry.stage == 0 and entry.family is None and entry.candidate in self.finished:
                continue
            self._push(heap, self._advance(entry))
            self._tell(heap)
        self.left += heap
        self.fates.note_left(self.left, self._cutoff())
        best = self.solutions[0].seconds if self.solutions else float("inf")
        bound = min((entry.bound for entry in self.left), default=float("inf"))
        return Outcome(self.solutions, min(bound, best), self.status, self.fates.counts, self.shortfalls)

    def _push(self, heap: list[SearchEntry], entries: Iterable[SearchEntry]) -> None:
        for entry in entries:
            if entry.is_worth_trying(self._cutoff()):
                heapq.heappush(heap, entry)
            else:
                self.left.append(entry)

    def _dive(self, heap: list[SearchEntry]) -> None:
        """Solve a few promising candidates first, to have an incumbent to prune with; only one if a limit is reached.

        For every combination of pipeline, context and tensor size (tensor within a node), under the plainest schedules:
        the smallest micro-batch, which fills the pipeline best and needs least memory; and without a pipeline the
        largest that may fit, which gathers parameters least often. If the best is far from the bound, also the
        micro-batch of least bound, whose operators are largest.
        """
        far = FAR * min((entry.bound for entry in heap), default=0.0)
        alone = [entry for entry in heap if entry.candidate.layout.pipeline == 1]
        self.diving = True
        for _ in range(EXPERT_SIZES if self.level_one.num_experts > 1 else 1):
            firsts = self._firsts(heap, lambda entry: (entry.candidate.local_batch, entry.bound))
            self._solve_best(heap, firsts + self._firsts(alone, lambda e: (-e.candidate.local_batch, e.bound)))
        if not self.solutions or self.solutions[0].seconds > far:
            firsts = self._firsts(heap, lambda entry: (entry.bound, entry.candidate.local_batch))
            self._solve_best(heap, firsts)
        self.diving = False

    def _solve_best(self, heap: list[SearchEntry], ready: list[SearchEntry]) -> None:
        """Take ``ready`` through all stages, best first, and drop those that the cutoff prunes."""
        self.finished.update(entry.candidate for entry in ready)
        heapq.heapify(ready)
        while ready:
            entry = heapq.heappop(ready)
            if entry.bound >= self._cutoff() or (self.solutions and self._is_stopped()):
                self.left.append(entry)
                continue
            for follower in self._advance(entry):
                heapq.heappush(heap if self._can_wait(follower) else ready, follower)
            self._tell(heap)

    def _can_wait(self, entry: SearchEntry) -> bool:
        """Whether something plainer than an entry comes first: a lighter price of bytes, less effort, ZeRO over all."""
        layout = entry.candidate.layout
        is_hybrid = layout.zero_ranks and layout != self.zero_layouts(replace(layout, zero_ranks=0))[0]
        return bool(entry.weight or entry.effort or is_hybrid)

    def _firsts(
        self, entries: list[SearchEntry], order: Callable[[SearchEntry], tuple[float, float]]
    ) -> list[SearchEntry]:
        """The first of ``entries`` in ``order`` for every combination of axis sizes, among plain ones if any."""
        best: dict[tuple[int, ...], SearchEntry] = {}
        for entry in [entry for entry in entries if self._is_plain(entry.candidate)] or entries:
            layout = entry.candidate.layout
            key = (layout.pipeline, layout.context, layout.tensor, layout.expert)
            incumbent = best.setdefault(key, entry)
            if order(entry) < order(incumbent):
                best[key] = entry
        chosen = (self._member(entry, order) for entry in best.values())
        firsts = [entry for entry in chosen if entry is not None and entry.candidate not in self.finished]
        return firsts if self.level_one.num_experts == 1 else self._one_of_experts(firsts)

    def _one_of_experts(self, entries: Iterable[SearchEntry]) -> list[SearchEntry]:
        """Of entries that differ in the axis of experts alone, the one of least bound, where none has a solution yet.

        The others stay in the heap.
        """
        best: dict[tuple[int, ...], tuple[float, SearchEntry]] = {}
        solved = {solution.candidate.layout.dense_sizes for solution in self.solutions}
        for entry in entries:
            key = entry.candidate.layout.dense_sizes
            if key in solved:
                continue
            bound = min((each.bound for first in self._scale(entry) for each in self._gather(first)), default=None)
            if bound is not None and (key not in best or bound < best[key][0]):
                best[key] = bound, entry
        return [entry for _, entry in best.values()]

    def _member(self, entry: SearchEntry, order: Callable[[SearchEntry], tuple[float, float]]) -> SearchEntry | None:
        """Of an entry that stands for a family, the first member in ``order``, among plain ones if any."""
        if entry.family is None:
            return entry
        members = list(self._members(entry.family))
        plain = [member for member in members if self._is_plain(member.candidate)]
        return min(plain or members, key=order, default=None)

    def _is_plain(self, candidate: Candidate) -> bool:
        """Whether a candidate is preferred for solving before the search begins."""
        layout = candidate.layout
        near = layout.context <= MOST_CONTEXT and layout.tensor <= self.cluster.levels[0].group_size
        return near and layout.order == ORDERS[0] and candidate.schedule in PLAIN

    def _tell(self, heap: list[SearchEntry]) -> None:
        """Report progress, now and then and at every better plan."""
        best = self.solutions[0].seconds if self.solutions else float("inf")
        self.teller.tell(
            lambda: Report(
                SEARCHING,
                candidate=str(self.solutions[0].candidate) if self.solutions else "",
                seconds=best,
                bound=min(heap[0].bound, best) if heap else best,
                solved=self.fates.num_solved,
                left=sum(entry.bound < best for entry in heap),
                num_devices=self.cluster.num_devices,
            ),
            seconds=best,
        )

    def _cutoff(self) -> float:
        """The seconds that a candidate must beat."""
        num_plans = self.demands.num_alternatives
        if len(self.solutions) < num_plans:
            return float("inf")
        return self.solutions[num_plans - 1].seconds * (1.0 + TIES if self.diving else 1.0 - self.demands.gap)

    def _first_entries(self) -> Iterator[SearchEntry]:
        """An entry for each candidate; of a model with experts, which has many, one for each family."""
        enumerated = families(
            self.cluster,
            global_batch=self.level_one.global_batch,
            num_units=sum(unit.count for unit in self.level_one.step_units.units),
            demands=self.demands,
            micro_batches=self.level_one.micro_batches,
            num_experts=self.level_one.num_experts,
        )
        for family in enumerated:
            if self.level_one.num_experts == 1:
                yield from self._members(family)
                continue
            first = next(iter(family), None)
            if first is not None and self._are_possible([first]):
                bound = family.bound(self.bounds.whole(family.plainest.cut))
                yield SearchEntry(bound, next(self.order), family.plainest, family=family)

    def _members(self, family: Family) -> Iterator[SearchEntry]:
        """An entry for each candidate of a family that may fit in memory; what all have in common is asked for once."""
        members = list(family)
        self.fates.note(Fate.ENUMERATED, members)
        if not members or not self._are_possible(members):
            return
        whole, copied, launched, is_sent = self.bounds.whole(members[0].cut), 0.0, 0.0, False
        if not self.cluster.has_unequal_devices:  # of which a stage may have faster ones
            prices, is_sent = self.links_on(family.layout).axes, family.layout.pipeline > 1
            copied, launched = self.bounds.gradients(members[0], prices), self.bounds.launched(members[0])
        for candidate in members:
            beside = self.bounds.recompute(candidate, self.memory)
            if beside == float("inf"):
                self._lacks(candidate, self.bounds.missing)
                continue
            beside += copied + (self.bounds.received(candidate, prices) if is_sent else 0.0)
            bound = self.step_bound(candidate, max(whole + beside, launched))
            yield SearchEntry(bound, next(self.order), candidate, beside=beside, copied=copied, launched=launched)

    def _are_possible(self, members: list[Candidate]) -> bool:
        """Whether the cut of a family's members divides the model and its least bytes fit."""
        if self.bounds.whole(members[0].cut) == float("inf"):
            self.fates.note(Fate.UNDIVIDED, members)
            return False
        missing = self.bounds.memory(members[0]) - self.memory
        if missing > 0:
            for candidate in members:
                self._lacks(candidate, missing)
        return missing <= 0

    def _lacks(self, candidate: Candidate, missing: float) -> None:
        """Record a lower bound of the memory shortfall of ``candidate``, in bytes."""
        self.fates.note(Fate.OUT_OF_MEMORY, [candidate])
        self.shortfalls[candidate] = max(missing, self.shortfalls.get(candidate, 0.0))

    def _advance(self, entry: SearchEntry) -> Iterable[SearchEntry]:
        """The entries that replace ``entry``, one stage further; none if it is solved or impossible."""
        if entry.family is not None:
            return self._members(entry.family)
        stages = (
            self._scale,
            self._gather,
            self._bound_by_axis,
            self._bound_by_operators,
            self._shard,
            self._bound_stages,
            self._bound_within_memory,
            self._solve,
        )
        return stages[entry.stage](entry)

    def _next(self, entry: SearchEntry, bound: float, **changes: Any) -> SearchEntry:
        """``entry`` one stage further."""
        following = copy.copy(entry)
        following.bound, following.order, following.stage = max(entry.bound, bound), next(self.order), entry.stage + 1
        for name, value in changes.items():
            setattr(following, name, value)
        return following

    def _scale(self, entry: SearchEntry) -> Iterator[SearchEntry]:
        yield self._next(entry, self._bound(entry, self.bounds.scaled(entry.candidate.cut)))

    def _gather(self, entry: SearchEntry) -> Iterator[SearchEntry]:
        """Bound by what ZeRO must gather, lay out and reduce in every micro-batch to fit in memory."""
        candidate = entry.candidate
        links = {layout: self.links_on(layout) for layout in self.zero_layouts(candidate.layout)}
        stages = self.setting(candidate).zero
        seconds = self.bounds.zero(candidate, links, self.memory, stages)
        if seconds == float("inf"):
            self._lacks(candidate, self.bounds.missing)
            return
        communicating = seconds * candidate.num_microbatches / candidate.layout.pipeline
        beside = entry.beside
        if not self.cluster.has_unequal_devices:
            beside += self.bounds.passes(candidate, links, self.memory, stages)
        following = self._next(entry, communicating, beside=beside)
        following.bound = max(following.bound, self._bound(following, self.bounds.scaled(candidate.cut)))
        yield following

    def _bound_by_axis(self, entry: SearchEntry) -> Iterator[SearchEntry]:
        again = self._bound(entry, self.bounds.scaled(entry.candidate.cut))
        if again > entry.bound:
            yield replace(entry, bound=again)  # other candidates have tightened the bound meanwhile
            return
        least = self.bounds.by_axis(entry.candidate.cut, self._enough(entry, self._cutoff()))
        if least == float("inf"):
            self.fates.note_entry(Fate.UNDIVIDED, entry)
            return
        yield self._next(entry, self._bound(entry, least))

    def _bound_by_operators(self, entry: SearchEntry) -> Iterator[SearchEntry]:
        """Bound by the fastest choice of each operator, before a program chooses among them.

        With experts these bounds are much nearer than those of an axis by itself; without, they hardly ever are.
        """
        bound, candidate = entry.bound, entry.candidate
        if self.level_one.num_experts > 1:
            links = self.links_on(candidate.layout)
            least = self.level_one.least_of_operators(candidate.cut, candidate.layout, links)
            if least == float("inf"):
                self.fates.note_entry(Fate.UNDIVIDED, entry)
                return
            bound = self._bound(entry, least)
        yield self._next(entry, bound)

    def _shard(self, entry: SearchEntry) -> Iterator[SearchEntry]:
        candidate = entry.candidate
        again = self._bound(entry, self.bounds.scaled(candidate.cut))
        if again > entry.bound:
            yield replace(entry, bound=again)
            return
        sharded = self.sharded(candidate, entry.weight)
        if sharded is None:
            self.fates.note_entry(Fate.UNDIVIDED, entry)
            return
        elsewhere = self.level_one.may_be_better_elsewhere(candidate.cut)
        if candidate.layout.order == ORDERS[0] and not entry.weight and not elsewhere:
            fastest = self.fastest(candidate)
            self.bounds.learn(candidate.cut, (fastest or sharded).without_samples)
        entry = replace(entry, launched=max(entry.launched, sharded.variant.launched))
        bound = self._bound(entry, sharded.least_seconds)
        if not self._is_known(entry, sharded):
            filled = self._bound_of_sharding(entry, sharded) if bound < self._cutoff() else bound
            yield self._next(entry, max(bound, filled), sharded=sharded)
        yield from self._with_fewer_bytes(entry, bound, sharded)

    def _bound_stages(self, entry: SearchEntry) -> Iterator[SearchEntry]:
        assert entry.sharded is not None
        if not entry.is_divided:
            yield from self._divide(entry, entry.sharded)
            return
        posed = self.pose(entry.candidate, entry.sharded)
        bound = posed.quick_bound(self._cutoff())
        missing = memory_shortfall(posed.problem) if bound < self._cutoff() else 0.0
        if missing > 0:
            self._lacks(entry.candidate, missing)
            return
        yield self._next(entry, bound, problem=posed.problem, proofs=posed.proofs)

    def _divide(self, entry: SearchEntry, sharded: Sharded) -> Iterator[SearchEntry]:
        """An entry for each way in which ZeRO may divide, unless a bound of all of them prunes these at once."""
        bound = max(entry.bound, self.bound_of_ways(entry.candidate, sharded, self._cutoff()))
        if bound >= self._cutoff():
            yield replace(entry, bound=bound)
            return
        for layout in self.zero_layouts(entry.candidate.layout):
            candidate = replace(entry.candidate, layout=layout)
            yield replace(entry, bound=bound, order=next(self.order), candidate=candidate, is_divided=True)

    def _bound_within_memory(self, entry: SearchEntry) -> Iterator[SearchEntry]:
        assert entry.problem is not None
        bound = bound_within_memory(entry.problem, cutoff=self._cutoff(), proofs=entry.proofs)
        if bound == float("inf"):
            self.fates.note_entry(Fate.OUT_OF_MEMORY, entry)
            return
        yield self._next(entry, bound)

    def _solve(self, entry: SearchEntry) -> Iterable[SearchEntry]:
        assert entry.sharded is not None and entry.problem is not None
        gap = self.demands.gap / 2
        cutoff, gap_to_cutoff = self._stage_cutoff(gap)
        effort = entry.effort or (DIVE_EFFORT if self.diving else STAGE_EFFORT)
        self.stage_programs += max(1.0, effort / STAGE_EFFORT)
        solved = solve_stages(
            entry.problem,
            effort=effort,
            deadline=self.deadline,
            cutoff=cutoff if cutoff < float("inf") else None,
            gap=gap,
            gap_to_cutoff=gap_to_cutoff,
            proofs=entry.proofs,
            solver=self.demands.solver,
        )
        if solved is None:
            self.fates.note_entry(Fate.OUT_OF_MEMORY, entry)
            return
        self.fates.note_entry(Fate.SOLVED, entry)
        if solved.assignment is not None:
            self._add(StepSolution(entry.candidate, entry.sharded, entry.problem, solved))
        bound = max(entry.bound, solved.bound)
        ended = solved.status in (CUTOFF, OPTIMAL, UNPROVED) or bound >= self._cutoff()
        is_stuck = not ended and entry.is_stuck(bound, cutoff=self._cutoff())
        if ended or is_stuck or not self._is_worth_more(bound):  # what is stuck a later search may try, as hard
            self.left.append(entry.given_up(bound, effort=effort * is_stuck, cutoff=self._cutoff()))
        else:
            yield replace(entry, bound=bound, order=next(self.order), effort=2 * effort, stuck_at=float("inf"))

    def _is_worth_more(self, bound: float) -> bool:
        """Whether a candidate of this bound gets more effort where some did not suffice."""
        return True

    def _stage_cutoff(self, gap: float) -> tuple[float, float]:
        """What a stage program has to beat, and by which share its bound may stay below that: down to the search's."""
        return self._cutoff() / (1.0 - gap), gap

    def _with_fewer_bytes(self, entry: SearchEntry, bound: float, sharded: Sharded) -> Iterator[SearchEntry]:
        """Yield the candidate under the next higher price of bytes: a slower sharding, but it may fit, or recompute,
        gather or reduce less. ``bound`` is of operators alone: bounds of the stages hold for one sharding only."""
        heavier = next((weight for weight in ALL_WEIGHTS if weight > entry.weight), None)
        if heavier is None or entry.candidate.cut.context * entry.candidate.cut.tensor == 1:
            return
        bound = max(entry.bound, bound)
        if (
            heavier not in STATE_WEIGHTS
            or bound >= self._cutoff()
            or self.reduces_longer(entry.candidate, sharded, bound)
            or self.lacks_memory(entry.candidate, sharded)
        ):
            yield replace(entry, bound=bound, order=next(self.order), weight=heavier)

    def _add(self, solution: StepSolution) -> None:
        self.solutions = with_solution(self.solutions, solution)[: max(KEPT, self.demands.num_alternatives)]
