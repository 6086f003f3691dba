"""Processes that are lost and come: who takes part, who holds what of whom, and a training that goes on without one."""

from __future__ import annotations

import math
import socket
import threading
from dataclasses import dataclass

import pytest
import torch.distributed as dist

from cost_models import Cluster
from passes.plan import Plan
from planner import plan
from planner.cli.elastic_launch import launch_elastic
from planner.elastic_gain import decide
from planner.training_timeline import moving_bound
from runtime.elastic.job_process import JobProcess, TrainingFinished
from runtime.elastic.job_rounds import MEMBER_VARIABLE, STORE_VARIABLE, Leader, Round, announce
from runtime.elastic.second_holders import second_holder
from runtime.elastic.supervisor import Supervisor
from runtime.torch_compat import connections
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
    result = run_on_ranks("elastic_worker", 1, {})["lost and come"]
    assert result["losses"] < 1e-12 and result["weights"] < 1e-10
    assert result["steps"] == list(range(6)) and result["processes"] == [1, 2]
    assert result["own bytes"] == pytest.approx(2 * result["second bytes"], rel=0.01)  # when alone, the whole


def test_one_that_comes_waits_where_its_part_does_not_pay() -> None:
    result = run_on_ranks("elastic_worker", 1, {})["does not pay"]
    assert result["losses"] < 1e-12 and result["weights"] < 1e-10
    assert [int(each[2]) for each in sorted(result["rows"]) if each[0] >= 2] == [1, 1, 1]
    assert "2 processes where 1 were; those that came wait: another plan would not pay\n* stay: " in result["log"]
    assert "  dp=2: " in result["log"] and "+ 30 s for programs" in result["log"]


def test_a_gain_is_priced_by_the_steps_that_are_left_and_the_move() -> None:
    """GPT-2 on one and on four slow devices: the step's difference must be worth 30 s and the move."""
    present, wider = (plan("gpt2", f"cpu-local:{count}", global_batch=8, seq_len=64) for count in (1, 4))
    cluster = Cluster.parse("cpu-local:4")
    saved = present.step.costs.simulated - wider.step.costs.simulated
    assert saved > 0
    moving = moving_bound(present, wider, cluster)
    for steps, pays in ((math.ceil((30 + moving) / saved) + 1, True), (math.floor((30 + moving) / saved) - 1, False)):
        decision = decide(present, lambda: wider, cluster, remaining_steps=steps, replan_seconds=30.0)
        assert decision.moved is pays, decision.summary()

    def without_plan() -> Plan:
        raise ValueError("nothing fits")

    decision = decide(present, without_plan, cluster, remaining_steps=10**6, replan_seconds=30.0)
    assert not decision.moved and "nothing fits" in decision.summary()


def test_no_more_than_the_step_under_way_is_lost_wherever_in_it_a_process_is_killed() -> None:
    """While a collective is under way, and within the copy to the second holder."""
    result = run_on_ranks("elastic_worker", 1, {})["points"]
    assert [words.split(" of step ")[0] for words in result["killed"]] == ["collective", "copy to the second holder"]
    assert result["losses"] < 1e-12 and result["weights"] < 1e-10
    assert result["steps"] == list(range(16)) and result["lost"] <= 1


def test_where_a_shard_and_its_copy_are_lost_training_goes_on_from_the_checkpoint_by_itself() -> None:
    """3 → 1 ranks in the fourth step, ZeRO 3; checkpoints after two steps and four."""
    result = run_on_ranks("elastic_worker", 1, {})["checkpoint"]
    assert result["losses"] < 1e-12 and result["weights"] < 1e-10
    alone = [int(number) for number, _, processes, *_ in result["rows"] if processes == 1]
    assert alone == [2, 3, 4]  # the third step comes again


def test_without_a_checkpoint_the_error_says_that_there_is_none() -> None:
    result = run_on_ranks("elastic_worker", 1, {})["no checkpoint"]
    assert "there is no checkpoint: start the job again (checkpoints='DIRECTORY'" in result["error"]
    assert {int(processes) for _, _, processes, *_ in result["rows"]} == {3}


@dataclass
class FakeProcess:
    """A process that ended with ``code``, or runs (None) until it is killed."""

    code: int | None

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.code = -9


def test_a_job_ends_whose_first_processes_cannot_all_come_any_more() -> None:
    """One of two is lost before the first round, which takes both, and none may be started anew."""
    store, words = dist.HashStore(), list[str]()
    processes = [FakeProcess(3), FakeProcess(None)]
    supervisor = Supervisor(
        store, lambda number, place: processes[place], num_processes=2, max_restarts=0,
        leader=Leader(store, first=2, least=1), on_loss=words.append,
    )  # fmt: skip
    assert supervisor.run() == 3
    assert processes[1].code == -9 and "fewer than the 2 processes" in words[-1]


def store_and_member(monkeypatch: pytest.MonkeyPatch, member: str) -> tuple[dist.TCPStore, JobProcess]:
    """A job's store, and the process of it that is numbered so."""
    monkeypatch.setattr(connections._noted, "is_on", False)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, JobProcess({STORE_VARIABLE: f"127.0.0.1:{store.port}", MEMBER_VARIABLE: member})


def test_a_process_that_comes_behind_the_end_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    store, process = store_and_member(monkeypatch, "2")
    leader = Leader(store, first=1, least=1)
    process.arrive()
    announce(store, "arrival", 1)  # which meets nobody any more
    leader.look()
    ending = threading.Timer(0.2, process.finish)
    ending.start()
    with pytest.raises(TrainingFinished):
        process.meet()
    process.leave()


def test_one_that_is_left_hears_of_a_loss_though_there_are_too_few_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two, and two are needed: there is no round until another has started, which may take long."""
    store, process = store_and_member(monkeypatch, "1")
    leader = Leader(store, first=2, least=2)
    process.arrive()
    announce(store, "arrival", 2)
    leader.look()
    process.round = process.newer_round()
    announce(store, "departure", 2)
    leader.look()
    assert process.newer_round() is None
    assert process.heard_of_a_loss(RuntimeError("Connection reset by peer"))
    process.leave()


def test_connections_are_closed_while_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections._noted, "is_on", True)
    with connections.recorded():
        one, other = socket.socketpair()
        one.settimeout(60)
        closing = threading.Timer(0.1, connections.close_recorded)
        closing.start()
        assert one.recv(1) == b""  # as a group waits for a process that is gone
        closing.join()
    one.close()
    other.close()


def test_what_nobody_looks_after_is_refused() -> None:
    with pytest.raises(ValueError, match="planner run --elastic"):
        JobProcess({})
    with pytest.raises(ValueError, match="--elastic 5"):
        launch_elastic(["train.py"], num_processes=4, least=5, max_restarts=1)
