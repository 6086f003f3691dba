"""The search for the best assignment of one stage problem: proofs, heuristics, relaxation, program (``stage_ilp``)."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

from cost_models.schedules import SCHEDULES
from cost_models.step_time import least_step_seconds, played_path, step_memory, step_seconds
from planner.pipeline_ilp.balance import all_alike, balance, by_rounds
from planner.pipeline_ilp.coding import decode, encode
from planner.pipeline_ilp.content_boxes import ContentBoxes
from planner.pipeline_ilp.fronts import LOAD, DualWeights, whole_step_weights
from planner.pipeline_ilp.late_bounds import late_bound
from planner.pipeline_ilp.path_rows import add_longest_path, add_paths
from planner.pipeline_ilp.rank_contents import contents_of_ranks
from planner.pipeline_ilp.ranks import Shares, add_tables, share_out
from planner.pipeline_ilp.rounds import add_longest
from planner.pipeline_ilp.segments import Segments, cut_segments
from planner.pipeline_ilp.stage_bounds import time_bounds
from planner.pipeline_ilp.stage_problem import ROUNDING, Assignment, StageProblem, as_step, fits
from planner.pipeline_ilp.stage_program import StageProgram, in_rounds
from planner.pipeline_ilp.stage_proofs import Proofs
from planner.pipeline_ilp.stage_rows import build_stage_program
from planner.pipeline_ilp.tails import shorter_tails
from planner.pipeline_ilp.whole_shares import bound_of_whole_shares
from planner.solvers.linear import OPTIMAL, STOPPED, UNPROVED, LinearProgram, LinearSolution
from planner.solvers.pulp_solver import HIGHS
from planner.solvers.solver import solve

#: ``StageSolution.status``: no assignment beats the cutoff; the limit was reached without an assignment.
CUTOFF, NOTHING_FOUND = "cutoff", "nothing found in time"
#: How often a relaxation is solved at most, each time with one more path.
_RELAXED = 40


@dataclass(frozen=True)
class StageSolution:
    """The best assignment and its certificate.

    Attributes:
        assignment: the best assignment, None if none beats the cutoff or none was found in time.
        objective: seconds of the step, as ``step_seconds`` prices it (infinite without an assignment).
        bound: lower bound in seconds over all assignments (with a cutoff: over those that beat it).
        status: "optimal" (within the requested gap), "cutoff", "stopped by effort limit" …
        num_variables, num_constraints: size of the integer program, 0 if none was built.
    """

    assignment: Assignment | None
    objective: float
    bound: float
    status: str
    num_variables: int = 0
    num_constraints: int = 0

    @property
    def gap(self) -> float:
        """Relative distance of objective and bound."""
        return (self.objective - self.bound) / self.objective if self.objective else 0.0


class StageSearch:
    """Best assignment and bound so far for one problem, from what ``proofs`` has of it."""

    def __init__(
        self, problem: StageProblem, cutoff: float, gap: float, proofs: Proofs | None = None, solver: str = HIGHS
    ) -> None:
        self.problem, self.cutoff, self.gap, self.solver = problem, cutoff, gap, solver
        self.gap_to_cutoff = gap
        #: What nobody asks for again is proved up to the cutoff alone.
        self.is_asked_once = proofs is None
        self.proofs = Proofs() if proofs is None else proofs
        self.bounds = time_bounds(problem)
        self.bound = max(self.bounds.step, late_bound(problem), self.proofs.bound)
        self.load = self.bounds.load
        self.best, self.objective = self.proofs.best, self.proofs.objective
        self.size = (0, 0)
        self.effort, self.deadline = 0.0, math.inf

    def run(self, effort: float, deadline: float) -> StageSolution | None:
        """Try quick heuristics, then the integer program's relaxation, then the program itself."""
        self.effort, self.deadline = effort, deadline
        if self.settled():
            return self.solution()
        shares = self.share()
        if self.settled():
            return self.solution()
        if shares is not None and math.isinf(shares.load):
            return None
        self.try_shorter_tail()
        if self.settled():
            return self.solution()
        stage = self.program(shares)
        if self.best is not None or stage.pipeline is not None:
            self.relax(stage)
            if self.settled():
                return self.solution()
        self.bound_by_contents()
        return self.solution() if self.settled() else self.solve(stage)

    def program(self, shares: Shares | Segments | None) -> StageProgram:
        """The integer program, built once, with all valid inequalities proved so far."""
        proofs = self.proofs
        largest = self.limited if isinstance(shares, Shares) else math.inf
        if proofs.stage is None or largest != proofs.within:
            stage = build_stage_program(self.problem, load_bound=self.load)
            add_longest(stage)
            if isinstance(shares, Shares) and math.isfinite(largest):
                add_tables(stage, shares, self.bounds.load_within(largest))
            proofs.stage, proofs.within, proofs.is_relaxed = stage, largest, False
        stage = proofs.stage
        if add_paths(stage, proofs.paths):
            proofs.is_relaxed = False
        self.size = (stage.program.num_variables, stage.program.num_constraints)
        return stage

    @property
    def limited(self) -> float:
        """Seconds that only assignments of interest beat."""
        return min(self.objective, self.cutoff)

    def raise_to(self, bound: float) -> None:
        """Raise the bound to one over all assignments: what holds for those that beat the limit is at most that."""
        self.bound = max(self.bound, bound)
        self.proofs.bound = max(self.proofs.bound, bound)

    def settled(self) -> bool:
        """Whether the best is within the gap of the bound, or no assignment can beat the cutoff."""
        limit, gap = self.limit
        return math.isfinite(limit) and limit - self.bound <= gap * limit

    @property
    def limit(self) -> tuple[float, float]:
        """Seconds to beat, and by which share of them the bound may stay below."""
        return (self.objective, self.gap) if self.beats_cutoff else (self.cutoff, self.gap_to_cutoff)

    @property
    def beats_cutoff(self) -> bool:
        """Whether the best is faster than the cutoff."""
        return self.objective < self.cutoff

    def offer(self, assignment: Assignment) -> bool:
        """Keep an assignment if it fits and is the fastest; whether it fits."""
        step = as_step(self.problem, assignment)
        if not fits(self.problem, step_memory(step)):
            return False
        paths = self.proofs.paths
        if paths and least_step_seconds(step, paths) * (1.0 - ROUNDING) >= self.objective:
            return True  # a path that is known already is too long
        seconds = step_seconds(step).total
        if seconds < self.objective:
            self.best, self.objective = assignment, seconds
            self.proofs.best, self.proofs.objective = assignment, seconds
            path = played_path(step)
            if path is not None:
                paths[path.counts] = None
        return True

    def offer_all(self, proof: Shares | Segments) -> bool:
        """Offer the assignment of a proof, with even chunks on each rank where that fits; whether any fits."""
        if isinstance(proof, Shares) and self.problem.num_chunks > self.problem.num_ranks and self.offer(proof.even):
            return True
        return proof.assignment is not None and self.offer(proof.assignment)

    def share(self) -> Shares | Segments | None:
        """Share units out over ranks and take over what that proves, with a cutoff also what the relaxation does; only
        if that settles nothing look for better.

        Returns the last proof, None for a problem that cannot be taken rank by rank.
        """
        is_played = SCHEDULES[self.problem.schedule].played
        if is_played and math.isinf(self.cutoff):
            self.try_balanced()
        proof = self.prove(remember=False)
        if self.settled():
            return proof
        if proof is None:
            self.do_without_shares()
            return None
        proofs = {False: proof}
        if not self.offer_all(proof) or in_rounds(self.problem):
            proof = self.prove(remember=True)
            assert proof is not None  # as without memory limits
            if self.settled() or math.isinf(proof.load):
                return proof
            self.offer_all(proof)
            proofs[True] = proof
        self.bound_by_program(proof)
        if is_played and not self.settled():
            self.try_balanced()
            self.bound_by_program(proof)
        for remember, each in proofs.items():
            if self.settled() or self.improve(each, remember=remember):
                break
        return proof

    def bound_by_program(self, proof: Shares | Segments) -> None:
        """With a cutoff, take over what the program proves without branching over all of its variables."""
        if math.isfinite(self.cutoff) and not self.settled():
            stage = self.program(proof)
            self.branch_on_shares(stage, proof)
            if not self.settled():
                self.relax(stage)

    def do_without_shares(self) -> None:
        """Take over what the relaxation proves, which often settles a problem with a cutoff; else look for better."""
        if math.isfinite(self.cutoff):
            self.relax(self.program(None))
        if not self.settled():
            self.try_balanced()

    def prove(self, *, remember: bool) -> Shares | Segments | None:
        """Compute the least bottleneck, with unlimited memory or (``remember``) within it, and raise the bounds."""
        shares = self.proofs.shares
        if remember not in shares:
            shares[remember] = self.taken_apart(self.within(remember=remember), LOAD)
        proof = shares[remember]
        if proof is not None and math.isinf(proof.load):
            self.raise_to(self.limited if math.isfinite(self.most) else math.inf)
        elif proof is not None:
            self.load = max(self.load, proof.load)
            self.raise_to(self.bounds.step_with(self.load))
        return proof

    def improve(self, proof: Shares | Segments, *, remember: bool) -> bool:
        """Offer assignments beside the proof's; whether no further improvement is expected."""
        key = f"improved, {remember=}"
        if key not in self.proofs.tried:
            is_enough = self.offer_beside(proof, remember=remember)
            if self.settled():
                return True
            self.proofs.tried[key] = is_enough
        return self.proofs.tried[key]

    def offer_beside(self, proof: Shares | Segments, *, remember: bool) -> bool:
        """Offer assignments beside the proof's until one settles the problem; whether any by other weights fits."""
        problem = self.within(remember=remember)
        fitting = False
        for weights in (LOAD, whole_step_weights(self.problem)):
            shares = proof if weights.proves else self.taken_apart(problem, weights)
            if shares is None or math.isinf(shares.load):
                continue
            for assignment in by_rounds(problem, weights):
                self.offer(assignment)
                if self.settled():
                    return True
            fitting |= self.offer_all(shares)
        return fitting and not in_rounds(self.problem)

    def within(self, *, remember: bool) -> StageProblem:
        """The problem with its memory or without."""
        memory = self.problem.memory if remember else (math.inf,) * self.problem.num_ranks
        return replace(self.problem, memory=memory)

    def try_balanced(self) -> None:
        """Offer cuts that balance the ranks, with the fastest choices within memory, and chunks that are all alike."""
        if self.proofs.tried.setdefault("balanced", False):
            return
        self.proofs.tried["balanced"] = True
        if SCHEDULES[self.problem.schedule].played:
            for assignment in all_alike(self.problem):
                self.offer(assignment)
        for weights in (LOAD, whole_step_weights(self.problem)):
            balanced = balance(self.problem, weights)
            if balanced is not None:
                self.offer(balanced)

    def try_shorter_tail(self) -> None:
        """Offer the incumbent with shorter tails, if its tail exceeds the gap."""
        if self.best is None:
            return
        if step_seconds(as_step(self.problem, self.best)).tail <= self.gap * self.objective:
            return
        for assignment in shorter_tails(self.problem, self.best):
            self.offer(assignment)

    def taken_apart(self, problem: StageProblem, weights: DualWeights) -> Shares | Segments | None:
        """The least bottleneck rank by rank, None for a problem that does not decompose by rank."""
        shares = share_out(problem, weights)
        if shares is None and problem.num_chunks == problem.num_ranks:
            if not weights.proves:
                return cut_segments(problem, weights, load_bound=0.0)
            return cut_segments(problem, weights, load_bound=self.load, most=self.most)
        return shares

    @property
    def most(self) -> float:
        """The largest load that is of interest, infinite where proofs are kept for other cutoffs."""
        return self.bounds.load_within(self.limited) if self.is_asked_once else math.inf

    def raise_bound(self, stage: StageProgram, solution: LinearSolution, *, is_relaxed: bool) -> None:
        """Raise the bound by the solver's of a program or its relaxation.

        It holds for what beats the limit: the program has a cutoff, and rows may be of steps that are no slower. Where
        there are none of these, a relaxation bounds all assignments.
        """
        limit, bound = self.limited, (solution.bound + stage.constant) * stage.second
        if solution.infeasible:
            self.raise_to(limit)
        elif not is_relaxed:
            self.raise_to(min(limit, bound))
        elif solution.status == OPTIMAL and math.isinf(self.proofs.within):
            self.raise_to(bound)
        elif solution.status == OPTIMAL:
            self.raise_to(min(limit, bound))

    def solved(self, program: LinearProgram, **options: Any) -> LinearSolution:
        """Solve a program within the remaining effort and time."""
        remaining_seconds = max(0.0, self.deadline - time.monotonic())
        solution = solve(program, time_limit=remaining_seconds, effort=self.effort, **options)
        self.effort = max(0.0, self.effort - solution.effort)
        return solution

    def relax(self, stage: StageProgram) -> None:
        """Raise the bound by the program's relaxation, adding the longest path of each of its solutions."""
        if self.proofs.is_relaxed:
            return
        for _ in range(_RELAXED):
            if not self.effort:
                break
            remaining_seconds = max(0.0, self.deadline - time.monotonic())
            solution = stage.relaxation.solve({}, effort=self.effort, time_limit=remaining_seconds)
            self.effort = max(0.0, self.effort - solution.effort)
            self.raise_bound(stage, solution, is_relaxed=True)
            if solution.values is None or self.settled():
                break
            if not add_longest_path(stage, solution.values):
                self.proofs.is_relaxed = True
                break

    def bound_by_contents(self) -> None:
        """Raise the bound by what each rank may hold, with assignments on the way, where that is few enough to list."""
        if self.proofs.tried.setdefault("contents", False):
            return
        contents = contents_of_ranks(self.problem, self.bounds.load_within(self.limited))
        if contents is None:
            self.proofs.tried["contents"] = True
            return
        within = self.limited
        bound = ContentBoxes(self.problem, contents).bound(self.offer, self.enough, lambda: self.limited)
        self.raise_to(min(bound, within))
        self.proofs.tried["contents"] = not self.settled()

    def enough(self) -> float:
        """The bound that settles the problem."""
        limit, gap = self.limit
        return limit * (1.0 - gap)

    def branch_on_shares(self, stage: StageProgram, shares: Shares | Segments | None) -> None:
        """Raise the bound by whole units on each rank, where paths through the order hang on them."""
        target = self.enough() * (1.0 + ROUNDING)
        if isinstance(shares, Shares) and target not in self.proofs.targets:
            self.proofs.targets.add(target)
            bound = bound_of_whole_shares(stage, shares, target, deadline=self.deadline)
            self.raise_to(min(bound, self.limited))

    def solve(self, stage: StageProgram) -> StageSolution | None:
        """Solve the integer program from the incumbent, and again while its solutions' longest paths are missing."""
        limit = None if math.isinf(self.cutoff) else self.cutoff / stage.second - stage.constant
        gap = self.gap
        while True:
            start = encode(stage, self.best) if self.best is not None else None
            solution = self.solved(stage.program, gap=gap, cutoff=limit, start=start, solver=self.solver)
            assignment = None if solution.values is None else decode(stage, solution.values)
            if assignment is not None:
                self.offer(assignment)
            self.raise_bound(stage, solution, is_relaxed=False)
            if solution.infeasible and self.best is None and math.isinf(self.cutoff):
                return None
            if self.settled() or solution.status in STOPPED:
                return self.solution(OPTIMAL if solution.infeasible else solution.status)
            # The solver's gap is of its incumbent, which may be slower than the cutoff.
            is_open = not self.beats_cutoff and gap > self.gap_to_cutoff
            if not self.add_path(stage, assignment) and not is_open:
                return self.solution(OPTIMAL if solution.infeasible else solution.status)
            gap = self.gap_to_cutoff if is_open else gap

    def add_path(self, stage: StageProgram, assignment: Assignment | None) -> bool:
        """Add the longest path of an assignment to the program; whether it was missing."""
        path = None if assignment is None else played_path(as_step(self.problem, assignment))
        is_new = path is not None and add_paths(stage, [path.counts]) > 0
        self.proofs.is_relaxed &= not is_new
        return is_new

    def solution(self, status: str = OPTIMAL) -> StageSolution:
        """The incumbent and the bound as a result."""
        if self.best is None or not self.beats_cutoff:
            proved = self.bound >= self.cutoff * (1 - self.gap_to_cutoff)
            status = CUTOFF if proved else UNPROVED if status == UNPROVED else NOTHING_FOUND
            return StageSolution(None, math.inf, self.bound, status, *self.size)
        if self.settled():
            status = OPTIMAL
        return StageSolution(self.best, self.objective, min(self.bound, self.objective), status, *self.size)
