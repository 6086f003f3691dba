"""Tensors that a model, its loss or its code hold beside weights: a program follows what a script does to them."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import planner
from tests.held_tensors_worker import OTHERS, TARGETS, WRITES
from tests.ranks import run_on_ranks


@functools.cache
def results() -> dict[str, bool]:
    return run_on_ranks("held_tensors_worker", 2, list(TARGETS))


CASES = [
    "at first",
    "no program for what is written",
    *(f"{kind}: {name}" for kind in ("written", "then written") for name in WRITES),
    *(f"other: {name}" for name in OTHERS),
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_one_device(case: str, target: str) -> None:
    assert results()[f"{case} {target}"]


class Scaled(nn.Module):
    """A frozen layer whose output is scaled by what is held beside it, and a layer that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.boundary, self.layer = nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4)
        self.scale, self.levels = torch.tensor(1.0), [torch.tensor(1.0)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.frozen(x)) * self.scale * AROUND * TABLE[0]
        y = self.boundary(y * 2 if self.levels[0].item() > 0.5 else y)
        return self.layer(y).square().mean()


AROUND, TABLE = 1.0, [torch.tensor(1.0)]


def test_cached_activations_are_those_of_what_is_held_now() -> None:
    """Also where it changed before the plan did."""
    global AROUND
    torch.manual_seed(0)
    model, x = Scaled(), torch.randn(4, 4)
    parallel = planner.compile(model, "pp=1,dp=1", example_inputs={"x": x})
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.0)
    parallel.get_submodule("frozen").requires_grad_(False).eval()
    cache = planner.ActivationCache(parallel, memory_bytes=1e6)

    def replan() -> None:
        cache.replan("pp=1,dp=1", optimizer, after="boundary")

    def twice() -> tuple[bool, int]:
        """Whether two steps have the loss of the model itself; how many samples they computed."""
        misses, losses = cache.misses, torch.stack([cache.train_step(x=x), cache.train_step(x=x)])
        return torch.allclose(losses, model(x).detach().expand(2), rtol=1e-5), cache.misses - misses

    replan()
    assert [twice(), twice()] == [(True, 4), (True, 0)]
    model.scale.fill_(0.5)
    assert twice() == (True, 4)
    model.levels[0].fill_(0.0)
    assert twice() == (True, 4)
    TABLE[0] = torch.tensor(2.0)
    assert twice() == (True, 4)
    AROUND = 3.0
    replan()
    assert twice() == (True, 4)
    model.scale = torch.tensor(0.25)
    replan()
    assert twice() == (True, 4)
    AROUND = 1.0
    assert twice() == (True, 4)
