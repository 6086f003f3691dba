"""Rows that a mask of inputs picks: one program for their number, then one for any, which computes all rows."""

from __future__ import annotations

import copy
import functools
import logging
from typing import Any

import pytest
import torch
from torch import nn

from passes.capture import CaptureError, capture
from passes.capture.nested_values import Path
from passes.ir.graph import Graph
from runtime.agreement.ranks_together import Ranks
from runtime.execution.value_cases import CallValues, ValueCases
from tests.any_count_worker import (
    COUNTS,
    REFUSED,
    REWRITTEN,
    TARGETS,
    TRAINED,
    PicksHidden,
    PicksLosses,
    Tagger,
    batch_of,
    batches,
)
from tests.capture_parity import graph_loss
from tests.ranks import run_on_ranks


@functools.cache
def results() -> dict[str, Any]:
    return run_on_ranks("any_count_worker", 2, None)


@pytest.mark.parametrize(("kind", "target"), TRAINED)
def test_batches_with_ever_other_numbers_of_rows_are_captured_twice(kind: type, target: str) -> None:
    assert results()[f"{kind.__name__} {target}"] == {"wrong": [], "captures": 2}


@pytest.mark.parametrize(("kind", "target"), [(kind, TARGETS[0]) for kind in REFUSED])
def test_rows_whose_number_matters_have_a_program_for_each(kind: type, target: str) -> None:
    assert results()[f"{kind.__name__} {target}"] == {"wrong": [], "captures": len(COUNTS)}


def test_evaluation_on_each_ranks_own_samples_is_captured_no_more_after_the_second_batch() -> None:
    assert results()["evaluation"] == {"wrong": [], "captures": 0}


def test_a_plan_that_was_saved_is_trained_with_any_number_of_rows() -> None:
    assert results()["saved plan"] == {"wrong": [], "captures": 2}


def test_sizes_that_are_left_open_do_not_keep_numbers_of_rows_from_it() -> None:
    """The trace for any size, which reads no values, is tried before."""
    assert results()["any size"] == {"wrong": [], "captures": 3}


def for_any_number(model: nn.Module, **inputs: torch.Tensor) -> Graph:
    """The graph without the readings of numbers that the graph of the example has."""
    counts = capture(model, kwargs=inputs).guards.counts
    assert counts
    return capture(model, kwargs=inputs, any_number_at={reading.place for reading in counts})


@functools.cache
def graph_of(kind: type[Tagger]) -> Graph:
    """One graph for all numbers of rows and all weights."""
    return for_any_number(kind(), **batches(kind)[0])


@pytest.mark.parametrize("count", [0, 1, 17, 40])
@pytest.mark.parametrize("kind", REWRITTEN)
def test_a_graph_for_any_number_is_the_models_own(kind: type[Tagger], count: int) -> None:
    """Of no rows, too: their mean is no number, and the gradients of the weights that they go through are zeros."""
    model = kind()
    other = copy.deepcopy(model)
    graph = graph_of(kind)
    assert not graph.guards
    batch = batch_of(count, count)
    loss, expected = graph_loss(graph, model, (), batch), other(**batch)["loss"]
    assert torch.allclose(loss, expected, rtol=1e-9, atol=1e-12, equal_nan=True)
    assert bool(expected.isnan()) == (count == 0 and kind in (PicksHidden, PicksLosses))
    loss.backward()
    expected.backward()
    for (name, parameter), (_, one) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert (parameter.grad is None) == (one.grad is None), name
        assert one.grad is None or torch.allclose(parameter.grad, one.grad, rtol=1e-9, atol=1e-12), name


class GoesThroughThem(Tagger):
    def loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.stack([row.square().sum() for row in hidden[labels >= 0]]).sum()


class CountsThem(Tagger):
    def loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        picked = hidden[labels >= 0]
        return sum(picked.sum() for _ in range(len(picked)))  # type: ignore[return-value]


class ReadsThem(Tagger):
    def loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return hidden[labels >= 0].sum() * (2 if labels[labels >= 0].max() > 3 else 1)


class AsksForTheirNumber(Tagger):
    def loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        picked = hidden[labels >= 0]
        if len(picked) > 30:
            raise IndexError("too many")
        return picked.sum()


