"""Sharded training on real gloo processes against one process: loss, all gradients, weights after three AdamW steps."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.ranks import run_on_ranks

MODELS = ("mlp", "tiny-llama", "tiny-gpt2", "tiny-bert", "tiny-t5", "tiny-vit", "tiny-opt", "tiny-bloom")
MESHES = {2: ("tp=2", "dp=2"), 4: ("tp=4", "dp=4", "dp=2,tp=2")}
RELATIVE_TOLERANCE = 1e-9


@functools.cache
def results(world_size: int) -> dict[str, Any]:
    """All cases of one world size, run by one set of processes."""
    cases = [(model, mesh) for model in MODELS for mesh in MESHES[world_size]]
    return run_on_ranks("parity_worker", world_size, cases)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("world_size", "mesh"), [(world_size, mesh) for world_size, meshes in MESHES.items() for mesh in meshes]
)
def test_parity(world_size: int, mesh: str, model: str) -> None:
    found = results(world_size)[f"{model} {mesh}"]
    assert found["error"] <= RELATIVE_TOLERANCE, found
    assert found["as_planned"], found
