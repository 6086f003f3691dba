"""Optimizers on the host, on real processes: weights after three steps are those of one device, state is the host's."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import planner
from tests.ranks import run_on_ranks

ONE = {"pp": 1, "cp": 1}
DATA = {**ONE, "dp": 2, "tp": 1}
CASES: tuple[dict[str, Any], ...] = (
    {"name": "dp2 ZeRO 1", "optimizer": "adamw", "fix": {**DATA, "zero": 1}, "norm": 0.1},
    {"name": "dp2 ZeRO 3", "optimizer": "adamw", "fix": {**DATA, "zero": 3}},
    {"name": "tp2", "optimizer": "sgd", "fix": {**ONE, "dp": 1, "tp": 2}},
    {"name": "pp2", "optimizer": "adamw", "fix": {"pp": 2, "dp": 1, "cp": 1, "tp": 1}, "norm": 0.1},
    {"name": "resumed on the device", "optimizer": "adamw", "fix": {**DATA, "zero": 1}, "moved_after": 1,
     "moves_by": "checkpoint", "then": {**DATA, "zero": 3}, "then_offload": "never"},
    {"name": "resumed on the host", "optimizer": "adamw", "fix": {**DATA, "zero": 3}, "offload": "never",
     "moved_after": 0, "moves_by": "checkpoint", "then": {**ONE, "dp": 1, "tp": 2}, "then_offload": "optimizer"},
    {"name": "replanned", "optimizer": "adamw", "fix": {**DATA, "zero": 1}, "moved_after": 0, "moves_by": "replan",
     "then": {**ONE, "dp": 1, "tp": 2}},
    {"name": "state_dict", "optimizer": "adamw", "fix": {**DATA, "zero": 1}, "moved_after": 2,
     "moves_by": "state_dict"},
    {"name": "activations, dp2 ZeRO 3", "optimizer": "adamw", "offload": "activations",
     "fix": {**DATA, "zero": 3, "recompute": "offload"}},
    {"name": "all, pp2", "optimizer": "adamw", "offload": "all",
     "fix": {"pp": 2, "dp": 1, "cp": 1, "tp": 1, "recompute": "offload", "schedule": "1f1b", "num_microbatches": 4}},
    {"name": "activations, pp2, ZB-H1", "optimizer": "adamw", "offload": "activations",
     "fix": {"pp": 2, "dp": 1, "cp": 1, "tp": 1, "recompute": "offload", "schedule": "zb_h1", "num_microbatches": 4}},
    {"name": "activations of blocks", "optimizer": "sgd", "offload": "activations", "model": "blocks",
     "fix": {**DATA, "zero": 2, "recompute": "offload", "num_microbatches": 2}},
    {"name": "activations, tp2", "optimizer": "sgd", "offload": "activations", "norm": 0.1,
     "fix": {**ONE, "dp": 1, "tp": 2, "recompute": "offload"}},
    {"name": "bfloat16", "optimizer": "adamw", "fix": {**DATA, "zero": 1}, "dtype": "bfloat16"},
)  # fmt: skip


#: Cases whose optimizer ends on the device.
ON_DEVICE = {"resumed on the device", *(case["name"] for case in CASES if case.get("offload") == "activations")}


@functools.cache
def results() -> Any:
    return run_on_ranks("offload_worker", 2, list(CASES))


@pytest.mark.parametrize("name", [case["name"] for case in CASES if "dtype" not in case])
def test_weights_are_those_of_one_device(name: str) -> None:
    assert results()[name]["error"] <= 1e-9


@pytest.mark.parametrize("name", [case["name"] for case in CASES if case["name"] not in ON_DEVICE])
def test_state_is_on_the_host_alone(name: str) -> None:
    result = results()[name]
    assert result["tensors"] > 0 and result["shared"] == 0


def test_blocks_send_to_the_host_what_the_plan_counts() -> None:
    """Two blocks in a row; of 16 tokens a rank, in float64: the norm of 16, and of 64 what GELU takes and gives."""
    result = results()["activations of blocks"]
    assert result["sent"] == result["predicted"] == 2 * 16 * 8 * (16 + 64 + 64)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_blocks_send_something_where_the_plan_says_so(case: dict[str, Any]) -> None:
    """A processor's attention keeps less than a plan counts, which is for accelerators."""
    result = results()[case["name"]]
    assert 0.8 * result["predicted"] <= result["sent"] <= result["predicted"]
    assert (result["sent"] > 0) == (case["fix"].get("recompute") == "offload")


def test_an_optimizer_that_would_keep_its_state_on_the_device_is_refused() -> None:
    assert "step planner.OffloadedOptimizer(optimizer) in its place" in results()["dp2 ZeRO 1"]["refused"]


def test_masters_of_narrow_weights_are_among_the_state() -> None:
    result = results()["bfloat16"]
    assert result["narrow"] == result["tensors"] and result["tensors"] % 3 == 0 and result["off"] == 0
    assert result["error"] <= 0.05


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Adagrad])
def test_an_optimizer_that_cannot_run_on_the_host_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match="cannot run on the host"):
        planner.OffloadedOptimizer(kind(torch.nn.Linear(2, 2).parameters()))


def test_a_weight_that_somebody_changed_is_taken_up() -> None:
    """Of a bfloat16 weight; what its float32 copy was before does not come back."""
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = planner.OffloadedOptimizer(torch.optim.SGD([weight], lr=2.0**-10))
    for value in (1.0, 5.0):
        with torch.no_grad():
            weight.fill_(value)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert optimizer.state[weight]["master_copy"].tolist() == [value - 2.0**-10] * 3
