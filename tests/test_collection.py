"""Planning leaves the garbage collector as it found it."""

from __future__ import annotations

import gc

import pytest

import planner
from planner.solvers.collection import no_collection
from planner.whole_step.result.search_progress import Report


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_before_also_after_errors(enabled: bool) -> None:
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ValueError, match="inside"), no_collection():
            assert not gc.isenabled()
            with no_collection():
                pass
            assert not gc.isenabled(), "the inner one does not end the outer one"
            raise ValueError("inside")
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


class Stopped(Exception):
    """What the first report raises."""


def test_nothing_is_collected_from_reading_a_config_on() -> None:
    states: list[bool] = []

    def progress(report: Report) -> None:
        states.append(gc.isenabled())
        raise Stopped

    assert gc.isenabled(), "a test before this one has left it off"
    with pytest.raises(Stopped):
        planner.plan("llama-3-8b", "dgx-h100:1", global_batch=8, seq_len=64, progress=progress)
    assert states == [False]
    assert gc.isenabled()
