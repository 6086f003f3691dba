"""Scripts that save on the main process alone: the other ranks join in; and state of whole accelerate scripts."""

from __future__ import annotations

import pytest

from tests.joined_calls_worker import SCENARIOS
from tests.ranks import run_on_ranks

NAMES = [scenario.__name__ for scenario in SCENARIOS]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bool]:
    passed: dict[str, bool] = run_on_ranks("joined_calls_worker", 2, str(tmp_path_factory.mktemp("joined")))
    return passed


@pytest.mark.parametrize("scenario", NAMES)
def test_on_two_processes(scenario: str, results: dict[str, bool]) -> None:
    assert results[scenario]
