"""The effect of rounding alone on a model's training, measured on one device without sharding.

Sums in another order round differently, and a deep model, a gradient whose terms cancel, or Adam's division by a nearly
zero gradient can amplify the difference. To measure it, the same training runs from weights whose last bit is changed
at random, as in Monte Carlo arithmetic (Parker, 1997): the results then differ by rounding alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn

from passes.capture.independent_copy import independent_copy
from planner.verification.comparison import Comparison
from planner.verification.training_run import Results, TrainingCase, compare, run_alone

#: Runs from changed weights.
_RUNS = 2
#: Sharded sums may differ by so many times the difference of the runs.
_FACTOR = 16.0
#: Upper limits of the error that rounding may explain: a multiple of the tolerance, and a part of the value.
_MOST_TOLERANCES, _MOST = 1e4, 1e-3


def judged_by_rounding(
    comparisons: Sequence[Comparison],
    model: nn.Module,
    training: TrainingCase,
    expected: Results,
    *,
    tolerance: float,
    exact: bool,
) -> list[Comparison]:
    """``comparisons`` with the errors that rounding explains, if any is above ``tolerance``.

    Args:
        model: as it was before training.
        expected: results of training it unsharded.
    """
    if all(comparison.error <= tolerance for comparison in comparisons):
        return list(comparisons)
    rounding: dict[tuple[str, str], float] = {}
    for seed in range(_RUNS):
        results = run_alone(last_bits_changed(model, seed=seed), training)
        for comparison in compare(results, expected, training, exact=exact):
            key = comparison.what, comparison.name
            rounding[key] = max(rounding.get(key, 0.0), comparison.error)
    most = max(tolerance, min(_MOST_TOLERANCES * tolerance, _MOST))
    return [
        dataclasses.replace(one, rounding=min(_FACTOR * rounding.get((one.what, one.name), 0.0), most))
        for one in comparisons
    ]


def last_bits_changed(model: nn.Module, *, seed: int) -> nn.Module:
    """A copy of ``model`` with every weight larger or smaller by one unit in the last place."""
    changed = independent_copy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in changed.parameters():
            signs = torch.randint(2, parameter.shape, generator=generator).mul_(2).sub_(1)
            parameter.mul_(1 + torch.finfo(parameter.dtype).eps * signs.to(parameter.dtype))
    return changed
