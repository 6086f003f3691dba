"""Branches on values that weights decide: the program holds both, and the flag selects at run time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from passes.capture import CaptureError, capture, interpret
from tests.capture_parity import assert_parity

X = torch.linspace(-1, 2, 64, dtype=torch.float64).reshape(8, 8)


def mean_square(output: torch.Tensor, _: Any) -> torch.Tensor:
    return output.square().mean()


class Detector(nn.Module):
    """Heads that begin at zero, so that the first step finds no student that differs from its teacher."""

    def __init__(self, num_heads: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in range(num_heads))
        for head in self.heads:
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        outputs = [head(x) for head in self.heads]
        teacher = outputs[-1]
        loss = (x * 0.1 + teacher - 0.5).square().mean()
        for number, student in enumerate(outputs, start=1):
            loss = loss + (student - 0.1 * number).square().mean()
            if torch.equal(student, teacher):
                loss = loss + 3.0 + student.sum() * 0
            else:
                loss = loss + F.kl_div(student.log_softmax(1), teacher.detach().softmax(1), reduction="batchmean")
        return loss


def test_a_branch_changes_after_the_first_step() -> None:
    """The loss of the heads that are equal has 3 more."""
    model = Detector()
    assert model(X).item() > 6
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(X).backward()
    optimizer.step()
    assert model(X).item() < 6


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "pp=2"])
def test_two_devices_train_as_one(mesh: str) -> None:
    report = planner.verify(Detector(), mesh, batch=(X,), loss_fn=lambda loss, _: loss)
    assert report.ok, report.table()


@pytest.mark.parametrize("num_heads", [2, 4])
def test_each_branch_has_its_gradients(num_heads: int) -> None:
    model = Detector(num_heads)
    assert_parity(model, args=(X,))
    with torch.no_grad():
        for number, head in enumerate(model.heads):
            head.bias += number % 3
    model.zero_grad()
    graph = assert_parity(model, args=(X,))
    assert not any("checked" in node.op or "decided" in node.op for node in graph.nodes)


class Steps(nn.Module):
    """Two layers, between which something is decided."""

    def __init__(self, spread: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8, dtype=torch.float64)
        self.second = nn.Linear(8, 8, dtype=torch.float64)
        self.spare = nn.Parameter(torch.ones(8, dtype=torch.float64))
        self.seen = nn.Buffer(torch.zeros(8, dtype=torch.float64))
        with torch.no_grad():
            self.first.weight *= spread

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.decided(self.first(x))) * self.spare.detach()

    def decided(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Scaled(Steps):
    def decided(self, x: torch.Tensor) -> torch.Tensor:
        if x.abs().max() > 1.5:
            x = x * (1.5 / x.abs().max())
        return x


class Undefined(Steps):
    """The square root's gradient where it is not taken is 0 · ∞."""

    def decided(self, x: torch.Tensor) -> torch.Tensor:
        x = x * (x > 0)
        if (x > 0).all():
            return x.sqrt()
        return torch.cat([x[:, :4] + 1, x[:, 4:]], dim=1)


class Several(Steps):
    """The second flag is of what the first one selects; the last one decides between what is there already."""

    def decided(self, x: torch.Tensor) -> torch.Tensor:
        scale = 2.0 if x.mean() > 0 else 0.5
        x = x * scale
        other = x.tanh()
        y = other.exp() if not (x.mean() > 1) else other.sin() + x
        return x + y if y.sum() > x.sum() else x + other


class WritesBuffer(Steps):
    def decided(self, x: torch.Tensor) -> torch.Tensor:
        flag = bool(x.mean() > 0)
        self.seen.copy_((x * 2 if flag else x.cos()).detach().sum(0))
        return x if flag else x + self.seen


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0, -4.0])
@pytest.mark.parametrize("kind", [Scaled, Undefined, Several, WritesBuffer])
def test_gradients_and_buffers_are_those_of_the_branch_that_is_taken(kind: type[Steps], spread: float) -> None:
    assert_parity(kind(spread), args=(X,), loss_fn=mean_square)


@pytest.mark.parametrize("kind", [Scaled, Undefined, Several])
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "pp=2"])
def test_ranks_decide_alike(kind: type[Steps], mesh: str) -> None:
    report = planner.verify(kind(), mesh, batch=(X,), loss_fn=mean_square)
    assert report.ok, report.table()


class OneAlone(Steps):
    def decided(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.spare if x.mean() > 0 else x


class Draws(Steps):
    def decided(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5) if x.mean() > 0 else x


class OtherShapes(Steps):
    def decided(self, x: torch.Tensor) -> torch.Tensor:
        rows = x[:4] if x.mean() > 0 else x
        return rows.sum(0, keepdim=True) + rows.new_ones(rows.shape[0]).sum()


class UntilSmall(Steps):
    def decided(self, x: torch.Tensor) -> torch.Tensor:
        while x.abs().max() > 1:
            x = x / 2
        return x


class Nested(Steps):
    def decided(self, x: torch.Tensor) -> torch.Tensor:
        if x.mean() > 0 and x.sum() > 1:
            return x * 2
        return x


class Dependent(Steps):
    def decided(self, x: torch.Tensor) -> torch.Tensor:
        factor = 2 if x.mean() > 0 else 3
        return x * factor if x.sum() > 1 else x * (factor + 1)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (OneAlone, "'spare' has a gradient in one of its branches alone"),
        (Draws, "one of its branches draws random numbers"),
        (UntilSmall, "more than 16 times"),
        (Nested, "its branches decide by other values themselves"),
        (Dependent, "what one branch computes depends on whether another one is taken"),
    ],
)
def test_what_cannot_be_selected_is_refused(kind: type[Steps], words: str) -> None:
    with pytest.raises(CaptureError, match=words) as refused:
        capture(kind(), args=(X,), loss_fn=mean_square)
    assert "test_other_branches.py" in str(refused.value) and "torch.where" in str(refused.value)


class EqualOrDrawn(Detector):
    """A branch that cannot be selected stays the check that it was."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (head(x) for head in self.heads)
        return first.mean() if torch.equal(first, second) else F.dropout(first - second, 0.5).square().sum()


def test_equal_tensors_without_a_branch_are_checked() -> None:
    model = EqualOrDrawn()
    graph = capture(model, args=(X,))
    with pytest.raises(ValueError, match=r"two tensors are equal.*draws random numbers.*if torch\.equal"):
        interpret(graph, {graph.inputs[0].name: X}, lambda state: model.get_parameter(state.path))


class PairsOnce(Steps):
    """The places that weights choose, each once: as many rows as there are different ones."""

    def decided(self, x: torch.Tensor) -> torch.Tensor:
        return x[torch.unique(x.argmax(1))]


def test_a_shape_that_weights_decide_is_refused_with_its_line() -> None:
    with pytest.raises(
        CaptureError, match=r"return x\[torch\.unique\(x\.argmax\(1\)\)\]: the shape of a result depends"
    ):
        capture(PairsOnce(), args=(X,), loss_fn=mean_square)
