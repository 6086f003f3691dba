"""Each candidate of a search has one fate, however many searches meet it, and the fates add up to the candidates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import planner
from planner.whole_step.candidates.candidates import Candidate
from planner.whole_step.candidates.mesh_layout import MeshLayout
from planner.whole_step.result.candidate_fates import CandidateFates, Fate
from planner.whole_step.search_entry import SearchEntry

LAYOUT = MeshLayout(2, 4, 1, 1)
FIRST, SECOND = (Candidate(LAYOUT, 1, num, "1f1b", 1) for num in (4, 8))


@pytest.mark.parametrize("options", [{}, {"max_programs": 1}, {"fix": {"pp": 2}}, {"num_alternatives": 3}])
@pytest.mark.parametrize("cluster, devices", [("dgx-h100:1", 8), ("8x-rtx4090:1", 4)])
def test_the_fates_of_a_plan_add_up_to_its_candidates(cluster: str, devices: int, options: dict[str, Any]) -> None:
    plan = planner.plan("gpt2", cluster, num_devices=devices, global_batch=16, seq_len=256, **options)
    search = dict(plan.step.search)
    enumerated, _ = search.pop("enumerated"), search.pop("shardings searched")
    assert sum(search.values()) == enumerated and search["solved"] > 0
    assert ("not tried" in search) == ("max_programs" in options)


def test_what_tells_most_counts_in_whatever_order_it_is_met() -> None:
    for order in ((Fate.SOLVED, Fate.PRUNED), (Fate.PRUNED, Fate.SOLVED)):
        fates = CandidateFates()
        fates.note(Fate.ENUMERATED, [FIRST, SECOND])
        for fate in order:
            fates.note(fate, [FIRST])
        assert fates.counts == {"enumerated": 2, "solved": 1}
        assert fates.num_solved == 1


def test_ways_in_which_zero_divides_are_one_candidate() -> None:
    fates = CandidateFates()
    fates.note(Fate.ENUMERATED, [FIRST])
    fates.note(Fate.OUT_OF_MEMORY, [replace(FIRST, layout=replace(LAYOUT, zero_ranks=ranks)) for ranks in (2, 4)])
    assert fates.counts == {"enumerated": 1, "out of memory": 1}


def test_what_a_limit_left_below_the_cutoff_was_not_tried() -> None:
    fates = CandidateFates()
    fates.note_left([SearchEntry(1.0, 0, FIRST), SearchEntry(2.0, 1, SECOND)], cutoff=2.0)
    assert fates.counts == {"enumerated": 2, "not tried": 1, "pruned by bound": 1}


def test_a_search_that_goes_on_counts_no_candidate_twice() -> None:
    before, after = CandidateFates(), CandidateFates()
    before.note(Fate.PRUNED, [FIRST, SECOND])
    after.note(Fate.SOLVED, [FIRST])
    after.go_on_from(before)
    assert after.counts == {"enumerated": 2, "solved": 1, "pruned by bound": 1}
