"""A sample of what ``benchmarks.coverage`` does for every model type of transformers: diverse, small and quick."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from benchmarks.coverage.model_types import class_of
from benchmarks.coverage.stages import run_type

#: Model types that no other test has: a different kind of layer, head or input each.
VERIFIED = ("codegen", "clip")
CAPTURED = ("siglip", "data2vec-vision")


@pytest.mark.parametrize("model_type", VERIFIED)
def test_a_type_trains_on_four_devices_as_on_one(model_type: str) -> None:
    row = run_type(model_type, class_of(model_type), "verify")
    assert row["passed"] == "verify", row
    assert set(row["tolerance"].values()) == {1e-9}


@pytest.mark.parametrize("model_type", CAPTURED)
def test_a_type_is_captured(model_type: str) -> None:
    row = run_type(model_type, class_of(model_type), "capture")
    assert row["passed"] == "capture", row
