"""Sharded training on real gloo processes against one process: loss, all gradients, weights after three AdamW steps."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.ranks import run_on_ranks

MODELS = ("mlp", "tiny-llama", "tiny-gpt2", "tiny-bert", "tiny-t5", "tiny-vit", "tiny-opt", "tiny-bloom")
MESHES = {2: ("tp=2",), 4: ("tp=4", "dp=2,tp=2")}
#: Data parallelism alone: the same for all models but what they compute.
DATA = {2: "dp=2", 4: "dp=4"}
DATA_MODELS = ("mlp", "tiny-llama", "tiny-t5")
CASES = {
    world_size: [(model, mesh) for mesh in meshes for model in MODELS] + [(m, DATA[world_size]) for m in DATA_MODELS]
    for world_size, meshes in MESHES.items()
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
    found = results(world_size)[f"{model} {mesh}"]
    assert found["error"] <= RELATIVE_TOLERANCE, found
    assert found["as_planned"], found
