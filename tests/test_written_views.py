"""Writes through views that turn dims reach the elements that they show."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import planner
from passes.capture import CaptureError, capture
from tests.capture_parity import graph_loss

View = Callable[[torch.Tensor], torch.Tensor]
TURNING: dict[str, View] = {
    "mT": lambda x: x.mT,
    "mH": lambda x: x.mH,
    "adjoint": lambda x: x.adjoint(),
    "T of a matrix": lambda x: x[0].T,
    "t of a matrix": lambda x: x[0].t(),
    "movedim": lambda x: x.movedim(0, 2),
    "swapaxes": lambda x: x.swapaxes(0, 2),
    "permute": lambda x: x.permute(2, 0, 1),
    "a dim of one turned": lambda x: x.unsqueeze(1).mT,
    "flat": lambda x: x.flatten(1).unsqueeze(0),
    "on its own device": lambda x: x.to(device="cpu"),
}


class Writes(nn.Module):
    """Adds to the first rows of a view of what it computes."""

    def __init__(self, view: View) -> None:
        super().__init__()
        self.view, self.linear = view, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        shown = self.view(hidden)
        shown[:, 0].add_(1.0)
        shown[:, 1:] *= 3.0
        return (hidden * x).sum()


@pytest.mark.parametrize("name", TURNING)
def test_what_is_written_through_a_turned_view(name: str) -> None:
    model, x = Writes(TURNING[name]), torch.randn(2, 3, 4)
    torch.testing.assert_close(graph_loss(capture(model, args=(x,)), model, (x,), {}), model(x))


def test_windows_side_by_side_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"writes in place through aten\.unfold"):
        capture(Writes(lambda x: x.unfold(1, 3, 1)), args=(torch.randn(2, 3, 4),))


class WritesItsInput(nn.Module):
    """Masks its input in place, as code does that owns its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x[:, 0] = 0.0
        return self.linear(x.mul_(2.0)).sum()


def test_what_is_written_to_an_input_stays_in_the_call() -> None:
    model, x = WritesItsInput(), torch.randn(3, 4)
    parallel = planner.compile(model, "dp=1", example_inputs={"x": x})
    before = x.clone()
    torch.testing.assert_close(parallel.train_step(x=x), model(x.clone()).detach())
    assert torch.equal(x, before)
