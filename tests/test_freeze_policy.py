"""How many layers are frozen when, as PipeTransformer publishes it."""

from __future__ import annotations

import pytest

import planner
from planner.changing.freeze_policy import freeze_bound, halved_pipeline


def test_the_bounds_and_pipelines_of_twelve_layers() -> None:
    bounds = [freeze_bound(12, 1 / 3, decision) for decision in range(8)]
    assert bounds == [0, 4, 7, 9, 10, 11, 11, 12]
    # One stage after another, none after all layers are frozen.
    assert [halved_pipeline(12, frozen, 8) for frozen in bounds[:6]] == [8, 8, 4, 2, 2, 1]


def test_a_layer_that_still_learns_ends_what_is_frozen() -> None:
    policy = planner.FreezePolicy.adaptive(num_layers=6, alpha=0.5)
    assert policy.next(1, 0) == 3
    assert policy.next(1, 0, [0.1, 0.2, 0.9, 0.3, 0.8, 0.7]) == 2
    assert policy.next(1, 0, [0.9, 0.1, 0.1, 0.3, 0.8, 0.7]) == 0
    # Fewer than the bound were frozen: of the four layers that are left half may be, and these are the third and last.
    assert policy.next(2, 2) == 4
    assert policy.next(2, 2, [0.0, 0.0, 0.1, 0.2, 0.3, 0.05]) == 3
    assert policy.next(2, 0, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]) == 3


def test_a_schedule_and_a_rule_of_ones_own() -> None:
    policy = planner.FreezePolicy.scheduled(4, {2: 1, 5: 3})
    frozen, counts = 0, []
    for decision in range(7):
        frozen = policy.next(decision, frozen)
        counts.append(frozen)
    assert counts == [0, 0, 1, 1, 1, 3, 3]
    assert planner.FreezePolicy(4, lambda decision, frozen, norms: decision // 2).next(5, 0) == 2
    with pytest.raises(ValueError, match="1 layers are to be frozen from 5 on, and 3 before it: frozen layers stay"):
        planner.FreezePolicy.scheduled(4, {5: 1, 2: 3})
    with pytest.raises(ValueError, match="freezes 9 layers"):
        planner.FreezePolicy(4, lambda decision, frozen, norms: 9).next(0, 0)
    with pytest.raises(ValueError, match=r"the rule freezes=1.5: give a whole number"):
        planner.FreezePolicy(4, lambda decision, frozen, norms: 1.5).next(0, 0)  # type: ignore[arg-type,return-value]
    with pytest.raises(ValueError, match=r"every=2.5: give a whole number"):
        planner.Freezing(policy, every=2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one for each"):
        policy.next(0, 0, [1.0])
