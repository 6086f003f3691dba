"""What ranks send each other keeps NCCL's rules, in every schedule, on both ways in which torch batches transfers.

torch 2.11 receives by ``batch_isend_irecv``, torch 2.13 one by one unless a batch both sends and receives.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from cost_models.schedules import SCHEDULES
from tests.communication.recorder import Call
from tests.communication.rules import broken_rules
from tests.patience import PATIENCE
from tests.ranks import run_on_ranks

F64 = "torch.float64"
PIPELINES = [
    (schedule, num_microbatches, batching)
    for schedule in SCHEDULES
    for num_microbatches in (2, 8)
    for batching in ("torch", "always")
    if num_microbatches >= 4 or schedule in ("gpipe", "1f1b")
]


#: Torch batches what it receives, and stages send by themselves, outside of batches.
UNLIKE = [("interleaved_1f1b", 4, "only receives"), ("zbv", 4, "only receives")]


@functools.cache
def pipelines() -> dict[str, list[list[Any]]]:
    return run_on_ranks("communication_worker", 4, [*PIPELINES, *UNLIKE], timeout=PATIENCE)


@pytest.mark.parametrize("case", PIPELINES, ids=lambda case: "-".join(map(str, case)))
def test_pipelines_keep_the_rules(case: tuple[str, int, str]) -> None:
    calls = [[Call.from_dict(call) for call in own] for own in pipelines()["-".join(map(str, case))]]
    assert sum(call.kind == "send" for own in calls for call in own) > 0
    assert broken_rules(calls) == []


@pytest.mark.parametrize("case", UNLIKE, ids=lambda case: "-".join(map(str, case)))
def test_stages_that_send_in_another_way_than_torch_receives_are_told(case: tuple[str, int, str]) -> None:
    """NCCL would wait for ever: what is in a batch has another communicator."""
    calls = [[Call.from_dict(call) for call in own] for own in pipelines()["-".join(map(str, case))]]
    assert any("outside of batches" in error for error in broken_rules(calls))


def call(
    kind: str, *, group: str = "world", peer: int = -1, batch: int = -1, size: int = 4, after: tuple[int, ...] = ()
) -> Call:
    return Call(kind, group, (0, 1), peer, batch, (((size,), F64),), after)


def test_collectives_in_another_order_are_told() -> None:
    ranks = [[call("allreduce"), call("broadcast")], [call("broadcast"), call("allreduce")]]
    assert "collective 0 of group 'world' (0, 1) differs" in broken_rules(ranks)[0]


def test_the_root_of_a_gather_has_tensors_of_all() -> None:
    root, other = (Call("gather", "world", (0, 1), -1, -1, (((4,), F64),) * count, ()) for count in (3, 1))
    assert broken_rules([[root], [other]]) == []
    smaller = Call("gather", "world", (0, 1), -1, -1, (((3,), F64),), ())
    assert "differs" in broken_rules([[root], [smaller]])[0]


def test_an_all_to_all_gives_each_what_is_sent_to_it() -> None:
    """Ranks send unlike numbers of rows to experts, as many as the others expect."""

    def exchange(received: tuple[int, int], sent: tuple[int, int]) -> list[Call]:
        return [Call("all_to_all_single", "ep", (0, 1), -1, -1, (((sum(sent), 8), F64),), (), (received, sent))]

    assert broken_rules([exchange((1, 4), (1, 2)), exchange((2, 3), (4, 3))]) == []
    (error,) = broken_rules([exchange((1, 4), (1, 2)), exchange((2, 3), (5, 3))])
    assert "its member 1 sends 5 rows to 0, which takes 4" in error


def test_a_collective_that_one_rank_leaves_out_is_told() -> None:
    assert "differs: {0: ('allreduce'" in broken_rules([[call("allreduce")], []])[0]


def test_groups_of_the_same_ranks_have_an_order_each() -> None:
    """Each has a communicator: the same calls in the same order are not enough."""
    one, other = (call("allreduce", group=group) for group in ("dp", "world"))
    crossed = [[one, call("allreduce", group="dp", after=(0,))], [other, call("allreduce", group="dp", after=(0,))]]
    assert "of group 'dp' (0, 1) differs" in broken_rules(crossed)[0]
    waiting = [
        [one, call("allreduce", group="world", after=(0,))],
        [other, call("allreduce", group="dp", after=(0,))],
    ]
    assert "a circle of waits" in broken_rules(waiting)[0]
    assert broken_rules([[one, other], [other, one]]) == []


def test_a_send_outside_of_a_batch_does_not_meet_a_receive_inside_of_one() -> None:
    errors = broken_rules([[call("send", peer=1)], [call("recv", peer=0, batch=0)]])
    assert errors == [
        "1 sends from rank 0 to 1 outside of batches, 0 receives",
        "0 sends from rank 0 to 1 in batches, 1 receives",
    ]


def test_what_is_received_has_the_shape_that_is_sent() -> None:
    errors = broken_rules([[call("send", peer=1, size=3)], [call("recv", peer=0)]])
    assert "rank 0 sends (((3,), 'torch.float64'),), 1 receives (((4,), 'torch.float64'),)" in errors[0]


def test_two_ranks_that_send_to_each_other_first_wait_for_ever() -> None:
    """On one communicator, in order; a batch starts both at once."""
    alone = [[call("send", peer=1), call("recv", peer=1)], [call("send", peer=0), call("recv", peer=0)]]
    assert "a circle of waits" in broken_rules(alone)[0]
    batched = [[call(c.kind, peer=c.peer, batch=0) for c in own] for own in alone]
    assert broken_rules(batched) == []


def test_a_send_that_waits_for_a_later_collective_is_a_circle() -> None:
    """Rank 0 sends after the collective, rank 1 comes to the collective after it has received."""
    ranks = [
        [call("allreduce"), call("send", peer=1, after=(0,))],
        [call("recv", peer=0), call("allreduce", after=(0,))],
    ]
    assert "a circle of waits" in broken_rules(ranks)[0]
    assert broken_rules([ranks[0], [call("recv", peer=0), call("allreduce")]]) == []
