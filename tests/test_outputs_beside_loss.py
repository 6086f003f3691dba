"""A weight that only outputs beside the loss depend on trains where a script's own loss does, and serves evaluation."""

from __future__ import annotations

import functools

import pytest

from tests.ranks import run_on_ranks

#: Layout → (fix, the layer whose output is probed, whether a script's loss depends on the probe).
CASES = {
    "cut over features": ({"tp": 2}, 0, True),
    "cut over samples": ({"dp": 2}, 0, True),
    "gathered for each use": ({"dp": 2, "zero": 3, "micro_batch": 2}, 3, True),
    "probe in the first stage": ({"pp": 2, "micro_batch": 4}, 0, False),
    "probe in the last stage": ({"pp": 2, "micro_batch": 4}, 3, False),
}


@functools.cache
def results() -> dict[str, dict[str, float]]:
    return dict(zip(CASES, run_on_ranks("outputs_beside_loss_worker", 2, list(CASES.values()))))


@pytest.mark.parametrize("layout", CASES)
def test_it_is_as_on_one_device(layout: str) -> None:
    assert {name: error for name, error in results()[layout].items() if not error < 1e-9} == {}
