"""Sharded training on real gloo processes against one process: loss, all gradients, weights after three AdamW steps."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.ranks import run_on_ranks

MODELS = ("mlp", "tiny-llama", "tiny-gpt2", "tiny-bert", "tiny-t5", "tiny-vit")
#: Every model on two ranks; on four, both axes at once, and data ranks alone (encoders and decoders: test_step_parity).
CASES = {
    2: [(model, "tp=2") for model in MODELS],
    4: [("tiny-llama", "dp=2,tp=2"), ("mlp", "dp=4")],
}
RELATIVE_TOLERANCE = 1e-9


@functools.cache
def results(world_size: int) -> dict[str, Any]:
    """All cases of one world size, run by one set of processes."""
    return run_on_ranks("parity_worker", world_size, CASES[world_size])


@pytest.mark.parametrize(
    ("world_size", "model", "mesh"), [(world_size, *case) for world_size, cases in CASES.items() for case in cases]
)
def test_parity(world_size: int, model: str, mesh: str) -> None:
    comparisons = results(world_size)[f"{model} {mesh}"]
    assert comparisons["error"] <= RELATIVE_TOLERANCE, comparisons
    assert comparisons["as_planned"], comparisons
