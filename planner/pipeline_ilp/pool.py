"""Lower bound of the ranks' mean load within memory, by weak duality; for any number of runs.

Let every rank r pay λ(r) ≥ 0 seconds a byte, and let a unit of run u be worth

    w(u) ≤ min_c (seconds(c) + λ(r) · bytes(c, r))                                   on every rank r

Summed over the units of a rank, load(r) + λ(r) · room(r) ≥ Σ w(u); over all ranks, with no load above L,

    L ≥ (Σ_u N(u) · w(u) − Σ_r λ(r) · room(r)) / p

for any w, with the least λ(r) that they allow: max_c (w(u) − seconds(c)) / bytes(c, r). The w that are tried follow
from one price of a byte, equal on all ranks: the slope between two choices. A rank's largest peak reduces its room; the
bound takes the level of peaks with the largest λ · room, so it holds for any level.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from planner.pipeline_ilp.stage_problem import ROUNDING, StageProblem
from planner.pipeline_ilp.stage_program import chunks_of

Array = NDArray[np.float64]

#: How many slopes between two choices are tried as the price of a byte.
_TRIED = 12


def pooled_load(problem: StageProblem) -> float:
    """Lower bound of a rank's largest load within memory, in seconds, for a ``folded`` problem; receives are left out.

    Infinite if the model does not fit in the ranks' memory together.
    """
    runs = np.repeat(np.arange(len(problem.runs)), [len(run.choices) for run in problem.runs])
    costs = [choice.costs for run in problem.runs for choice in run.choices]
    seconds = np.array([layer.forward + layer.backward for layer in costs])
    state, saved = np.array([layer.state_bytes for layer in costs]), np.array([layer.saved_bytes for layer in costs])
    peaks = np.array([layer.peak_bytes for layer in costs])
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
    chunks = np.array([[problem.in_flight[chunk] for chunk in rank] for rank in chunks_of(problem)], dtype=float)
    paid, most = np.full((len(worth), len(held)), -math.inf), np.zeros(len(worth))
    for level in np.unique(peaks):
        byte = needed[:, :, peaks <= level].max(axis=2)
        is_allowed = (runs == longest) & (peaks <= level)
        beyond = np.zeros((*byte.shape, chunks.shape[1]))
        if is_allowed.any():
            sizes_of = np.maximum(1.0, state[is_allowed] + chunks[:, :, None] * saved[is_allowed])
            units = (seconds[is_allowed] + byte[:, :, None, None] * sizes_of).min(axis=3)
            beyond = np.maximum(0.0, units - values[:, longest, None, None])
        paid = np.maximum(paid, byte * np.maximum(0.0, limits - level) - beyond.sum(axis=2))
        most = np.maximum(most, beyond.max(axis=(1, 2)))
    elsewhere = min(float(counts.sum() - counts[longest]), float(problem.num_chunks))
    return float((values @ counts - paid.sum(axis=1) - elsewhere * most).max()) / problem.num_ranks


def _least_held(problem: StageProblem) -> Array:
    """By rank, the fewest micro-batches in flight of any of its chunks."""
    held = np.full(problem.num_ranks, math.inf)
    np.minimum.at(held, np.array(problem.ranks), np.array(problem.in_flight, dtype=float))
    return held


def _slopes(seconds: Array, sizes: Array, runs: NDArray[np.int64]) -> Array:
    """Zero, and (some of) the prices of a byte at which two choices of a run are equally cheap."""
    first, second = np.triu_indices(len(seconds), 1)
    slower, freed = seconds[second] - seconds[first], sizes[first] - sizes[second]
    slopes = np.unique(
        (slower / np.where(freed == 0, 1.0, freed))[(runs[first] == runs[second]) & (slower * freed > 0)]
    )
    if len(slopes) > _TRIED:
        slopes = slopes[np.unique(np.linspace(0, len(slopes) - 1, _TRIED).round().astype(int))]
    return np.concatenate(([0.0], slopes))
