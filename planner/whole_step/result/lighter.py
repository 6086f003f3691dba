"""Among equally fast plans, choose by memory; then the plainer schedule, then fewer collectives.

The search stops at the first plan that is proved to be within the gap. Others within it may need far less memory:
shardings that price memory, or stages that recompute or shard a little more where overlap hides the cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from cost_models.schedules import SCHEDULES
from cost_models.step_time import step_memory
from planner.pipeline_ilp.posed_problem import quick_bound
from planner.pipeline_ilp.stage_ilp import solve_stages
from planner.pipeline_ilp.stage_problem import StageProblem, as_step
from planner.pipeline_ilp.stage_search import StageSolution
from planner.whole_step.best_first import DIVE_EFFORT, Search
from planner.whole_step.candidates.candidates import Candidate, candidates
from planner.whole_step.costs.byte_weights import BYTE_WEIGHTS
from planner.whole_step.costs.level_one import Sharded
from planner.whole_step.costs.step_prices import EXPERT
from planner.whole_step.result.outcome import StepSolution
from planner.whole_step.result.plan_of_solution import Judged, judge

#: Prices of a byte, as multiples of (seconds / bytes of the fastest), in the shardings that are tried.
WEIGHTS = (*BYTE_WEIGHTS, 1.0, 4.0)
#: Smaller savings of memory than this share are ignored.
MUCH = 0.05
#: Gap of the stage solves, which only decide whether a plan is fast enough.
PRECISION = 1e-3
#: Steps of the bisection for the least memory of a plan.
HALVINGS = 4


def lightest(search: Search, best: Judged, others: Iterable[Judged], *, slowest: float, simulated: float) -> Judged:
    """``best``, or a plan with much less memory (or as much, but plainer) that takes no more than ``slowest`` seconds
    by the closed form and ``simulated`` in the simulator."""
    tied = [best]
    tied += [judged for judged in others if judged.solution.seconds <= slowest and judged.report.seconds <= simulated]
    for solution in _lighter(search, best.solution, slowest):
        judged = judge(solution)
        if judged.report.seconds <= simulated:
            tied.append(judged)
    most = min(map(fullest, tied)) * (1.0 + MUCH)
    return min((judged for judged in tied if fullest(judged) <= most), key=_plainness)


def fullest(judged: Judged) -> float:
    """Bytes of the fullest device."""
    return max(step_memory(judged.step))


def _plainness(judged: Judged) -> tuple[int, int, float, float]:
    candidate = judged.solution.candidate
    schedule = list(SCHEDULES).index(candidate.schedule) if candidate.layout.pipeline > 1 else -1
    return schedule, candidate.num_chunks, num_collectives(judged.solution), judged.report.seconds


def num_collectives(solution: StepSolution) -> float:
    """Number of collectives that operators wait for, over all micro-batches."""
    trees = solution.sharded.variant.assignment.trees
    between = sum(
        item.copies * bool(item.arc.step.collectives[0]) + item.backward_copies * bool(item.arc.step.collectives[1])
        for tree in trees.values()
        for item in tree
    )
    return between * solution.candidate.num_microbatches


def _lighter(search: Search, solution: StepSolution, slowest: float) -> Iterator[StepSolution]:
    """Yield solutions of the same layout and schedule in ever less memory: other shardings, other micro-batches."""
    best, fast = solution, FastEnough(slowest, search.demands.solver)
    for candidate, sharded in _shardings(search, solution.candidate, slowest):
        other = replace(solution, candidate=candidate, sharded=sharded, problem=search.problem(candidate, sharded))
        fitting = fast.within(other, memory_of(best) * (1.0 - MUCH))
        if fitting is not None:
            best = fitting
            yield best
    low, high = 0.0, memory_of(best)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        fitting = fast.within(best, middle)
        if fitting is None:
            low = middle
            continue
        best, high = fitting, memory_of(fitting)
        yield best


def _shardings(search: Search, like: Candidate, slowest: float) -> Iterator[tuple[Candidate, Sharded]]:
    """Yield candidates that differ from ``like`` in micro-batches only, under the shardings that may be fast enough."""
    sizes = {EXPERT: 1, **like.layout.sizes}
    same = {**search.demands.fixed, **{axis: frozenset((size,)) for axis, size in sizes.items()}}
    if like.layout.pipeline > 1:
        same |= {"schedule": frozenset((like.schedule,)), "chunks_per_rank": frozenset((like.chunks_per_rank,))}
    siblings = candidates(
        search.cluster,
        global_batch=search.level_one.global_batch,
        num_units=sum(unit.count for unit in search.level_one.step_units.units),
        demands=replace(search.demands, fixed=same),
        micro_batches=search.level_one.micro_batches,
        num_experts=search.level_one.num_experts,
    )
    for candidate in siblings:
        if candidate.layout != like.layout or candidate.bound(search.bounds.scaled(candidate.cut)) > slowest:
            continue
        for weight in WEIGHTS if candidate.cut.context * candidate.cut.tensor > 1 else WEIGHTS[:1]:
            sharded = search.sharded(candidate, weight)
            if sharded is None or candidate.bound(sharded.seconds) > slowest:
                break  # shardings of fewer bytes are slower still
            yield candidate, sharded


def memory_of(solution: StepSolution) -> float:
    """Bytes of the fullest device."""
    return max(step_memory(as_step(solution.problem, solution.assignment)))


@dataclass
class FastEnough:
    """Looks for solutions that take no more than ``slowest`` seconds in little memory."""

    slowest: float
    solver: str
    #: Problems without such a solution, or for which the effort did not suffice, each with the most bytes tried.
    unsolved: list[tuple[StageProblem, float]] = field(default_factory=list)

    def within(self, solution: StepSolution, memory: float) -> StepSolution | None:
        """The solution within ``memory`` bytes on each device; None if it is too slow, or not solved within the effort.

        What other shardings have in common, or what did not do in more memory, is not tried again.
        """
        if any(memory <= most and solution.problem == problem for problem, most in self.unsolved):
            return None
        stages = self._stages(solution.problem, memory)
        if stages is None:
            self.unsolved.append((solution.problem, memory))
            return None
        return replace(solution, stages=stages)

    def _stages(self, problem: StageProblem, memory: float) -> StageSolution | None:
        problem = replace(problem, memory=tuple(min(memory, limit) for limit in problem.memory))
        cutoff = self.slowest * (1.0 + 1e-9)
        if quick_bound(problem, cutoff=cutoff) >= cutoff:
            return None
        solved = solve_stages(problem, effort=DIVE_EFFORT, cutoff=cutoff, gap=PRECISION, solver=self.solver)
        return None if solved is None or solved.assignment is None else solved
