"""``planner.verify``: many virtual ranks in one process against one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import planner
from planner.comparison import Comparison, difference
from tests.small_models import TiedClassifier, seeded, token_batch

OPTIONS: dict[str, Any] = {"forbid_replicated_matmul": True}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are slower on several threads, most of all where other processes run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("model", "mesh"), [("tiny-llama", "dp=4,tp=8"), ("tiny-gpt2", "dp=2,cp=2,tp=2"), ("tiny-bert", "dp=2,tp=4")]
)
def test_library_models_on_large_meshes(model: str, mesh: str) -> None:
    report = planner.verify(model, mesh, batch_size=8, seq_len=16, **OPTIONS)
    assert report.ok, report.table()
    assert report.largest_error < 1e-9
    assert report.collectives_as_planned


def test_64_ranks() -> None:
    report = planner.verify(seeded(TiedClassifier, size=64, vocabulary=64), "dp=8,tp=8", batch=token_batch(), **OPTIONS)
    assert report.ok, report.table()
    with pytest.raises(ValueError, match="at most 64 ranks"):
        planner.verify(seeded(TiedClassifier), "dp=8,tp=16", batch=token_batch())


def test_vocabulary_that_tp_does_not_divide() -> None:
    batch = token_batch(vocabulary=29)
    report = planner.verify(seeded(TiedClassifier, vocabulary=29), "tp=4", batch=batch, **OPTIONS)
    assert report.ok, report.table()


def test_a_saved_plan_is_verified(tmp_path: Any) -> None:
    first = planner.verify(seeded(TiedClassifier), "dp=2,tp=2", batch=token_batch(), **OPTIONS)
    path = tmp_path / "plan.json"
    first.plan.save(path)
    again = planner.verify(seeded(TiedClassifier), path, batch=token_batch())
    assert again.ok and again.source == first.source
    assert not dist.is_initialized()


def test_the_report_fails_for_a_wrong_number_and_for_unplanned_communication() -> None:
    report = planner.verify(seeded(TiedClassifier), "tp=2", batch=token_batch(), **OPTIONS)
    assert "largest relative error" in report.table()
    wrong = dataclasses.replace(report, comparisons=(*report.comparisons, Comparison("gradients", "w", 1e-3)))
    assert not wrong.ok and "FAILED" in wrong.table()
    unplanned = dataclasses.replace(report, counted=())
    assert not unplanned.ok and "planned" in unplanned.table()


def test_inputs_that_are_missing_are_named() -> None:
    with pytest.raises(ValueError, match="batch is missing: TiedClassifier"):
        planner.verify(seeded(TiedClassifier), "tp=2")
    with torch.device("meta"):
        empty = TiedClassifier()
    with pytest.raises(ValueError, match="meta device"):
        planner.verify(empty, "tp=2", batch=token_batch())


def test_difference_is_relative_to_the_largest_value() -> None:
    given, wanted = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])
    assert difference("x", "x", given, wanted).error == 0.5
    assert difference("x", "x", given, wanted, floor=20.0).error == 0.1
    assert difference("x", "x", torch.zeros(2), torch.zeros(2)).error == 0.0
