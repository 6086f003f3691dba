"""What ranks send in what is no step of one plan: other batches and plans on the way, islands, experts, generation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import planner
from planner.verification.verify_model import slow_devices
from tests.communication.plans import NUM_RANKS, small_model
from tests.communication.recorder import Call, recorded
from tests.expert_models import mixture, mixture_batch
from tests.generation_cases import generated, model_named, training_batch
from tests.patience import PATIENCE
from tests.small_models import mlp_batch, squared_error

_PIPELINE = {"pp": 2, "dp": 2, "tp": 1, "num_microbatches": 2, "zero": 1, "recompute": "none"}
_OTHER = {"pp": 1, "dp": 2, "tp": 2, "num_microbatches": 1, "zero": 3, "recompute": "full"}


def _momentum(parallel: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parallel.parameters(), lr=0.01, momentum=0.9)


def changing() -> list[Call]:
    """Batches that the ranks share in another way than planned, or cannot share; then another plan, and its step."""
    options = {"loss_fn": squared_error, "example_inputs": mlp_batch(), "time_limit": PATIENCE}
    parallel = planner.compile(small_model(), slow_devices(NUM_RANKS), fix=_PIPELINE, **options)
    optimizer = _momentum(parallel)
    with recorded() as recorder:
        for samples in (4, 3):
            parallel.train_step(*mlp_batch(batch=samples))
            optimizer.step()
        parallel.replan(slow_devices(NUM_RANKS), optimizer, fix=_OTHER, time_limit=PATIENCE)
        parallel.train_step(*mlp_batch())
    return recorder.calls


def islands() -> list[Call]:
    """Two islands of two ranks, under different plans, that meet every second step, a fragment a time."""
    both = planner.Islands(2)
    mesh = both.mesh({"dp": 2} if both.index else {"tp": 2})
    options = {"loss_fn": squared_error, "example_inputs": mlp_batch(), "forbid_replicated_matmul": True}
    parallel = planner.compile(small_model(), mesh, cluster=slow_devices(2), **options)
    outer = planner.DiLoCo(parallel, _momentum(parallel), islands=both, inner_steps=2, fragments=2)
    with recorded() as recorder:
        for step in range(3):
            parallel.train_step(*mlp_batch(seed=step))
            outer.step()
            outer.zero_grad()
        outer.synchronise()
    return recorder.calls


def experts() -> list[Call]:
    """Tokens go to the experts of other ranks and come back, in each of two micro-batches; how many is counted."""
    fix = {"num_microbatches": 2, "zero": 1, "recompute": "full"}
    parallel = planner.compile(mixture(), "dp=2,ep=2", example_inputs=mixture_batch(), fix=fix)
    with recorded() as recorder:
        for _ in range(2):
            with parallel.expert_load():
                parallel.train_step(**mixture_batch())
    return recorder.calls


def generation() -> list[Call]:
    """The first rank's loop, and the programs of all, for a prompt and the tokens behind it."""
    parallel = planner.compile(model_named("gpt2"), "pp=2,tp=2", example_inputs=training_batch("gpt2"))
    with recorded() as recorder:
        generated(parallel, "gpt2", "greedy", new_tokens=3)
    return recorder.calls


SCENARIOS: dict[str, Callable[[], list[Call]]] = {
    function.__name__: function for function in (changing, islands, experts, generation)
}
