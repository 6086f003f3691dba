"""The rows of ``benchmarks.coverage`` and the page that is written from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.coverage.model_reasons import model_reason
from benchmarks.coverage.page import page
from benchmarks.coverage.rows import Outcome, Row, read_rows, write_rows

PASSED = Outcome("aaa", seconds=1.0)
VERIFIED = Outcome("aaa", seconds=4.0, facts={"tolerance": 1e-9, "share_without_rule": 0.02})
ROWS = {
    "bert": Row("bert", "BertForMaskedLM", {"eager": PASSED, "verify": VERIFIED, "pipeline": VERIFIED}),
    "detr": Row("detr", "Detr", {"eager": PASSED, "capture": Outcome("bbb", "CaptureError: a flag | is asked for")}),
    "vits": Row(
        "vits", "Vits", {"eager": Outcome("bbb", "NotImplementedError: Training of VITS is not supported yet.")}
    ),
    "xyz": Row("xyz", "Xyz", {"build": Outcome("bbb", "IndexError: list index out of range")}),
}


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_rows(path, ROWS)
    assert read_rows(path) == ROWS and len(path.read_text().splitlines()) == len(ROWS)


def test_a_failed_capture_drops_what_was_measured_behind_it() -> None:
    newer = {"eager": PASSED, "capture": Outcome("ccc", "CaptureError: refused")}
    assert set(ROWS["bert"].updated(newer).outcomes) == {"eager", "capture"}
    assert set(ROWS["bert"].updated({"verify": PASSED}).outcomes) == {"eager", "verify", "pipeline"}


@pytest.mark.parametrize(
    "line",
    [
        "| built tiny and trained a step in eager | 2 |",
        "| cannot be trained on one device, for a reason of their own | 1 |",
        "| not built or not trained by the benchmark yet | 1 |",
        "| tried to capture | 2 |",
        "| captured | 1 |",
        "| verified with a pipeline | 1 |",
        "| failed behind eager, for a reason of ours | 1 |",
        "| failed behind eager, for a reason of the model's alone | 0 |",
        "| at most 1% of the compute in operators without a rule, of 1 whose share was recorded | 0 |",
        r"| detr | capture | bbb | ours | CaptureError: a flag \| is asked for |",
        "## Verified, with a pipeline too (1)",
    ],
)
def test_the_page_counts_what_the_rows_say(line: str) -> None:
    assert line in page(ROWS).splitlines()


def test_a_verified_type_is_no_longer_one_that_was_not_captured() -> None:
    assert set(ROWS["detr"].updated({"eager": PASSED, "verify": VERIFIED}).outcomes) == {"eager", "verify"}


@pytest.mark.parametrize(
    "reason",
    [
        "ImportError: TimmBackbone requires the timm library but",
        "ValueError: LightGlue is not trainable, no labels should be provided.",
        "CaptureError: in module '': forward draws a number and reads it in Python, where it decides what",
        "CaptureError: in module '', loss.py:85: torch.unique(index): the shape of a result depends on a "
        "value, which depends on the parameter 'head.weight', which training changes",
    ],
)
def test_reasons_of_the_model_are_told(reason: str) -> None:
    assert model_reason(reason) is not None


@pytest.mark.parametrize(
    "reason",
    [
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied",
        "CaptureError: in module '': rows = torch.unique(x, dim=0): the shape of a result depends on a value, which",
        "CaptureError: in module 'layer': x.backward(y): Tensor.backward inside of forward would be lost by tracing",
        "ValueError: two tensors are equal, and the program has no branch for that, at module ''",
    ],
)
def test_what_another_program_could_compute_is_ours(reason: str) -> None:
    assert model_reason(reason) is None
