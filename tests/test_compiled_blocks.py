"""Compiled Llama layers on two processes: one graph for all, the numbers of the plain ones, collectives as planned."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from runtime.program_tools.recompute import POLICIES
from tests.ranks import run_on_ranks

PARTITIONER = "aot_eager_decomp_partition"
_HEADS = torch.empty(1, 1, 2, 8, dtype=torch.float64, device="meta")
_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
#: torch 2.11 generates float32 for what attention in float64 keeps for its backward pass, which then fails.
MISJUDGES_FLOAT64 = _ATTENTION(_HEADS, _HEADS, _HEADS)[1].dtype != torch.float64
GENERATES = shutil.which("g++") is not None and not MISJUDGES_FLOAT64
#: Torch's partitioner without generated code, and one policy with it where that can be had.
BACKENDS = {**dict.fromkeys(POLICIES, PARTITIONER), **({"none": "inductor"} if GENERATES else {})}


@pytest.fixture(scope="module")
def traced() -> dict[str, Any]:
    return run_on_ranks("compiled_blocks_worker", 2, BACKENDS)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_compiled_layer_gives_the_numbers_of_the_plain_one(traced: dict[str, Any], policy: str):
    assert traced[policy]["compiled"]["error"] <= 1e-9
    assert traced[policy]["eager"]["error"] <= 1e-9


@pytest.mark.parametrize("policy", POLICIES)
def test_all_layers_share_one_graph_without_a_break(traced: dict[str, Any], policy: str):
    compiled = traced[policy]["compiled"]
    assert (compiled["graphs"], compiled["breaks"]) == (1, 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_compiled_layer_sends_nothing_again_that_the_plain_one_does_not(traced: dict[str, Any], policy: str):
    sent, planned = (traced[policy][how]["again"] for how in ("compiled", "eager"))
    assert all(count <= planned.get(name, 0) for name, count in sent.items())
    assert policy != "full" or sent == planned != {}
