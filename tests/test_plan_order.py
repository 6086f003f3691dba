"""What the ranks of any plan send keeps NCCL's rules, and nothing that breaks one of them goes unseen.

``MESHWRIGHT_TEST_PLANS`` says how many plans of each kind are drawn (default 1), the same in every run.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from passes.plan import Plan
from tests.communication import mutants
from tests.communication.mutants import Mutants, Recording
from tests.communication.plans import KINDS, NUM_RANKS, any_plans, describe
from tests.communication.recorder import Call
from tests.communication.rules import broken_rules
from tests.communication.scenarios import SCENARIOS
from tests.patience import PATIENCE
from tests.ranks import run_on_ranks

PLANS_PER_KIND = int(os.environ.get("MESHWRIGHT_TEST_PLANS", "1"))
#: Plans of a mesh that a user names, whose loop is the user's own.
MESHES = ("dp=2,tp=2",)
OTHERS = (*MESHES, *SCENARIOS)
CASES = [*((kind, number) for number in range(PLANS_PER_KIND) for kind in KINDS), *((other, 0) for other in OTHERS)]


@functools.cache
def plans() -> dict[tuple[str, int], Plan]:
    drawn: list[tuple[Plan, ...]] = []

    @settings(max_examples=PLANS_PER_KIND + 1, database=None, phases=[Phase.generate])
    @given(st.tuples(*map(any_plans, KINDS)))
    def draw(one_of_each_kind: tuple[Plan, ...]) -> None:
        drawn.append(one_of_each_kind)

    draw()
    others = drawn[1:]  # the first example is the plainest of all
    return {(kind, number): some[place] for number, some in enumerate(others) for place, kind in enumerate(KINDS)}


@functools.cache
def recordings() -> dict[tuple[str, int], Recording]:
    payload = [*(json.loads(plan.to_json()) for plan in plans().values()), *OTHERS]
    answers = run_on_ranks("plan_order_worker", NUM_RANKS, payload, timeout=PATIENCE)
    return {
        case: [list(map(Call.from_dict, own)) for own in answer] for case, answer in zip(CASES, answers, strict=True)
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_every_plan_keeps_the_rules(case: tuple[str, int]) -> None:
    """One order in every group, transfers that pair up, no circle of waits."""
    calls = recordings()[case]
    assert min(map(len, calls)) > 0
    assert broken_rules(calls) == [], describe(plans()[case]) if case in plans() else case


#: Change → what is said of it.
MUTANTS: dict[Callable[[Recording], Mutants], tuple[str, ...]] = {
    mutants.swapped: ("collective",),
    mutants.left_out: ("collective", "sends from"),
    mutants.on_another_communicator: ("collective", "sends from"),
    mutants.of_another_shape: ("collective", "receives"),
    mutants.waiting_in_a_circle: ("a circle of waits",),
}


@functools.cache
def mutants_of_recordings(change: Callable[[Recording], Mutants]) -> list[Callable[[], Recording]]:
    return [mutant for calls in recordings().values() for mutant in change(calls)]


@pytest.mark.parametrize("change", MUTANTS, ids=lambda change: change.__name__)
@settings(max_examples=8, database=None, phases=[Phase.generate])
@given(data=st.data())
def test_a_change_that_breaks_a_rule_is_seen(change: Callable[[Recording], Mutants], data: st.DataObject) -> None:
    """In recordings of any plans, wherever the change is made."""
    mutant = data.draw(st.sampled_from(mutants_of_recordings(change)))
    errors = broken_rules(mutant())
    assert errors and any(part in errors[0] for part in MUTANTS[change])
