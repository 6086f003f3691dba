"""What a running step holds, sends and runs, on every rank, is what its plan says."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from benchmarks.parity import Case, case
from tests.patience import PATIENCE
from tests.ranks import run_on_ranks

STATE = ("parameters", "gradients", "optimizer")
PIPELINE = {"pp": 2, "num_microbatches": 4}


def sharded(zero: int, *, model: str = "tiny-llama", **more: Any) -> Case:
    what = "bfloat16" if more else "float32"
    account_case = case(model, f"{model} ZeRO {zero} in {what}", dp=2, num_microbatches=2, zero=zero)
    return {**account_case, "layers": 2, "dtype": "float32", **more}


def pipelined(model: str, schedule: str, chunks: int) -> Case:
    account_case = case(model, f"{model} {schedule}", **PIPELINE, schedule=schedule, chunks_per_rank=chunks)
    return {**account_case, "layers": 2, "dtype": "float32"}


SHARDED = [
    *(sharded(zero, precision="bfloat16") for zero in (1, 3)),
    # The embedding is the head's weight: two units of a rank use it.
    *(sharded(zero, model="tiny-gpt2") for zero in (1, 3)),
    *(sharded(zero, model="tiny-gpt2", precision="bfloat16") for zero in (0, 2)),
    sharded(2, model="tiny-t5"),
]
PIPELINES = [
    pipelined("tiny-gpt2", "1f1b", 1),
    pipelined("tiny-t5", "zbv", 2),
    pipelined("tiny-vit", "dualpipev", 2),
]


@functools.cache
def results() -> dict[str, list[dict[str, Any]]]:
    return run_on_ranks("step_accounts_worker", 2, [*SHARDED, *PIPELINES], timeout=PATIENCE)


@pytest.mark.parametrize("account_case", [*SHARDED, *PIPELINES], ids=lambda account_case: account_case["name"])
def test_every_rank_holds_the_bytes_of_state_that_were_planned(account_case: Case) -> None:
    """Parameters, gradients between micro-batches, and optimizer state with the masters of narrow parameters."""
    for rank in results()[account_case["name"]]:
        assert {name: rank[name] for name in STATE} == rank["planned"]


@pytest.mark.parametrize("account_case", PIPELINES, ids=lambda account_case: account_case["name"])
def test_every_rank_runs_its_micro_batches_in_the_planned_order(account_case: Case) -> None:
    for rank in results()[account_case["name"]]:
        assert rank["order"] == rank["planned order"] and rank["order"]


@pytest.mark.parametrize("account_case", PIPELINES, ids=lambda account_case: account_case["name"])
def test_every_rank_sends_the_bytes_that_were_planned(account_case: Case) -> None:
    for rank in results()[account_case["name"]]:
        assert rank["sent"] == pytest.approx(rank["planned sent"])
