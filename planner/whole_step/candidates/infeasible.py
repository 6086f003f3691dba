"""What to say when no plan is found: demands that contradict each other, or missing memory and what helps."""

from __future__ import annotations

from collections.abc import Sequence

from cost_models import Cluster
from cost_models.text import counted
from passes.plan.step_plan import RankMemory
from planner.pipeline_ilp.stage_problem import as_step
from planner.solvers.linear import EFFORT_LIMIT, STOPPED, TIME_LIMIT
from planner.whole_step.best_first import Search
from planner.whole_step.candidates.conflicts import conflict
from planner.whole_step.candidates.mixed_samples import mixed_samples
from planner.whole_step.candidates.nearest_feasible import Closest, Looks, closest, size_text
from planner.whole_step.candidates.no_plan import NoPlan
from planner.whole_step.candidates.relaxations import relaxations
from planner.whole_step.result.outcome import Outcome, StepSolution
from planner.whole_step.result.plan_of_solution import memory_by_rank

#: Candidates that are looked at, in all, for what is missing and what would help.
LOOKS = 60
_PARTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "saved activations",
    "transient": "temporaries while one layer runs",
}


def infeasible(search: Search, outcome: Outcome) -> NoPlan:
    """The error for a search that found nothing."""
    contradiction = conflict(search)
    if contradiction is not None:
        return NoPlan(contradiction)
    if outcome.status == TIME_LIMIT:
        return NoPlan(
            f"no plan was found within time_limit = {search.time_limit:g} s, {outcome.counts['solved']} of "
            f"{counted(outcome.counts['enumerated'], 'candidate')} solved: give more time",
            proved=False,
        )
    if outcome.status == EFFORT_LIMIT:
        return NoPlan(
            f"no plan was found with max_programs = {search.max_programs:g}, {outcome.counts['solved']} of "
            f"{counted(outcome.counts['enumerated'], 'candidate')} solved: allow more programs",
            proved=False,
        )
    looks = Looks(LOOKS)
    nearest = closest(search, looks=looks)
    if nearest is None:
        return NoPlan(
            f"no way to divide batch, sequence and tensors over {counted(search.cluster.num_devices, 'device')} meets "
            "the demands: loosen fix, forbid or constraints, or take another number of devices"
        )
    helpful = "; or ".join(relaxations(search, nearest, looks=looks))
    return NoPlan(f"{_what_is_missing(search, nearest)}. What would help, each by itself: {helpful}")


def infeasible_on_unequal(cluster: Cluster, outcomes: Sequence[Outcome]) -> NoPlan:
    """The error for searches on unequal devices, in every order, that found nothing."""
    stopped = [outcome.status for outcome in outcomes if outcome.status in STOPPED]
    shortfalls = [(missing, str(each)) for outcome in outcomes for each, missing in outcome.shortfalls.items()]
    if stopped:
        return NoPlan(f"no plan was found on {cluster.name!r} before the {stopped[0]}: allow more", proved=False)
    if not shortfalls:
        return NoPlan(
            f"no way to divide batch, sequence and tensors over the {cluster.num_devices} unequal devices of "
            f"{cluster.name!r} meets the demands: loosen fix, forbid or constraints"
        )
    missing, candidate = min(shortfalls)
    return NoPlan(
        f"no plan fits in the memory of the unequal devices of {cluster.name!r}: {candidate} comes closest, and lacks "
        f"at least {size_text(missing)} on one of them; allow recompute=full and zero=3, smaller micro-batches, or "
        "take more devices"
    )


def _what_is_missing(search: Search, nearest: Closest) -> str:
    fullest = _fullest(search, nearest)
    message = (
        f"no plan fits in memory: {nearest.candidate} comes closest, and lacks {size_text(nearest.missing)} on its "
        f"fullest device, of which {size_text(search.memory)} can be used"
    )
    if fullest is None:
        return message + _why_whole(search)
    parts = {name: getattr(fullest, field) for field, name in _PARTS.items()}
    sizes = ", ".join(f"{name} {size_text(size)}" for name, size in parts.items() if size)
    most = max(parts, key=lambda name: parts[name])
    return f"{message}; most of what it holds is {most} ({sizes}){_why_whole(search)}"


def _why_whole(search: Search) -> str:
    """Why batches cannot be cut into micro-batches, which would save most, if they cannot."""
    reason = mixed_samples(search)
    return f"; {reason}" if reason else ""


def _fullest(search: Search, nearest: Closest) -> RankMemory | None:
    """What the fullest device would hold if it could."""
    stages = nearest.stages()
    if stages is None or stages.assignment is None:
        return None
    solution = StepSolution(nearest.candidate, nearest.sharded, nearest.problem, stages)
    ranks = memory_by_rank(search, solution, as_step(nearest.problem, stages.assignment))
    return max(ranks, key=lambda rank: rank.total)
