"""Compiled Llama layers on two processes: one graph for all, the numbers of the plain ones, collectives as planned."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from runtime.program_tools.recompute import POLICIES
from tests.ranks import run_on_ranks

PARTITIONER = "aot_eager_decomp_partition"
LACKS_COMPILER = shutil.which("g++") is None
_HEADS = torch.empty(1, 1, 2, 8, dtype=torch.float64, device="meta")
_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
#: torch 2.11 generates float32 for what attention in float64 keeps for its backward pass, which then fails.
MISJUDGES_FLOAT64 = _ATTENTION(_HEADS, _HEADS, _HEADS)[1].dtype != torch.float64


@pytest.fixture(scope="module")
def traced() -> dict[str, Any]:
    """All policies with torch's partitioner but without generated code, and one with it."""
    generated = {} if LACKS_COMPILER or MISJUDGES_FLOAT64 else {"inductor": ["none"]}
    return run_on_ranks("compiled_blocks_worker", 2, {PARTITIONER: list(POLICIES), **generated})


@pytest.mark.parametrize("policy", POLICIES)
def test_a_compiled_layer_gives_the_numbers_of_the_plain_one(traced: dict[str, Any], policy: str):
    assert traced[f"{PARTITIONER} {policy}"]["error"] <= 1e-9
    assert traced[f"eager {policy}"]["error"] <= 1e-9


@pytest.mark.parametrize("policy", POLICIES)
def test_all_layers_share_one_graph_without_a_break(traced: dict[str, Any], policy: str):
    compiled = traced[f"{PARTITIONER} {policy}"]
    assert (compiled["graphs"], compiled["breaks"]) == (1, 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_compiled_layer_sends_nothing_again_that_the_plain_one_does_not(traced: dict[str, Any], policy: str):
    sent, planned = traced[f"{PARTITIONER} {policy}"]["again"], traced[f"eager {policy}"]["again"]
    assert all(count <= planned.get(name, 0) for name, count in sent.items())
    assert policy != "full" or sent == planned != {}


@pytest.mark.skipif(LACKS_COMPILER, reason="inductor needs a C++ compiler for processors")
@pytest.mark.skipif(MISJUDGES_FLOAT64, reason="this torch generates other code than attention in float64 is")
def test_generated_code_gives_the_numbers_of_the_plain_layer(traced: dict[str, Any]):
    compiled = traced["inductor none"]
    assert compiled["error"] <= 1e-9 and (compiled["graphs"], compiled["breaks"]) == (1, 0)
