"""Models and plans that ``benchmarks.accuracy`` runs: few devices, every way of using them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: transformers' config class and its fields, by model; all others as they come.
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "LlamaConfig",
        {
            "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 4, "vocab_size": 2048, "max_position_embeddings": 512,
        },
    ),
    "mixtral": (
        "MixtralConfig",
        {
            "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 4, "vocab_size": 2048, "max_position_embeddings": 512, "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
}  # fmt: skip
BATCH, TOKENS = 8, 128
_PIPELINE = {"pp": 2, "num_microbatches": 4}
_WHOLE = {"num_microbatches": 1, "recompute": "none"}


@dataclass(frozen=True)
class AccuracyCase:
    """One plan to run: the model, and what of the plan is fixed; nothing fixed is the planner's own choice."""

    name: str
    model: str
    fix: Mapping[str, Any] | None


CASES = (
    AccuracyCase("llama, planner's choice", "llama", None),
    AccuracyCase("llama dp2", "llama", {"dp": 2, "zero": 0, "num_microbatches": 1, "recompute": "none"}),
    AccuracyCase(
        "llama dp2, 2 micro-batches", "llama", {"dp": 2, "zero": 0, "num_microbatches": 2, "recompute": "none"}
    ),
    AccuracyCase("llama dp2, ZeRO 1", "llama", {"dp": 2, "zero": 1, "num_microbatches": 1, "recompute": "none"}),
    AccuracyCase("llama dp2, ZeRO 3", "llama", {"dp": 2, "zero": 3, "num_microbatches": 1, "recompute": "none"}),
    AccuracyCase("llama dp2, recomputed", "llama", {"dp": 2, "zero": 0, "num_microbatches": 1, "recompute": "full"}),
    AccuracyCase("llama tp2", "llama", {"tp": 2, "num_microbatches": 1, "recompute": "none"}),
    AccuracyCase("llama tp2, recomputed", "llama", {"tp": 2, "num_microbatches": 1, "recompute": "full"}),
    AccuracyCase("llama cp2", "llama", {"cp": 2, "zero": 0, "num_microbatches": 1, "recompute": "none"}),
    AccuracyCase("llama pp2, 1F1B", "llama", {**_PIPELINE, "schedule": "1f1b", "recompute": "none"}),
    AccuracyCase("llama pp2, GPipe", "llama", {**_PIPELINE, "schedule": "gpipe", "recompute": "none"}),
    AccuracyCase("llama pp2, ZB-H1", "llama", {**_PIPELINE, "schedule": "zb_h1", "recompute": "none"}),
    AccuracyCase("mixtral, planner's choice", "mixtral", None),
    AccuracyCase("mixtral dp2", "mixtral", {"dp": 2, "ep": 1, "zero": 0, "num_microbatches": 1, "recompute": "none"}),
    AccuracyCase("mixtral ep2", "mixtral", {"ep": 2, "zero": 0, "num_microbatches": 1, "recompute": "none"}),
    AccuracyCase("mixtral tp2", "mixtral", {"tp": 2, "num_microbatches": 1, "recompute": "none"}),
)

_CHUNKED = {"num_microbatches": 4, "recompute": "none"}
#: On two hosts of two ranks each; axes from the outer to the inner: pp, dp, cp, tp.
HOST_CASES = (
    AccuracyCase("llama, planner's choice", "llama", None),
    AccuracyCase("llama dp4", "llama", {"dp": 4, "zero": 0, **_WHOLE}),
    AccuracyCase(
        "llama dp4, 2 micro-batches", "llama", {"dp": 4, "zero": 0, "num_microbatches": 2, "recompute": "none"}
    ),
    AccuracyCase("llama dp4, ZeRO 1", "llama", {"dp": 4, "zero": 1, **_WHOLE}),
    AccuracyCase("llama dp4, ZeRO 3", "llama", {"dp": 4, "zero": 3, **_WHOLE}),
    AccuracyCase("llama dp4, recomputed", "llama", {"dp": 4, "zero": 0, "num_microbatches": 1, "recompute": "full"}),
    AccuracyCase("llama dp2 tp2", "llama", {"dp": 2, "tp": 2, "zero": 0, **_WHOLE}),
    AccuracyCase("llama dp2 tp2, ZeRO 3", "llama", {"dp": 2, "tp": 2, "zero": 3, **_WHOLE}),
    AccuracyCase("llama tp4", "llama", {"tp": 4, **_WHOLE}),
    AccuracyCase("llama dp2 cp2", "llama", {"dp": 2, "cp": 2, "zero": 0, **_WHOLE}),
    AccuracyCase("llama pp2 dp2, 1F1B", "llama", {"pp": 2, "dp": 2, "zero": 0, "schedule": "1f1b", **_CHUNKED}),
    AccuracyCase("llama pp2 dp2, ZB-H1", "llama", {"pp": 2, "dp": 2, "zero": 0, "schedule": "zb_h1", **_CHUNKED}),
    AccuracyCase("llama pp2 tp2, 1F1B", "llama", {"pp": 2, "tp": 2, "schedule": "1f1b", **_CHUNKED}),
    AccuracyCase("llama pp4, 1F1B", "llama", {"pp": 4, "schedule": "1f1b", **_CHUNKED}),
    AccuracyCase("mixtral, planner's choice", "mixtral", None),
    AccuracyCase("mixtral dp4", "mixtral", {"dp": 4, "ep": 1, "zero": 0, **_WHOLE}),
    AccuracyCase("mixtral dp2 ep2", "mixtral", {"dp": 2, "ep": 2, "zero": 0, **_WHOLE}),
    AccuracyCase("mixtral ep4", "mixtral", {"dp": 1, "ep": 4, "zero": 0, **_WHOLE}),
    AccuracyCase("mixtral dp4, ZeRO 3", "mixtral", {"dp": 4, "ep": 1, "zero": 3, **_WHOLE}),
    AccuracyCase("mixtral dp2 tp2", "mixtral", {"dp": 2, "tp": 2, "ep": 1, "zero": 0, **_WHOLE}),
    AccuracyCase("mixtral pp2 dp2", "mixtral", {"pp": 2, "dp": 2, "ep": 1, "zero": 0, "schedule": "1f1b", **_CHUNKED}),
    AccuracyCase("mixtral pp2 ep2", "mixtral", {"pp": 2, "dp": 1, "ep": 2, "zero": 0, "schedule": "1f1b", **_CHUNKED}),
    AccuracyCase("mixtral pp2 tp2", "mixtral", {"pp": 2, "tp": 2, "ep": 1, "schedule": "1f1b", **_CHUNKED}),
    AccuracyCase("mixtral pp4", "mixtral", {"pp": 4, "schedule": "1f1b", **_CHUNKED}),
)
