"""Experts as models write them: one operator with independent rows, trained in parallel as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
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
def test_grouped_and_gathered_experts_are_one_graph(name: str) -> None:
    grouped, gathered = (
        capture(language_model(name, experts), kwargs=tokens(2)) for experts in ("grouped_mm", "batched_mm")
    )
    assert operators(grouped) == operators(gathered)
    assert sum(op == "meshwright.expert_linear" for op, _ in operators(grouped)) >= 2
    assert not [op for op, _ in operators(grouped) if any(word in op for word in MIXING)]


def test_tokens_keep_batch_and_sequence_apart() -> None:
    graph = capture(language_model("Mixtral", "grouped_mm"), kwargs=tokens(2))
    shapes = [node.output.shape for node in graph.nodes if node.op == "meshwright.expert_linear"]
    assert all(shape[:3] == (2, 6, 2) for shape in shapes)


@pytest.mark.parametrize(
    ("name", "mesh", "fix"),
    [
        ("Mixtral", {"dp": 2, "tp": 2}, None),
        ("GptOss", {"dp": 2, "tp": 2}, None),
        ("Qwen3Moe", {"pp": 2, "dp": 2}, {"num_microbatches": 2}),
        ("DeepseekV3", {"pp": 2, "tp": 2}, {"num_microbatches": 4}),
    ],
)
def test_experts_train_as_on_one_device(name: str, mesh: dict[str, int], fix: dict[str, int] | None) -> None:
    options: dict[str, Any] = {} if fix is None else {"fix": fix}
    report = planner.verify(language_model(name, "batched_mm"), mesh, batch=tokens(8), **options)
    assert report.ok, report.table()


class Dispatched(nn.Module):
    """A hand-written layer: each token goes to the expert that scores highest, by one-hot masks and einsums."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.up, self.down = (nn.Parameter(torch.randn(4, *shape) / 3) for shape in ((8, 12), (12, 8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, expert = self.router(x).softmax(-1).max(-1)
        mask = F.one_hot(expert, 4).to(x.dtype)
        inputs = torch.einsum("bse,bsh->ebsh", mask, x)
        outputs = torch.einsum("ebsf,efh->ebsh", torch.einsum("ebsh,ehf->ebsf", inputs, self.up).relu(), self.down)
        return (outputs.sum(0) * scores.unsqueeze(-1)).square().mean()


def test_one_hot_dispatch_trains_as_on_one_device() -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 4, 8, dtype=torch.float64)}
    assert planner.verify(Dispatched().double(), {"dp": 2, "tp": 2}, batch=batch).ok


class ByHand(nn.Module):
    """Tokens sorted by expert and added up where they came from, as training libraries write it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.weight = nn.Parameter(torch.randn(4, 8, 8) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, 8)
        scores, ids = self.router(tokens).softmax(-1).topk(2)
        order = ids.flatten().argsort(stable=True)
        ends = torch.bincount(ids.flatten(), minlength=4).cumsum(0, dtype=torch.int32)
        rows = torch._grouped_mm(tokens[order // 2], self.weight.transpose(1, 2), offs=ends)
        weighted = rows * scores.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(tokens).index_add(0, order // 2, weighted).reshape(x.shape).square().mean()


def test_what_samples_are_mixed_by_is_said() -> None:
    model = language_model("Mixtral", "grouped_mm", output_router_logits=True)
    with pytest.raises(ValueError, match=r"mixes the samples of a batch.*needs .* of all samples.*load-balancing loss"):
        planner.plan(model, "a100:2", example_inputs=tokens(8), fix={"num_microbatches": 4})
