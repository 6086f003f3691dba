"""``if`` on values that weights or earlier calls decide: both branches are computed, their assignments selected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import planner
from passes.capture import CaptureError, capture
from tests.capture_parity import assert_parity

X = torch.linspace(-1, 2, 64, dtype=torch.float64).reshape(8, 8)


class Range(nn.Module):
    """The range of what passes: that of the first batch, and from then on a running mean or the widest."""

    def __init__(self, momentum: float = 0.9) -> None:
        super().__init__()
        self.momentum = momentum
        self.low = nn.Buffer(torch.zeros(1, dtype=torch.float64))
        self.high = nn.Buffer(torch.zeros(1, dtype=torch.float64))
        self.calls = nn.Buffer(torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low, high = x.detach().min(), x.detach().max()
        if self.low.min() == 0 and not self.high.max() > 0 and self.momentum is not None:
            self.low = self.low + low
            self.high = self.high + high
        elif self.momentum == 1:
            self.low = torch.min(self.low, low)
            self.high = torch.max(self.high, high)
        else:
            self.low = self.low * self.momentum + low * (1 - self.momentum)
            self.high = self.high * self.momentum + high * (1 - self.momentum)
            self.calls = self.calls + 1
        return x / (self.high - self.low)


class Scaled(nn.Module):
    """Linear layers around one range that is called twice: at its second call weights have decided what it holds."""

    def __init__(self, momentum: float = 0.9) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8, dtype=torch.float64)
        self.second = nn.Linear(8, 8, dtype=torch.float64)
        self.range = Range(momentum)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.range(self.second(self.range(self.first(x))))


def mean_square(output: torch.Tensor, _: Any) -> torch.Tensor:
    return output.square().mean()


@pytest.mark.parametrize("momentum", [0.9, 1.0])
def test_four_devices_train_as_one(momentum: float) -> None:
    report = planner.verify(Scaled(momentum), "dp=2,tp=2", batch=(X,), loss_fn=mean_square)
    assert report.ok, report.table()


def test_the_program_asks_no_values() -> None:
    graph = capture(Scaled(), args=(X,), loss_fn=mean_square)
    assert not graph.guards.entries
    assert sum(node.op == "aten.where.self" for node in graph.nodes) >= 3


def test_the_model_keeps_its_own_code() -> None:
    code = Range.forward.__code__
    capture(Scaled(), args=(X,), loss_fn=mean_square)
    assert Range.forward.__code__ is code
    assert not any("meshwright" in name for name in globals())


class Branching(nn.Module):
    """Does something where the mean of what weights made is below zero."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)
        self.seen = nn.Buffer(torch.zeros(8, dtype=torch.float64))
        self.log: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.branch(self.linear(x))

    def branch(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def note(self, x: torch.Tensor) -> torch.Tensor:
        self.log.append("seen")
        return x


class WithGradient(Branching):
    def branch(self, x: torch.Tensor) -> torch.Tensor:
        if x.mean() < 0:
            x = x * 2
        return x


class OtherShape(Branching):
    def branch(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.detach()
        if x.mean() < 0:
            rows = rows[:4]
        return x * rows.sum()


class CallsOwnMethod(Branching):
    def branch(self, x: torch.Tensor) -> torch.Tensor:
        if x.mean() < 0:
            self.seen = self.note(x.detach().sum(0))
        return x


class Draws(Branching):
    def branch(self, x: torch.Tensor) -> torch.Tensor:
        if x.mean() < 0:
            self.seen = torch.rand_like(self.seen)
        return x


class WritesInPlace(Branching):
    def branch(self, x: torch.Tensor) -> torch.Tensor:
        if x.mean() < 0:
            self.seen = self.seen.add_(1)
        return x


class AddsInPlace(Branching):
    def branch(self, x: torch.Tensor) -> torch.Tensor:
        if x.mean() < 0:
            self.seen += 1
        return x


class CallsInCondition(Branching):
    def branch(self, x: torch.Tensor) -> torch.Tensor:
        if x.mean() < 0 and self.note(x).mean() < 0:
            self.seen = self.seen + 1
        return x


class OneNameAlone(Branching):
    def branch(self, x: torch.Tensor) -> torch.Tensor:
        if x.mean() < 0:
            scale = self.seen * 2
        return x * scale


class OtherNumber(Branching):
    def branch(self, x: torch.Tensor) -> torch.Tensor:
        factor = 1
        if x.mean() < 0:
            factor = 2
        return x * factor


class Returns(Branching):
    def branch(self, x: torch.Tensor) -> torch.Tensor:
        if x.mean() < 0:
            return x * 2
        return x


class Nested(Branching):
    def branch(self, x: torch.Tensor) -> torch.Tensor:
        factor = self.seen
        if x.mean() < 0:
            factor = self.seen + 1
            if x.sum() < -1:
                factor = factor * 2
            self.seen = factor
        return x


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (CallsOwnMethod, "its branches give other outputs or write other buffers"),
        (Draws, "its branches give other outputs or write other buffers"),
        (WritesInPlace, "its branches give other outputs or write other buffers"),
        (AddsInPlace, "its branches give other outputs or write other buffers"),
        (CallsInCondition, "its branches decide by other values themselves"),
        (OneNameAlone, "one of its branches cannot be traced .*cannot access local variable 'scale'"),
    ],
)
def test_what_no_selection_computes_is_refused(kind: type[Branching], reason: str) -> None:
    with pytest.raises(CaptureError, match=reason):
        capture(kind(), args=(X,), loss_fn=mean_square)


@pytest.mark.parametrize("kind", [WithGradient, OtherShape, OtherNumber, Returns, Nested])
@pytest.mark.parametrize("sign", [1, -1])
def test_what_assignments_alone_cannot_select_is_traced_for_both_answers(kind: type[Branching], sign: int) -> None:
    model = kind()
    with torch.no_grad():
        model.linear.weight *= sign
    assert_parity(model, args=(X,), loss_fn=mean_square)
