"""Questions to random numbers whose answer is the same whatever is drawn, as models ask to drop no layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import planner
from passes.capture import CaptureError, capture
from tests.capture_parity import assert_parity
from tests.versions import torch_version

OWN_GENERATOR = torch.Generator().manual_seed(0)
X = torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4)

Question = Callable[[], torch.Tensor | bool]

#: Questions with this in their name draw from a generator of the model's own.
OWN = "of a generator of its own"

#: Questions whose answer is always no.
NEVER: dict[str, Question] = {
    "below zero": lambda: torch.rand([]) < 0.0,
    "zero above it": lambda: torch.rand(1) < 0,
    "at most less": lambda: torch.rand([]) <= -0.5,
    "above one": lambda: torch.rand([], dtype=torch.float64) > 1,
    "one or more": lambda: torch.rand([]) >= 1.0,
    "one": lambda: torch.rand([]) == 1,
    "some below zero": lambda: (torch.rand(2, 3) < 0).any(),
    "not all at least zero": lambda: ~(torch.rand(3).reshape(3, 1) >= 0.0).all(),
    "not below one": lambda: torch.logical_not(torch.rand([]).double() < 1.0),
    "not another than two": lambda: torch.logical_not(torch.rand_like(torch.zeros(1)) != 2),
    "at most zero": lambda: torch.rand([]) <= 0.0,
    "not above zero": lambda: ~(torch.rand([]) > 0.0),
    "a number below zero": lambda: torch.rand([]).item() < 0.0,
    "a float of one or more": lambda: float(torch.rand(1)) >= 1.0,
    OWN: lambda: not float(torch.rand((), generator=OWN_GENERATOR)) >= 0.0,
    "below zero and more": lambda: (torch.rand([]) < 0) & (torch.rand([]) < 0.5),
}


def _written() -> torch.Tensor:
    number = torch.rand([])
    return number.sub_(1) < 0.0


#: Questions that some number answers with yes, some with no, or that are of no numbers from [0, 1).
OPEN: dict[str, Question] = {
    "half": lambda: torch.rand([]) < 0.5,
    "one of a million is zero": lambda: (torch.rand(1000, 1000) > 0.0).all(),
    "zero is drawn": lambda: torch.rand([]) == 0.0,
    "rounded to one": lambda: torch.rand([], dtype=torch.float64).float() >= 1.0,
    "less than was drawn": lambda: torch.rand([]) - 1 < 0.0,
    "less was written": _written,
    "normal": lambda: torch.randn([]) < 0.0,
    "no number": lambda: torch.rand([]) < float("nan"),
}


#: Questions that Python asks of a number which was drawn, likewise.
OPEN_IN_PYTHON: dict[str, Callable[[], bool]] = {
    "half": lambda: float(torch.rand([])) < 0.5,
    f"half {OWN}": lambda: torch.rand((), generator=OWN_GENERATOR).item() < 0.5,
    "less than was drawn": lambda: torch.rand([]).item() - 1 < 0.0,
    "as drawn": lambda: bool(torch.rand([]).item()),
}


class Dropped(nn.Module):
    """A layer that is left out if a question is answered with yes."""

    def __init__(self, question: Question) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.question = question

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.linear.bias
        return (x if self.question() else self.linear(x)).square().mean()


def traced(questions: Iterable[str]) -> list[Any]:
    """As parameters, those that no torch traces but the newest marked so."""
    newest = pytest.mark.skipif(torch_version() < (2, 13), reason="traces no call with a generator")
    return [pytest.param(question, marks=[newest] if OWN in question else []) for question in questions]


@pytest.mark.parametrize("question", traced(NEVER))
def test_what_no_number_says_is_traced_without_a_draw(question: str) -> None:
    graph = assert_parity(Dropped(NEVER[question]), args=(X,))
    assert "aten.linear.default" in {node.op for node in graph.nodes}
    assert all(node.draw is None and "check" not in node.op for node in graph.nodes)


@pytest.mark.parametrize("question", OPEN)
def test_what_depends_on_the_number_is_refused(question: str) -> None:
    with pytest.raises(CaptureError, match="control flow depends on a value, which depends on random numbers"):
        capture(Dropped(OPEN[question]), args=(X,))


@pytest.mark.parametrize("question", traced(OPEN_IN_PYTHON))
def test_a_number_that_decides_in_python_is_refused(question: str) -> None:
    with pytest.raises(CaptureError, match=r"draws a number and reads it in Python.*probability of 0 or 1"):
        capture(Dropped(OPEN_IN_PYTHON[question]), args=(X,))


def test_a_number_that_was_written_to_is_not_one_that_was_drawn() -> None:
    def is_below_zero() -> bool:
        number = torch.rand([2])
        number[:1].sub_(1)
        return number[0].item() < 0.0

    with pytest.raises(CaptureError, match=r"read in Python .*, which depends on random numbers"):
        capture(Dropped(is_below_zero), args=(X,))


@pytest.mark.parametrize("question", traced(["below zero", OWN]))
def test_four_devices_train_as_one(question: str) -> None:
    assert planner.verify(Dropped(NEVER[question]), "dp=2,tp=2", batch=(X,), loss_fn=lambda loss, _: loss).ok


@pytest.mark.skipif(torch_version() >= (2, 13), reason="traces calls with a generator")
def test_a_generator_that_torch_does_not_trace_is_refused_with_advice() -> None:
    with pytest.raises(CaptureError, match="traces no call with generator=: draw from the default generator"):
        capture(Dropped(NEVER[OWN]), args=(X,))
