"""A sample of what ``benchmarks.coverage`` does for every model type of transformers: 40, diverse, small and quick.

Each goes through one stage, of which there are enough types of several kinds; those that are verified are of the
quickest to verify in ``benchmarks/results/coverage.jsonl``.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from benchmarks.coverage.model_types import class_of
from benchmarks.coverage.stages import run_stages

#: By what they are made of; types of the library are captured in ``test_library``.
CAPTURED = {
    "text": "big_bird biogpt esm fnet gemma3_text internlm3 modernbert mpnet mpt mra nystromformer roformer xglm",
    "encoder and decoder": "bart",
    "layout": "layoutlm markuplm tapas",
    "vision": "beit convnext data2vec-vision dinov2 imagegpt segformer pvt videomae vivit",
    "sound": "wav2vec2",
    "text and vision": "owlvit",
    "convolutions and attention": "lfm2",
    "read values": "detr yolos",
}
PLANNED = ("codegen", "siglip", "olmoe", "mixtral", "vit_msn")
VERIFIED = ("albert", "audio-spectrogram-transformer", "clip", "trocr")


def facts_of(model_type: str, stage: str) -> dict[str, Any]:
    """What is known of the stage, which the type has to pass."""
    if model_type not in CONFIG_MAPPING_NAMES:
        pytest.skip("an older transformers, which does not have the type")
    outcomes = run_stages(model_type, class_of(model_type), (stage,), commit="")
    assert not any("reason" in outcome for outcome in outcomes.values()), outcomes
    facts: dict[str, Any] = outcomes[stage]["facts"]
    return facts


@pytest.mark.parametrize("model_type", [name for names in CAPTURED.values() for name in names.split()])
def test_a_type_is_captured(model_type: str) -> None:
    assert facts_of(model_type, "capture")["nodes"] > 0


@pytest.mark.parametrize("model_type", PLANNED)
def test_a_type_is_planned(model_type: str) -> None:
    assert facts_of(model_type, "plan")["share_without_rule"] < 1


@pytest.mark.parametrize("model_type", VERIFIED)
def test_a_type_trains_on_four_devices_as_on_one(model_type: str) -> None:
    assert facts_of(model_type, "verify")["tolerance"] == 1e-9
