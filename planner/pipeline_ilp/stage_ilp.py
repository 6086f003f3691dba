r"""The stage program: the cuts of the pipeline and the choice of every unit, in one integer program.

Sets. Runs u of N(u) equal units in model order, choices c ∈ C(u) with the figures of ``LayerCosts``; chunks k = 0 … K-1
in model order, on ranks r(k) = 0 … p-1, v = K/p chunks a rank; m micro-batches. A schedule has fill coefficients φ,
in one row or several (``cost_models.schedules``), and at some moments holds most: then i(k) micro-batches of chunk k
are in flight.

Variables::

    n[k,c] ∈ ℕ           units of chunk k with choice c (of run u(c))
    o[k,u] ∈ {0,1}       run u is complete by the end of chunk k
    q[k,u] ∈ {0,1}       chunk k begins in run u                       (only where that changes what it receives)
    w[c] ∈ {0,1}         the very first unit runs as c
    f[k], b[k]           seconds of a micro-batch in chunk k, forward and backward
    L, T, U ≥ 0          seconds of a micro-batch; the tail; the update
    L[j] ≥ 0             the longest chunk of round j < v, chunks j·p … (j+1)·p-1                 (interleaved 1F1B)
    G, E ≥ 0             what filling and draining adds to m·L; to m·L and the fill of a split backward
    y[r,j] ∈ {0,1}       rank r holds a unit whose peak is at least the j-th level Q(j)

Program::

    minimise   m·L + G + T + U                                                                         (objective)
        one chunk a rank, whole backward:  G = Σ_k (f[k] + b[k]) - L
        interleaved 1F1B:                  G ≥ Σ_{k of round j} (f[k] + b[k]) - L[j]       every round j    (fill)
        split backward:                    G = Σ_k g[k] + E,   g[k] ≥ 0,
                                           g[k] ≥ (p-1)/p·(φF·f[k] + φB·(b[k] - W[k]) + φW·W[k])   every φ
        two chunks a rank (of M played):   m·L + G ≥ Σ_k (F·f[k] + I·(b[k] - W[k]) + W·W[k]) + (m-M)·L       (path)
                                           every path through the order, of F, I and W actions of chunk k

    Σ_k Σ_c n[k,c] = N(u)                                                    every run u                   (place)
    Σ_c n[k,c] ≥ 1                                                           every chunk k                 (hold)
    Σ_{j≤k} n[j,u] ≥ N(u)·o[k,u],   Σ_{j≤k} n[j,u+1] ≤ N(u+1)·o[k,u]          every k, u                    (order)
    Σ_u q[k,u] = 1,   q[k,u] ≤ n[k,u],   n[k,u'] ≤ N(u')·(1 - q[k,u])        u' < u                        (receive)
    Σ_c w[c] = 1,   w[c] ≤ n[0,c]                                                                          (first)
    f[k] = Σ (forward ∨ gather_forward)·n + receive                                                        (stream)
    b[k] = Σ (backward ∨ (gather_backward + reduce_backward))·n + receive                       (∨: the larger)
    L ≥ Σ_{r(k)=r} (f[k] + b[k])                                             every rank r                  (load)
        interleaved 1F1B:  L ≥ Σ_j L[j],   L[j] ≥ f[k] + b[k]                every k of round j            (round)
    T ≥ Σ_k x[k] + Σ_{r(k)=r} Σ (gather_backward + reduce_backward + reduce_step)·n
          - Σ_{r(k)=r} (b[k] + x[k]) - Σ_{r(k)<r} (b[k] + x[k])/v            every rank r                  (tail)
    T ≥ Σ_k x[k],   x[k] = Σ wait·n
    T ≥ Σ_c reduce_step(c)·w[c]
    U ≥ Σ_{r(k)=r} Σ (update_step + gather_step)·n                           every rank r                  (update)
    Σ_{r(k)=r} Σ (state + i(k)·saved)·n + Q(0) + Σ_j (Q(j) - Q(j-1))·y[r,j] ≤ memory(r)     every i of r   (remember)
    Σ_{r(k)=r, peak(c) ≥ Q(j)} n[k,c] ≤ N(u)·y[r,j]                          every r, j, u                 (peak)

A proved bound of L (``bounds``) is added as a valid inequality: units are whole, which the relaxation does not
see. (With rounds, p equal units in one take as long as one does; and G ≥ Σ_r load(r) - p·L + (p-1)·h, where some chunk
must be at least h seconds long, see ``rounds``.) With one long run (``ranks``), so is the convex
hull of each rank's least load against the units that it holds,

    n[r] ≤ most(r),   load(r) ≥ slope·n[r] + intercept                       every rank r, hull edge       (tables)

over the loads that are possible in a step no slower than the incumbent. Both are computed rank by rank, exactly, before
the program is solved, together with assignments that often meet the bound, so that the program is often not needed.
With two chunks a rank the relaxation is bounded over whole n[r] first (``whole_shares``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from cost_models.order_path import Counts
from cost_models.schedules import SCHEDULES
from cost_models.step_time import least_step_seconds, played_path, step_memory, step_seconds
from planner.pipeline_ilp.balance import all_alike, balance, by_rounds
from planner.pipeline_ilp.coding import decode, encode
from planner.pipeline_ilp.fronts import LOAD, DualWeights, whole_step_weights
from planner.pipeline_ilp.path_rows import add_longest_path, add_paths
from planner.pipeline_ilp.ranks import Shares, add_tables, share_out
from planner.pipeline_ilp.rounds import add_longest
from planner.pipeline_ilp.segments import Segments, cut_segments
from planner.pipeline_ilp.stage_bounds import memory_shortfall, time_bounds
from planner.pipeline_ilp.stage_problem import (
    ROUNDING,
    Assignment,
    StageProblem,
    as_step,
    fits,
    folded,
    relabelled,
    undominated,
)
from planner.pipeline_ilp.stage_program import StageProgram, build_stage_program, in_rounds
from planner.pipeline_ilp.tails import shorter_tails
from planner.pipeline_ilp.whole_shares import bound_of_whole_shares
from planner.solvers.linear import OPTIMAL, SECOND, STOPPED, UNPROVED, LinearProgram, LinearSolution
from planner.solvers.pulp_solver import HIGHS
from planner.solvers.solver import solve

#: ``StageSolution.status``: no assignment beats the cutoff; the limit was reached without an assignment.
CUTOFF, NOTHING_FOUND = "cutoff", "nothing found in time"


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


#: How often a relaxation is solved at most, each time with one more path.
_RELAXED = 40
#: Gap and effort of the solves that generate a program's paths.
_PATH_GAP, _PATH_EFFORT = 1e-4, 10 * SECOND
#: Rank-by-rank proofs of a problem, without (False) and with (True) its memory limits.
Proofs = dict[bool, Shares | Segments | None]


def solve_stages(
    problem: StageProblem,
    *,
    effort: float = 10 * SECOND,
    deadline: float = math.inf,
    cutoff: float | None = None,
    gap: float = 1e-4,
    gap_to_cutoff: float | None = None,
    proofs: Proofs | None = None,
    solver: str = HIGHS,
) -> StageSolution | None:
    """The fastest assignment within memory, None if there is none at all.

    Assignments built rank by rank are tried first; the integer program is solved where they do not meet the bound.

    Args:
        effort: of the solver, on the integer program and its relaxations (``planner.solvers.linear``).
        deadline: of ``time.monotonic``, by which the solver is stopped whatever its effort.
        cutoff: seconds; only an assignment faster than this is of interest.
        gap: relative gap at which an assignment counts as optimal.
        gap_to_cutoff: by which share of the cutoff the bound may stay below it where nothing beats it (None: ``gap``).
        proofs: the proofs of ``bound_within_memory`` for the same problem.
        solver: PuLP's name of the solver.
    """
    problem = folded(problem)
    if problem.num_units < problem.num_chunks:
        return None
    if memory_shortfall(problem) > 0:
        return None
    reduced, original_indices = undominated(problem)
    limit = math.inf if cutoff is None else cutoff
    search = _Search(reduced, limit, gap, proofs, solver)
    search.gap_to_cutoff = gap if gap_to_cutoff is None else gap_to_cutoff
    solution = search.run(effort, deadline)
    if solution is None or solution.assignment is None:
        return solution
    return replace(solution, assignment=relabelled(solution.assignment, original_indices))


def bound_within_memory(problem: StageProblem, *, cutoff: float = math.inf, proofs: Proofs | None = None) -> float:
    """Lower bound in seconds over assignments within memory, infinite if none fits; ``cutoff`` counts as infinite.

    Stores its proofs in ``proofs``.
    """
    reduced, _ = undominated(folded(problem))
    search = _Search(reduced, cutoff, 0.0, proofs)
    for remember in (False, True):
        if search.settled() or search.prove(remember=remember) is None:
            break
    return search.bound


def whole_program(problem: StageProblem) -> StageProgram:
    """The integer program of a problem within its memory, with all paths through the order that its optimum needs."""
    reduced, _ = undominated(folded(problem))
    search = _Search(reduced, math.inf, _PATH_GAP)
    stage = search.program(None)
    if stage.pipeline is not None:
        search.effort = _PATH_EFFORT
        search.solve(stage)
    return stage


def even_rounds(problem: StageProblem) -> Iterator[Assignment]:
    """Yield assignments with equal rounds for an interleaved schedule (nothing for others): they may run faster than
    uneven ones, although the closed form prices them higher."""
    settled = folded(problem)
    yield from by_rounds(settled, whole_step_weights(settled))


class _Search:
    """Best assignment and bound so far for one problem."""

    def __init__(
        self, problem: StageProblem, cutoff: float, gap: float, proofs: Proofs | None = None, solver: str = HIGHS
    ) -> None:
        self.problem, self.cutoff, self.gap, self.solver = problem, cutoff, gap, solver
        self.gap_to_cutoff = gap
        self.proofs = {} if proofs is None else proofs
        self.bounds = time_bounds(problem)
        self.bound, self.load = self.bounds.step, self.bounds.load
        self.best: Assignment | None = None
        self.objective = math.inf
        self.size = (0, 0)
        self.stage: StageProgram | None = None
        self.effort, self.deadline = 0.0, math.inf
        #: Paths through the order that are longest for some assignment.
        self.paths: dict[Counts, None] = {}

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
        return self.solve(stage)

    def program(self, shares: Shares | Segments | None) -> StageProgram:
        """The integer program, built once, with all valid inequalities proved so far."""
        if self.stage is None:
            self.stage = build_stage_program(self.problem, load_bound=self.load)
            add_longest(self.stage)
            largest = min(self.objective, self.cutoff)
            if isinstance(shares, Shares) and math.isfinite(largest):
                add_tables(self.stage, shares, self.bounds.load_within(largest))
        add_paths(self.stage, self.paths)
        self.size = (self.stage.program.num_variables, self.stage.program.num_constraints)
        return self.stage

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
        if self.paths and least_step_seconds(step, self.paths) * (1.0 - ROUNDING) >= self.objective:
            return True  # a path that is known already is too long
        seconds = step_seconds(step).total
        if seconds < self.objective:
            self.best, self.objective = assignment, seconds
            path = played_path(step)
            if path is not None:
                self.paths[path.counts] = None
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
        if SCHEDULES[self.problem.schedule].played:
            self.try_balanced()
            for assignment in all_alike(self.problem):
                self.offer(assignment)
        proofs: dict[bool, Shares | Segments] = {}
        for remember in (False, True):
            proof = self.prove(remember=remember)
            if proof is None:
                self.try_balanced()
                return None
            if self.settled() or math.isinf(proof.load):
                return proof
            proofs[remember] = proof
            if self.offer_all(proof) and not in_rounds(self.problem):
                break
        last_proof = proof
        if math.isfinite(self.cutoff):
            stage = self.program(last_proof)
            self.branch_on_shares(stage, last_proof)
            if not self.settled():
                self.relax(stage)
        for remember, proof in proofs.items():
            if self.settled() or self.improve(proof, remember=remember):
                break
        return last_proof

    def prove(self, *, remember: bool) -> Shares | Segments | None:
        """Compute the least bottleneck, with unlimited memory or (``remember``) within it, and raise the bounds."""
        if remember not in self.proofs:
            self.proofs[remember] = self.taken_apart(self.within(remember=remember), LOAD)
        proof = self.proofs[remember]
        if proof is not None and math.isinf(proof.load):
            self.bound = math.inf
        elif proof is not None:
            self.load = max(self.load, proof.load)
            self.bound = max(self.bound, self.bounds.step_with(self.load))
        return proof

    def improve(self, proof: Shares | Segments, *, remember: bool) -> bool:
        """Offer assignments beside the proof's; whether no further improvement is expected."""
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
        """Offer cuts that balance the ranks, with the fastest choices within memory."""
        for weights in (LOAD, whole_step_weights(self.problem)):
            assignment = balance(self.problem, weights)
            if assignment is not None:
                self.offer(assignment)

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
            return cut_segments(problem, weights, load_bound=self.load if weights.proves else 0.0)
        return shares

    def raise_bound(self, stage: StageProgram, solution: LinearSolution) -> None:
        """Raise the bound by the solver's bound of a program or its relaxation."""
        limit = min(self.objective, self.cutoff)
        if solution.infeasible:
            self.bound = limit
        elif solution.status == OPTIMAL or any(stage.program.integers):
            self.bound = max(self.bound, min(limit, (solution.bound + stage.constant) * stage.second))

    def solved(self, program: LinearProgram, **options: Any) -> LinearSolution:
        """Solve a program within the remaining effort and time."""
        remaining_seconds = max(0.0, self.deadline - time.monotonic())
        solution = solve(program, time_limit=remaining_seconds, effort=self.effort, **options)
        self.effort = max(0.0, self.effort - solution.effort)
        return solution

    def relax(self, stage: StageProgram) -> None:
        """Raise the bound by the program's relaxation, adding the longest path of each of its solutions."""
        for _ in range(_RELAXED):
            if not self.effort:
                break
            solution = self.solved(stage.program.relaxed())
            self.raise_bound(stage, solution)
            if solution.values is None or self.settled() or not add_longest_path(stage, solution.values):
                break

    def branch_on_shares(self, stage: StageProgram, shares: Shares | Segments | None) -> None:
        """Raise the bound by whole units on each rank, where paths through the order hang on them."""
        if isinstance(shares, Shares):
            limit, gap = self.limit
            proved = limit * (1.0 - gap) * (1.0 + ROUNDING)
            self.bound = max(self.bound, bound_of_whole_shares(stage, shares, proved, deadline=self.deadline))

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
            self.raise_bound(stage, solution)
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
        return path is not None and add_paths(stage, [path.counts]) > 0

    def solution(self, status: str = OPTIMAL) -> StageSolution:
        """The incumbent and the bound as a result."""
        if self.best is None or not self.beats_cutoff:
            proved = self.bound >= self.cutoff * (1 - self.gap_to_cutoff)
            status = CUTOFF if proved else UNPROVED if status == UNPROVED else NOTHING_FOUND
            return StageSolution(None, math.inf, self.bound, status, *self.size)
        if self.settled():
            status = OPTIMAL
        return StageSolution(self.best, self.objective, min(self.bound, self.objective), status, *self.size)
