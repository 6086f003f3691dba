"""Memory of gradients: a step writes where the last one's were, unless somebody has kept these."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import planner
from planner.library import build_model, load_config, random_batch


@pytest.fixture
def parallel() -> planner.ParallelModule:
    """Weights of 16 bits: owners are float32, so gradients are the units' own."""
    config = load_config("tiny-llama")
    model = build_model(config, dtype="bfloat16", device="cpu").train()
    return planner.compile(model, example_inputs=random_batch(config, batch_size=2, seq_len=8))


def step(parallel: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """One step; the gradients that it left on this rank."""
    parallel.train_step(**random_batch(load_config("tiny-llama"), batch_size=2, seq_len=8))
    gradients = [parameter.grad.to_local() for parameter in parallel.parameters()]
    optimizer.step()
    return gradients


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_step_writes_its_gradients_where_the_last_were(parallel: planner.ParallelModule, set_to_none: bool) -> None:
    optimizer = torch.optim.AdamW(parallel.parameters())
    first = [gradient.data_ptr() for gradient in step(parallel, optimizer)]
    optimizer.zero_grad(set_to_none=set_to_none)
    second = [gradient.data_ptr() for gradient in step(parallel, optimizer)]
    assert second == first


def test_gradients_that_somebody_keeps_stay_what_they_are(parallel: planner.ParallelModule) -> None:
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.1)
    first = step(parallel, optimizer)
    values = [gradient.clone() for gradient in first]
    optimizer.zero_grad()
    step(parallel, optimizer)
    assert all(torch.equal(gradient, value) for gradient, value in zip(first, values, strict=True))
