"""The mean load of the ranks within memory, bounded by weak duality; for any number of runs.

Let every rank r pay λ(r) ≥ 0 seconds a byte, and let a unit of run u be worth

    w(u) ≤ min_c (seconds(c) + λ(r) · bytes(c, r))                                   on every rank r

Summed over the units of a rank, load(r) + λ(r) · room(r) ≥ Σ w(u); over all ranks, with no load above L,

    L ≥ (Σ_u N(u) · w(u) − Σ_r λ(r) · room(r)) / p

for any w, with the least λ(r) that they allow: max_c (w(u) − seconds(c)) / bytes(c, r). Tried are the w of one worth of
a byte, the same on all ranks, that is the slope between two choices. The largest peak of a rank takes room from it: of
all levels of peaks the one is counted for which λ · room is largest, so that any may be the rank's.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from planner.step.stages.problem import ROUNDING, StageProblem
from planner.step.stages.program import chunks_of

Array = NDArray[np.float64]

#: Slopes between two choices that are tried as the worth of a byte.
_TRIED = 12


def pooled_load(problem: StageProblem) -> float:
    """Seconds that the largest load of a rank is at least, within memory (``folded``); what is received is left out.

    Infinite if the ranks' memory together does not hold the model.
    """
    runs = np.repeat(np.arange(len(problem.runs)), [len(run.choices) for run in problem.runs])
    costs = [choice.costs for run in problem.runs for choice in run.choices]
    seconds = np.array([each.forward + each.backward for each in costs])
    state, saved = np.array([each.state_bytes for each in costs]), np.array([each.saved_bytes for each in costs])
    peaks = np.array([each.peak_bytes for each in costs])
    counts = np.array([run.count for run in problem.runs], dtype=float)
    starts = np.searchsorted(runs, np.arange(len(problem.runs)))
    if not all(map(math.isfinite, problem.memory)):
        return float(np.minimum.reduceat(seconds, starts) @ counts) / problem.num_ranks
    held = _least_held(problem)
    sizes = np.maximum(1.0, state + held[:, None] * saved)
    worth = _slopes(seconds, np.median(sizes, axis=0), runs)
    values = np.minimum.reduceat(seconds + worth[:, None] * np.median(sizes, axis=0), starts, axis=1)
    needed = np.maximum(0.0, (values[:, runs] - seconds)[:, None, :] / sizes)
    limits = np.array(problem.memory) * (1 + ROUNDING)
    longest = int(np.argmax(counts))
    chunks = np.array([[problem.in_flight[chunk] for chunk in mine] for mine in chunks_of(problem)], dtype=float)
    paid, most = np.full((len(worth), len(held)), -math.inf), np.zeros(len(worth))
    for level in np.unique(peaks):
        byte = needed[:, :, peaks <= level].max(axis=2)
        mine = (runs == longest) & (peaks <= level)
        beyond = np.zeros((*byte.shape, chunks.shape[1]))
        if mine.any():
            sizes_of = np.maximum(1.0, state[mine] + chunks[:, :, None] * saved[mine])
            units = (seconds[mine] + byte[:, :, None, None] * sizes_of).min(axis=3)
            beyond = np.maximum(0.0, units - values[:, longest, None, None])
        paid = np.maximum(paid, byte * np.maximum(0.0, limits - level) - beyond.sum(axis=2))
        most = np.maximum(most, beyond.max(axis=(1, 2)))
    elsewhere = min(float(counts.sum() - counts[longest]), float(problem.num_chunks))
    return float((values @ counts - paid.sum(axis=1) - elsewhere * most).max()) / problem.num_ranks


def _least_held(problem: StageProblem) -> Array:
    """By rank, micro-batches in flight of the chunk of which it holds fewest."""
    held = np.full(problem.num_ranks, math.inf)
    np.minimum.at(held, np.array(problem.ranks), np.array(problem.in_flight, dtype=float))
    return held


def _slopes(seconds: Array, sizes: Array, runs: NDArray[np.int64]) -> Array:
    """Worths of a byte at which two choices of a run are equally cheap (some of them), and none."""
    first, second = np.triu_indices(len(seconds), 1)
    slower, freed = seconds[second] - seconds[first], sizes[first] - sizes[second]
    found = np.unique((slower / np.where(freed == 0, 1.0, freed))[(runs[first] == runs[second]) & (slower * freed > 0)])
    if len(found) > _TRIED:
        found = found[np.unique(np.linspace(0, len(found) - 1, _TRIED).round().astype(int))]
    return np.concatenate(([0.0], found))
