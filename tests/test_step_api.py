"""Plans of whole steps through the public API: compiled on a cluster, refused, saved, read as text."""

from __future__ import annotations

import functools

import pytest

from tests.ranks import run_on_ranks
from tests.step_worker import SCENARIOS

NAMES = [scenario.__name__ for scenario in SCENARIOS]


@functools.cache
def results() -> dict[str, bool]:
    return run_on_ranks("step_worker", 4, NAMES)


@pytest.mark.parametrize("scenario", NAMES)
def test_on_four_processes(scenario: str) -> None:
    assert results()[scenario]
