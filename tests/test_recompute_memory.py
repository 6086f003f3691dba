"""Bytes kept between forward and backward under each recompute policy are those that the planner predicts."""

from __future__ import annotations

from collections.abc import Callable

import memory_truth
import pytest
import torch
from memory_truth import CASES, Case, Prediction, held_activations
from spmd_types import R, S, all_gather, set_current_mesh

from passes.autograd import POLICIES
from passes.ir.types import MeshShape
from runtime.mesh.virtual import virtual_mesh
from runtime.program_tools.recompute import can_be_made_again, recomputed

TOLERANCE = 0.01


def _recomputed_layers(case: Case, policy: str) -> Callable[[], None]:
    """Run every layer of the case under ``policy``; returns what undoes it."""
    layers = [case.model.get_submodule(path) for path in case.layers]
    for layer in layers:
        layer.forward = recomputed(layer.forward, policy)  # type: ignore[method-assign]

    def restore() -> None:
        for layer in layers:
            del layer.forward

    return restore


@pytest.fixture(scope="module", params=["llama", "gpt2", "convolutions"])
def measured(request: pytest.FixtureRequest) -> tuple[Case, Prediction]:
    case = CASES[request.param]()
    if request.param == "convolutions":
        case.model.eval()  # torch's own dropout draws from generators that are left alone
    return case, Prediction(case)


@pytest.mark.parametrize("policy", POLICIES)
def test_kept_bytes_are_those_predicted(measured, policy: str, monkeypatch: pytest.MonkeyPatch):
    case, prediction = measured
    monkeypatch.setattr(memory_truth, "_checkpointed", _recomputed_layers)
    assert prediction.activations(policy) == pytest.approx(held_activations(case, policy), rel=TOLERANCE)


def _kept_bytes(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> int:
    """Bytes allocated by the call and not freed while its output is held, less the output."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        output = function(x)
    return sum(memory_truth.allocations(profile)) - output.nbytes


@pytest.mark.parametrize(("policy", "parts"), [("none", 2 + 4), ("regather", 2 + 1)])
def test_regathering_keeps_the_shard_in_place_of_what_was_gathered(policy: str, parts: int):
    """The sine keeps its input, two parts long as the output here is; the gather brings four parts from one."""
    x = torch.ones(64, 8, requires_grad=True)
    weight = torch.ones(4, 8, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        gathered = all_gather(x * 1.0, "tp", src=S(0), dst=R)
        return torch.nn.functional.linear(gathered, weight).sin()

    with virtual_mesh(MeshShape(("tp",), (4,))) as mesh, set_current_mesh(mesh):
        region = recomputed(function, policy)
        region(x).sum().backward()
        assert _kept_bytes(region, x) == pytest.approx(parts * x.nbytes, rel=TOLERANCE)


@pytest.mark.parametrize("policy", ["none", "regather", "selective", "full"])
def test_weights_that_can_be_made_again_are_not_kept(policy: str):
    x = torch.ones(2, 64, requires_grad=True)
    owned = torch.ones(64, 64)

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, token: torch.Tensor) -> torch.Tensor:
            weights = [owned * 1.0]
            can_be_made_again(weights, lambda: [owned * 1.0])
            return weights[0]

        @staticmethod
        def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
            return torch.zeros(())

    token = torch.zeros((), requires_grad=True)
    region = recomputed(lambda x: torch.nn.functional.linear(x, Gather.apply(token)), policy, gathers_weights=True)
    region(x).sum().backward()
    assert _kept_bytes(region, x) < owned.nbytes
    assert torch.equal(x.grad, torch.full((2, 64), 64.0))
