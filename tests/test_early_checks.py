"""Checks and writes of buffers of each layer leave the model in parts, between which a pipeline is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import planner
from passes.capture import capture, interpret
from passes.repeats.model_units import find_units
from tests.capture_parity import assert_parity

X = torch.linspace(-1, 2, 64, dtype=torch.float64).reshape(8, 8)


class Observed(nn.Module):
    """A linear layer that notes the range of what it gives, and demands that it is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)
        self.high = nn.Buffer(torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        high = x.detach().max()
        assert high.isnan().sum() == 0, "not a number"
        self.high.copy_(0.9 * self.high + 0.1 * high)
        return torch.tanh(x)


class Stack(nn.Sequential):
    def __init__(self, depth: int = 4) -> None:
        torch.manual_seed(0)
        super().__init__(*(Observed() for _ in range(depth)))


def mean_square(output: torch.Tensor, _: Any) -> torch.Tensor:
    return output.square().mean()


def test_each_layer_is_a_part() -> None:
    graph = assert_parity(Stack(), args=(X,), loss_fn=mean_square)
    assert [len(unit.entering) for unit in find_units(graph, ())] == [0, 1, 1, 1]


@pytest.mark.parametrize("mesh", ["pp=2", "dp=2,tp=2"])
def test_a_pipeline_trains_as_one_device(mesh: str) -> None:
    report = planner.verify(Stack(), mesh, batch=(X,), loss_fn=mean_square)
    assert report.ok, report.table()


@pytest.mark.parametrize("layer", range(4))
def test_every_layer_is_checked(layer: int) -> None:
    model = Stack()
    graph = capture(model, args=(X,), loss_fn=mean_square)
    assert sum(node.op == "meshwright.checked.default" for node in graph.nodes) == 4
    with torch.no_grad():
        model[layer].linear.bias[0] = torch.nan
    states = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with pytest.raises(ValueError, match=rf"numbers are not finite.*module '{layer}'"):
        interpret(graph, {graph.inputs[0].name: X}, lambda state: states.get(state.path, state.data))