class ReturnsTheirNumber(Tagger):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        picked = self.head(x)[labels >= 0]
        return {"loss": picked.square().sum(), "number": len(picked)}


REASONS = {
    GoesThroughThem: "one by one",
    CountsThem: "one by one",
    ReadsThem: "depends on how many rows a mask picks",
    AsksForTheirNumber: "too many",
    ReturnsTheirNumber: "decides more than which rows are computed",
}


@pytest.mark.parametrize("kind", REASONS)
def test_what_depends_on_the_number_is_not_for_any(kind: type[Tagger]) -> None:
    with pytest.raises(CaptureError, match=REASONS[kind]):
        for_any_number(kind(), **batch_of(13, 0))


class ReturnsNumberOfItsOwn(ReturnsTheirNumber):
    """Rows that a mask of weights picks."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        hidden = self.head(x)
        picked = hidden[hidden.sum(-1) > 0]
        return {"loss": picked.square().sum(), "number": len(picked)}


def test_a_number_that_weights_decide_is_not_returned() -> None:
    with pytest.raises(CaptureError, match="decides more than which rows are computed"):
        capture(ReturnsNumberOfItsOwn(), kwargs=batch_of(13, 0))


class TwoPlaces(Tagger):
    """Rows that are as many in each batch, beside others."""

    def loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        first = torch.zeros_like(labels)
        first[:, 0] = 1
        heads = hidden[(labels * 0 + first).bool()]
        return hidden[labels >= 0].square().sum() + heads.view(len(labels), -1).sum(1).square().sum()


class Programs:
    """Which lines a kind's calls were captured with, and the case of each."""

    def __init__(self, model: Tagger, *, refuses: bool = False) -> None:
        self.cases = ValueCases(Ranks(None), {})
        self.model, self.refuses = model, refuses
        self.asked: list[frozenset[str]] = []

    def case_of(self, batch: dict[str, torch.Tensor]) -> int:
        plain = self.cases.plain_case("spelling")
        if plain is not None:
            return plain
        values: dict[Path, torch.Tensor] = {(name,): tensor for name, tensor in batch.items()}
        kind = self.cases.note("spelling", "kind")
        number = self.cases.case_of(kind, CallValues(values))
        if number is None:
            number = self.cases.next_number(kind)
            self.cases.add(kind, number, self.cases.captured("mode", functools.partial(self._capture, batch)).guards)
        return number

    def _capture(self, batch: dict[str, torch.Tensor], any_number_at: frozenset[str] = frozenset()) -> Graph:
        self.asked.append(any_number_at)
        if any_number_at and self.refuses:
            raise CaptureError("no")
        return capture(self.model, kwargs=batch, any_number_at=any_number_at)


def test_lines_at_which_the_number_changed_are_left_open_and_no_others(caplog: pytest.LogCaptureFixture) -> None:
    programs = Programs(TwoPlaces())
    with caplog.at_level(logging.INFO, logger="meshwright.programs"):
        assert [programs.case_of(batch_of(count, count)) for count in (13, 13, 7, 40)] == [0, 0, 1, 1]
    first, second = programs.asked
    assert not first and [place for place in second if "hidden[labels >= 0]" in place] == list(second)
    assert "a program for any number of rows that masks pick, which computes all, in" in caplog.text
    assert programs.cases.plain_case("spelling") is None  # the other number is still read
    assert programs.case_of(batch_of(13, 13)) in (0, 1)


def test_a_program_for_any_number_takes_the_place_of_that_for_one() -> None:
    programs = Programs(PicksHidden())
    assert [programs.case_of(batch_of(count, count)) for count in (13, 7, 13)] == [0, 1, 1]
    assert programs.cases.plain_case("spelling") == 1 and not programs.cases.inputs_read


def test_what_was_refused_for_any_number_is_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    programs = Programs(PicksHidden(), refuses=True)
    with caplog.at_level(logging.INFO, logger="meshwright.programs"):
        assert [programs.case_of(batch_of(count, count)) for count in (13, 7, 40, 13)] == [0, 1, 2, 0]
    assert [bool(places) for places in programs.asked] == [False, True, False, False]
    assert "a program for each number of rows that masks pick: for any number, no" in caplog.text
