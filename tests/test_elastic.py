"""Processes that are lost and come: who takes part, who holds what of whom, and a training that goes on without one."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from planner.cli.elastic_launch import launch_elastic
from runtime.elastic.job_process import JobProcess
from runtime.elastic.job_rounds import Leader, Round, announce
from runtime.elastic.second_holders import second_holder
from tests.ranks import run_on_ranks


def test_each_coming_and_going_makes_a_round_and_ranks_keep_their_order() -> None:
    store = dist.HashStore()
    leader = Leader(store, first=3, least=2)

    def after(*news: tuple[str, int]) -> tuple[int, ...] | None:
        for what, member in news:
            announce(store, what, member)
        leader.look()
        newest = Round.newest(store)
        return None if newest is None else newest.members

    assert after(("arrival", 5), ("arrival", 1)) is None
    assert after(("arrival", 3)) == (5, 1, 3)
    assert after(("departure", 1)) == (5, 3)
    assert after(("departure", 5)) == (5, 3)  # fewer than the least: those that are left wait for another
    assert after(("arrival", 7)) == (3, 7)
    assert after(("arrival", 8), ("departure", 8)) == (3, 7)
    assert after(("arrival", 9)) == (3, 7, 9)
    assert Round(4, (5, 3)).lost(Round(5, (3, 7))) and not Round(5, (3, 7)).lost(Round(6, (3, 7, 9)))


def test_a_second_holder_is_on_another_node_if_there_is_one() -> None:
    assert [second_holder(rank, "aabb") for rank in range(4)] == [2, 2, 0, 0]
    assert [second_holder(rank, "aaa") for rank in range(3)] == [1, 2, 0]
    assert second_holder(0, "a") is None


def test_a_training_goes_on_without_a_process_that_was_killed_and_with_the_next() -> None:
    """2 → 1 → 2 ranks, ZeRO 3: the half of the lost one is with the other."""
    result = run_on_ranks("elastic_worker", 1, {})
    assert result["losses"] < 1e-12 and result["weights"] < 1e-10
    assert result["steps"] == list(range(6)) and result["processes"] == [1, 2]
    assert result["own bytes"] == pytest.approx(2 * result["second bytes"], rel=0.01)  # when alone, the whole


def test_what_nobody_looks_after_is_refused() -> None:
    with pytest.raises(ValueError, match="planner run --elastic"):
        JobProcess({})
    with pytest.raises(ValueError, match="--elastic 5"):
        launch_elastic(["train.py"], num_processes=4, least=5, max_restarts=1)
