"""A loop over tokens in Python is captured while it is short, with reports of progress, and refused while it is not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from passes.capture import CaptureError, capture
from passes.capture.operator_count import INTERVAL, MAX_OPERATORS, VARIABLE
from planner.planning import capture_for_planning
from planner.whole_step.result.search_progress import CAPTURING, Report
from tests.small_models import Mlp


class TokenByToken(nn.Module):
    """A gated cell called for every token: six operators for each."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            state = torch.tanh(state + x[:, t]) * torch.sigmoid(self.gate(state))
        return state.square().sum()


class Reader(nn.Module):
    """The loop inside of a model with other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.cell = TokenByToken()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(self.embed(x))


def tokens(count: int) -> torch.Tensor:
    return torch.zeros(2, count, 3)


def test_a_short_loop_is_captured() -> None:
    assert len(capture(Reader(), args=(tokens(8),)).nodes) > 8 * 4


def test_a_loop_of_too_many_operators_is_refused_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "200")
    with pytest.raises(CaptureError) as caught:
        capture(Reader(), args=(tokens(100),))
    text = str(caught.value)
    assert text.startswith("cannot capture Reader: forward calls more than 200 operators; most often, ")
    assert "module 'cell' (TokenByToken)" in text
    assert f"{__file__}:" in text and "state = torch.tanh(state + x[:, t]) * torch.sigmoid(self.gate(state))" in text
    assert "loop over tokens" in text and VARIABLE in text and "\n" not in text


def test_a_loop_in_repeated_layers_is_traced_once_before_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            states = [self.gate(x[:, 0])]
            for t in range(1, x.shape[1]):
                states.append(torch.tanh(states[-1] + self.gate(x[:, t])))
            return torch.stack(states, dim=1)

    monkeypatch.setenv(VARIABLE, str(INTERVAL + 1))
    reports: list[int] = []
    with pytest.raises(CaptureError, match="more than 501 operators"):
        capture(
            nn.Sequential(*(Layer() for _ in range(8))), args=(tokens(200),), copy_repeats=True, progress=reports.append
        )
    assert reports == [INTERVAL]


def test_the_line_is_told_with_how_often_it_called_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "60")

    class Sums(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = x.sum()
            for _ in range(100):
                total = total + 1
            return total

    with pytest.raises(
        CaptureError, match=r"most often, 60 times so far in module '' \(Sums\), .*: total = total \+ 1"
    ):
        capture(Sums(), args=(tokens(1),))


def test_a_layer_of_torch_is_counted_at_the_line_that_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(100):
                x = self.layer(x)
            return x

    monkeypatch.setenv(VARIABLE, "60")
    with pytest.raises(CaptureError, match=r"61 times so far in module '' \(Again\), .*: x = self\.layer\(x\)"):
        capture(Again(), args=(tokens(1),))


def test_the_same_loop_is_captured_under_another_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "200")
    with pytest.raises(CaptureError):
        capture(Reader(), args=(tokens(40),))
    monkeypatch.setenv(VARIABLE, "2000")
    assert len(capture(Reader(), args=(tokens(40),)).nodes) > 40 * 4


@pytest.mark.parametrize("text", ["many", "0", "-5", "1.5"])
def test_a_limit_that_is_no_number_of_operators_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ValueError, match=f"{VARIABLE}='{text}': expected a positive whole number"):
        capture(Mlp(), args=(torch.zeros(2, 8),))


def test_planning_reports_the_operators_of_a_large_graph() -> None:
    reports: list[Report] = []
    capture_for_planning(Reader(), example_inputs=(tokens(2 * INTERVAL // 6 + 20),), progress=reports.append)
    assert [report.operators for report in reports if report.phase == CAPTURING] == [0, INTERVAL, 2 * INTERVAL]


def test_the_largest_models_of_the_library_are_far_from_the_limit() -> None:
    reported: list[int] = []
    graph = capture_for_planning(
        "llama-3.2-11b-vision", batch_size=1, seq_len=64, progress=lambda report: reported.append(report.operators)
    )
    assert graph.nodes and 0 < max(reported) < MAX_OPERATORS // 4
