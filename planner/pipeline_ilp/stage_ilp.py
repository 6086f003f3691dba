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
    D[f], D[b] ≥ 0       the slowest forward, the slowest backward                                      (GPipe)
    L[j] ≥ 0             the longest chunk of round j < v, chunks j·p … (j+1)·p-1                 (interleaved 1F1B)
    G ≥ 0                what filling and draining adds to m·L
    y[r,j] ∈ {0,1}       rank r holds a unit whose peak is at least the j-th level Q(j)

Program::

    minimise   m·L + G + T + U                                                                         (objective)
        one chunk a rank, whole backward:  G = Σ_k (f[k] + b[k]) - L
        interleaved 1F1B:                  G ≥ Σ_{k of round j} (f[k] + b[k]) - L[j]       every round j    (fill)
        split backward:                    G = Σ_k g[k],   g[k] ≥ 0,
                                           g[k] ≥ (p-1)/p·(φF·f[k] + φB·(b[k] - W[k]) + φW·W[k])   every φ
        two chunks a rank (of M played):   G ≥ Σ_k g[k],
                                           m·L + G ≥ Σ_k (F·f[k] + I·(b[k] - W[k]) + W·W[k]) + (m-M)·L       (path)
                                           every path through the order, of F, I and W actions of chunk k

    Σ_k Σ_c n[k,c] = N(u)                                                    every run u                   (place)
    Σ_c n[k,c] ≥ 1                                                           every chunk k                 (hold)
    Σ_{j≤k} n[j,u] ≥ N(u)·o[k,u],   Σ_{j≤k} n[j,u+1] ≤ N(u+1)·o[k,u]          every k, u                    (order)
    Σ_u q[k,u] = 1,   q[k,u] ≤ n[k,u],   n[k,u'] ≤ N(u')·(1 - q[k,u])        u' < u                        (receive)
    Σ_c w[c] = 1,   w[c] ≤ n[0,c]                                                                          (first)
    f[k] = Σ (forward ∨ gather_forward)·n + receive                                                        (stream)
    b[k] = Σ (backward ∨ (gather_backward + reduce_backward))·n + receive                       (∨: the larger)
    L ≥ Σ_{r(k)=r} (f[k] + b[k])                                             every rank r                  (load)
        GPipe:             L ≥ D[f] + D[b],   D[f] ≥ f[k],   D[b] ≥ b[k]     every k                   (direction)
        interleaved 1F1B:  L ≥ Σ_j L[j],   L[j] ≥ f[k] + b[k]                every k of round j            (round)
    T ≥ Σ_k x[k] + Σ_{r(k)=r} Σ (gather_backward + reduce_backward + reduce_step)·n
          - Σ_{r(k)=r} (b[k] + x[k]) - Σ_{r(k)<r} (b[k] + x[k])/v            every rank r                  (tail)
    T ≥ Σ_k x[k],   x[k] = Σ wait·n
        interleaved 1F1B, in rounds of P micro-batches:
                    T ≥ Σ_{r(k)=r} x[k],   T ≥ Σ_{r(k)=r} x[k] + Σ_{j≤k, r(j)=r} (c[j] - b[j] - x[j])     every r, k
                          - (P-1)·Σ_{j<k, r(j)=r} (b[j] - g[j]) - Σ_{j<p, r(j)<r} (b[j] + x[j])
            g[k] = Σ (gather_backward + reduce_backward)·n,   c[k] = g[k] + Σ reduce_step·n
        weights last:  T ≥ e[k] - Σ_{r<r(k)} s[r],   e[k] = Σ (reduce_backward + reduce_step - W)·n     every k < p
                       T ≥ Σ_{r(k)=r} e[k] - Σ_{0<r'<p-1, r'≠r} s'[r'] - d[r]         every r, two chunks a rank
            s[r] = Σ_{r(k)=r} Σ (0 ∨ σI·(backward - W) + σW·W)·n/v,   d[0] = Σ_{r(k)>0} b[k]/v, else 0
    T ≥ Σ_c reduce_step(c)·w[c]
        one chunk:  T ≥ Σ_c x(c)·n[c] + Σ_c e(c)·w[c]                                                      (late)
                    T ≥ Σ_c x(c)·n[c] + Σ_{u(c)≤u} s(c)·n[c]                     every run u but the last
                    T ≥ Σ_c x(c)·n[c] + Σ_{u(c)≤u} s(c)·n[c] - Σ_{u(c)=u} gather_backward·n[c] + Σ_c e(c)·z[c]
                    Σ_c z[c] = 1,   0 ≤ z[c] ≤ n[c],   c of run u+1
            s(c): communication beyond the last backward, e(c): reductions beyond it, behind the unit's compute
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
With two chunks a rank the relaxation is bounded over whole n[r] first (``whole_shares``). With one chunk a rank, where
few contents of a rank fit, the program gives way to boxes of its largest figures (``content_boxes``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from planner.pipeline_ilp.balance import by_rounds
from planner.pipeline_ilp.fronts import whole_step_weights
from planner.pipeline_ilp.stage_bounds import memory_shortfall
from planner.pipeline_ilp.stage_problem import Assignment, StageProblem, folded, relabelled, undominated
from planner.pipeline_ilp.stage_program import StageProgram, in_rounds
from planner.pipeline_ilp.stage_proofs import Proofs
from planner.pipeline_ilp.stage_search import StageSearch, StageSolution
from planner.solvers.linear import SECOND
from planner.solvers.pulp_solver import HIGHS

#: Gap and effort of the solves that generate a program's paths.
_PATH_GAP, _PATH_EFFORT = 1e-4, 10 * SECOND


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
    search = StageSearch(reduced, limit, gap, proofs, solver)
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
    search = StageSearch(reduced, cutoff, 0.0, proofs)
    proof = None if search.settled() else search.prove(remember=False)
    if proof is not None and not search.settled() and (in_rounds(reduced) or not search.offer_all(proof)):
        search.prove(remember=True)  # where all that the other has fits anyway, it has the same load
    return search.bound


def whole_program(problem: StageProblem) -> StageProgram:
    """The integer program of a problem within its memory, with all paths through the order that its optimum needs."""
    reduced, _ = undominated(folded(problem))
    search = StageSearch(reduced, math.inf, _PATH_GAP)
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
