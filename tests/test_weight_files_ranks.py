"""Weight files on four processes: no rank reads or holds more than its part; Hugging Face's models in and out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.ranks import run_on_ranks

MESHES = ("tp=4", "dp=2,tp=2")
#: What allocators and the reading itself take beside tensors: less than a second block of a checkpoint's file.
SLACK = 3 * 2**20


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("weights")
    yield run_on_ranks("weight_files_worker", 4, {"folder": str(folder), "meshes": MESHES})


@pytest.mark.parametrize("mesh", MESHES)
def test_a_rank_reads_and_holds_its_part(ran: Any, mesh: str) -> None:
    for rank in ran[mesh]:
        assert rank["shards"] > 2 * SLACK
        assert rank["read"] <= 1.05 * rank["shards"] and rank["said"] <= rank["read"]
        assert rank["held by loading"] <= rank["shards"] + rank["largest"] + SLACK
        assert rank["held by saving"] <= rank["largest"] + SLACK
        assert rank["held by a checkpoint"] <= rank["largest"] + SLACK
        assert rank["held by resuming"] <= rank["shards"] + rank["largest"] + SLACK
        assert rank["same"]


@pytest.mark.parametrize(
    "model", ["LlamaForCausalLM", "GPT2LMHeadModel", "T5ForConditionalGeneration", "ViTForImageClassification"]
)
def test_hugging_face_models_come_in_and_go_out(ran: Any, model: str) -> None:
    assert all(rank[model] for rank in ran["hugging face"])


def test_base_models_and_models_with_heads_share_files(ran: Any) -> None:
    assert all(ran["base models"])
