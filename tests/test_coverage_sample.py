"""A sample of what ``benchmarks.coverage`` does for every model type of transformers: 35, diverse, small and quick."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from benchmarks.coverage.model_types import class_of
from benchmarks.coverage.stages import run_stages

#: By what they are made of; types of the library are captured in ``test_library``.
CAPTURED = {
    "text": "albert big_bird biogpt esm fnet mpnet mpt mra nystromformer roformer xglm",
    "encoder and decoder": "bart",
    "layout": "layoutlm markuplm tapas",
    "vision": "beit convnext data2vec-vision dinov2 imagegpt segformer videomae vivit",
    "sound": "audio-spectrogram-transformer wav2vec2",
    "text and vision": "owlvit trocr",
    "convolutions and attention": "lfm2",
    "read values": "yolos",
}
PLANNED = ("codegen", "vit_msn", "siglip", "olmoe", "mixtral")
VERIFIED = ("clip",)


@pytest.mark.parametrize("model_type", [name for names in CAPTURED.values() for name in names.split()])
def test_a_type_is_captured(model_type: str) -> None:
    row = run_stages(model_type, class_of(model_type), ("build", "eager", "capture"))
    assert row["passed"] == "capture", row


@pytest.mark.parametrize("model_type", PLANNED)
def test_a_type_is_planned(model_type: str) -> None:
    row = run_stages(model_type, class_of(model_type), ("build", "eager", "plan"))
    assert row["passed"] == "plan", row


@pytest.mark.parametrize("model_type", VERIFIED)
def test_a_type_trains_on_four_devices_as_on_one(model_type: str) -> None:
    row = run_stages(model_type, class_of(model_type), ("build", "eager", "verify"))
    assert row["passed"] == "verify", row
    assert set(row["tolerance"].values()) == {1e-9}
