r"""How long filling and draining a pipeline takes at least under schedules that split backward passes.

Such a schedule takes m·L + (p-1)/p·Σ max(0, φF·F + φI·I + φW·W) over its chunks (``cost_models.step_time``), more where
its order is played. With the mean over ranks for L and the sum over chunks in the maximum, all of one micro-batch in
the whole model,

    step ≥ m/p·(F + I + W) + (p-1)/p·(φF·F + φI·I + φW·W)                                    every row φ       (fill)

**Under one sharding** F, I and W are at least those of its operators and conversions. What else a choice of recompute
and ZeRO adds to them makes the right side no less while m + (p-1)·φ ≥ 0, which φ < 0 asks of gradients that are copied
and of reductions that outlast weight gradients: both are W. Where φF < 0, what is added forward gains that much less.

**Under any sharding** an operator of f seconds forward and b backward has W = s·b and I ≥ (1-s)·b, where its share s
does not depend on the sharding, and one of n equal parts takes at least f/n and b/n. Let T bound all operators and
conversions, and c = max(0, -φW, -φF). Then (p-1)·c of the m times T go to the fill, where they make up for what W and
forwards take off:

    step ≥ (m - (p-1)·c)/p·T + (p-1)/p·Σ ((φF + c)·f + (φI + c)·(1-s)·b + (φW + c)·s·b)/n                  (any fill)

Gradients that are copied are W, of which c·(p-1)/p is taken off again. The code calls c ``shift``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cost_models.schedules import SCHEDULES
from planner.whole_step.candidates.candidates import Candidate
from planner.whole_step.costs.unit_figures import UnitFigures


@dataclass(frozen=True)
class PhaseSeconds:
    """Seconds of one micro-batch in all units: forward, gradients of inputs, gradients of weights."""

    forward: float
    inputs: float
    weights: float

    @property
    def total(self) -> float:
        return self.forward + self.inputs + self.weights


def operator_seconds(figures: Sequence[UnitFigures]) -> PhaseSeconds:
    """The seconds of all operators, without conversions."""
    forward, backward, weights = (
        sum(each.unit.count * seconds for each, seconds in zip(figures, of_units, strict=True))
        for of_units in zip(*((*each.compute, each.weight_backward) for each in figures), strict=True)
    )
    return PhaseSeconds(forward, backward - weights, weights)


def sharded_seconds(figures: Sequence[UnitFigures]) -> PhaseSeconds:
    """The seconds of all operators and conversions under one sharding."""
    operators = operator_seconds(figures)
    return PhaseSeconds(
        operators.forward + sum(each.unit.count * each.communication[0] for each in figures),
        operators.inputs + sum(each.unit.count * each.communication[1] for each in figures),
        operators.weights,
    )


def bound_of_sharding(candidate: Candidate, seconds: PhaseSeconds, *, beside: float, copied: float) -> float:
    """(fill): lower bound of the step under the sharding that takes ``seconds``; 0 where no backward pass is split.

    Args:
        beside: least seconds of a micro-batch beside those, ``copied`` of which copy gradients.
    """
    ranks, m = candidate.layout.pipeline, candidate.num_microbatches
    return max(
        (
            m / ranks * seconds.total
            + share * (on_f * seconds.forward + on_i * seconds.inputs + on_w * seconds.weights)
            + (m / ranks + share * min(0.0, on_f)) * beside
            - share * shift * copied
            for share, shift, (on_f, on_i, on_w) in _rows(candidate)
        ),
        default=0.0,
    )


def terms_of_all(
    candidate: Candidate, undivided: PhaseSeconds, *, beside: float, copied: float
) -> list[tuple[float, float]]:
    """(any fill): pairs (times, rest), the step is at least times · (seconds of a micro-batch under any sharding, which
    ``beside`` adds to) + rest; none where no backward pass is split.

    Args:
        undivided: seconds of all operators if only the batch is divided.
    """
    layout, m = candidate.layout, candidate.num_microbatches
    parts, ranks = layout.num_parts, layout.pipeline
    return [
        (
            m / ranks - share * shift,
            (m / ranks + share * min(0.0, on_f)) * beside
            - share * shift * copied
            + share
            / parts
            * (
                (on_f + shift) * undivided.forward
                + (on_i + shift) * undivided.inputs
                + (on_w + shift) * undivided.weights
            ),
        )
        for share, shift, (on_f, on_i, on_w) in _rows(candidate)
    ]


def _rows(candidate: Candidate) -> Iterator[tuple[float, float, tuple[float, float, float]]]:
    """((p-1)/p, c, φ) of each row that the bounds hold for."""
    row, ranks = SCHEDULES[candidate.schedule], candidate.layout.pipeline
    if not row.splits_backward:
        return
    for on_f, on_i, on_w in row.fills_on(ranks):
        shift = max(0.0, -on_w, -on_f)
        if on_i >= 0 and candidate.num_microbatches >= (ranks - 1) * shift:
            yield (ranks - 1) / ranks, shift, (on_f, on_i, on_w)
