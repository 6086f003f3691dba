"""Experts as models write them: one operator with independent rows, trained in parallel as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import planner
from passes.capture import capture
from passes.ir.graph import Graph

#: Operators that put rows in an order that depends on all samples.
MIXING = ("sort", "histc", "grouped_mm", "index_put", "bincount")
SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 24, "num_experts_per_tok": 2,
}  # fmt: skip
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "GptOss": {"num_local_experts": 4, "head_dim": 4},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 12, "head_dim": 4},
    "DeepseekV3": {
        **_LATENT, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
        "moe_intermediate_size": 12, "num_key_value_heads": 4,
    },
}  # fmt: skip


def language_model(name: str, experts: str, **options: Any) -> nn.Module:
    """A tiny model of transformers with its experts as ``grouped_mm`` or ``batched_mm``."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **MODELS[name], **options})
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    model.set_experts_implementation(experts)  # type: ignore[operator]
    return model.double().train()


def tokens(batch_size: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 32, (batch_size, 6), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def operators(graph: Graph) -> list[tuple[str, str]]:
    return [(node.op, node.module_path) for node in graph.nodes if not node.constant]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
def test_experts_are_captured_as_rows_that_stay_in_place(name: str, experts: str) -> None:
    names = [op for op, _ in operators(capture(language_model(name, experts), kwargs=tokens(2)))]
    assert names.count("meshwright.expert_linear") >= 2
    assert not [op for op in names if any(word in op for word in MIXING)]


def test_tokens_keep_batch_and_sequence_apart() -> None:
    graph = capture(language_model("Mixtral", "grouped_mm"), kwargs=tokens(2))
    shapes = [node.output.shape for node in graph.nodes if node.op == "meshwright.expert_linear"]
    assert all(shape[:3] == (2, 6, 2) for shape in shapes)


def test_a_load_balancing_loss_is_that_of_the_global_batch() -> None:
    model = language_model("Mixtral", "batched_mm", output_router_logits=True)
    report = planner.verify(model, {"dp": 2, "tp": 2}, batch=tokens(8))
    assert report.ok, report.table()


@pytest.mark.parametrize(
    ("name", "mesh", "fix"),
    [
        ("Mixtral", {"dp": 2, "tp": 2}, None),
        ("GptOss", {"dp": 2, "tp": 2}, None),
        ("Qwen3Moe", {"pp": 2, "dp": 2}, {"num_microbatches": 2}),
    ],
)
def test_experts_train_as_on_one_device(name: str, mesh: dict[str, int], fix: dict[str, int] | None) -> None:
    options: dict[str, Any] = {} if fix is None else {"fix": fix}
    report = planner.verify(language_model(name, "batched_mm"), mesh, batch=tokens(8), **options)
    assert report.ok, report.table()
