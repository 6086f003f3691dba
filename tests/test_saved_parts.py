"""``torch.save`` of a state dict on one rank holds that rank's parts: no other rank takes them for its own."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.ranks import run_on_ranks

#: Layout → (fix, optimizer, whether parameters are whole on every rank).
CASES = {
    "in pieces": ({"dp": 2, "zero": 3}, "AdamW", False),
    "in pieces of one buffer": ({"dp": 2, "zero": 1}, "AdamW", False),
    "in pieces, not element by element": ({"dp": 2, "zero": 3}, "Adafactor", False),
    "whole": ({"dp": 2, "zero": 0}, "AdamW", True),
}
STAGES = ({"pp": 2, "micro_batch": 2}, "SGD"), ({"pp": 2, "micro_batch": 2}, "AdamW")
ANOTHERS = "is the part that rank 0 saved, which is not this rank's"


@functools.cache
def results() -> list[dict[str, Any]]:
    return run_on_ranks("saved_parts_worker", 2, [*(case[:2] for case in CASES.values()), *STAGES])


@pytest.mark.parametrize("layout", CASES)
def test_each_rank_loads_its_own_file_and_whole_tensors_of_any(layout: str) -> None:
    result = results()[list(CASES).index(layout)]
    is_whole = CASES[layout][2]
    for what in ("model", "optimizer"):
        assert not any("Error" in words for words in result[f"{what}, own"])
        first, other = result[f"{what}, first"]
        assert "Error" not in first and (("Error" not in other) if is_whole else (ANOTHERS in other))
    assert result["unchanged"]


def test_state_of_another_stage_is_refused_though_its_shapes_are_the_same() -> None:
    stateless, result = results()[len(CASES) :]
    assert not any("Error" in words for words in stateless["optimizer, first"])
    assert "Missing key(s)" in result["model, first"][1] and ANOTHERS in result["optimizer, first"][1]
    assert "'exp_avg' of 'layers.2.weight'" in result["optimizer, first"][1]
