"""Ranks that differ in weights, batches, plans or calls: the first one's weights count, all else is refused by all."""

from __future__ import annotations

import functools

import pytest

from tests.ranks import run_on_ranks
from tests.unlike_ranks_worker import SCENARIOS

NAMES = [scenario.__name__ for scenario in SCENARIOS]


@functools.cache
def results() -> dict[str, bool]:
    return run_on_ranks("unlike_ranks_worker", 2, NAMES)


@pytest.mark.parametrize("scenario", NAMES)
def test_on_two_processes(scenario: str) -> None:
    assert results()[scenario]
