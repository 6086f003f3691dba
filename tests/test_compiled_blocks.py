"""Compiled Llama layers on two processes: one graph for all of them, the numbers of the uncompiled, planned collectives.

A layer gathers twice and reduce-scatters twice; there are three, one of which may be preceded or followed by others.
"""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from runtime.recompute import POLICIES
from tests.ranks import run_on_ranks

NUM_LAYERS = 3
#: Policy → collectives of one layer that its backward sends again, compiled and uncompiled.
SENT_AGAIN = {
    "none": {},
    "regather": {"all_gather": 2},
    "selective": {"all_gather": 2},
    "full": {"all_gather": 2, "reduce_scatter": 1},
}


@pytest.fixture(scope="module")
def traced() -> dict[str, Any]:
    """All policies in fp64, with torch's partitioner but without generated code."""
    return run_on_ranks("compiled_blocks_worker", 2, ["float64", "aot_eager_decomp_partition", list(POLICIES)])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_compiled_layer_gives_the_numbers_of_the_plain_one(traced: dict[str, Any], policy: str):
    assert traced[f"compiled {policy}"]["error"] <= 1e-9
    assert traced[f"eager {policy}"]["error"] <= 1e-9


@pytest.mark.parametrize("policy", POLICIES)
def test_all_layers_share_one_graph_without_a_break(traced: dict[str, Any], policy: str):
    assert (traced[f"compiled {policy}"]["graphs"], traced[f"compiled {policy}"]["breaks"]) == (1, 0)


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("policy", POLICIES)
def test_collectives_are_sent_again_as_the_policy_says(traced: dict[str, Any], policy: str, how: str):
    wanted = {name: NUM_LAYERS * count for name, count in SENT_AGAIN[policy].items()}
    assert traced[f"{how} {policy}"]["again"] == wanted


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler for processors")
def test_generated_code_gives_the_numbers_of_the_plain_layer():
    found = run_on_ranks("compiled_blocks_worker", 2, ["float32", "inductor", ["none"]])["compiled none"]
    assert found["error"] <= 1e-5 and (found["graphs"], found["breaks"]) == (1, 0)
