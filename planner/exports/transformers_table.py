"""transformers: a plan's facts as ``DistributedConfig`` (its ``tp_plan``) and ``TrainingArguments``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from planner.exports.common_limits import CHUNKED_LOSSES, EVERYWHERE, HEADS_ALIKE, NO_EXCHANGE, SYNC_BATCH_NORM, only_if
from planner.exports.framework import Framework, LimitRow, SettingRow, at
from planner.exports.plan_facts import PlanFacts, TensorLayer

#: Roles → styles of ``transformers.distributed.tensor_parallel``.
STYLES: Mapping[str, str] = {
    "column": "colwise",
    "row": "rowwise",
    "vocabulary": "embedding_rowwise",
    "hidden": "embedding_colwise",
    "whole": "replicate",
    "tokens": "replicate",
    "other": "replicate",
}


def _style(layer: TensorLayer) -> str:
    if layer.role == "column" and (layer.is_head or layer.gathered):
        return "colwise_gather_output"
    if layer.takes_whole:
        return "rowwise_split_input"
    return STYLES[layer.role]


def _styles(facts: PlanFacts) -> dict[str, str] | None:
    if facts.size("tp") == 1:
        return None
    return {layer.pattern: _style(layer) for layer in facts.tensor_layers}


def _gathered_logits(facts: PlanFacts) -> Iterator[str]:
    for layer in facts.tensor_layers:
        if layer.is_head and layer.role == "column" and not layer.gathered:
            yield f"tp: the loss is computed on the cut vocabulary, the output of {layer.pattern} is gathered there"
        elif layer.role in ("tokens", "other"):
            yield f"tp: {layer.pattern} is whole and its tokens are cut: it computes all tokens there"


def _transposed(facts: PlanFacts) -> Iterator[str]:
    """Cut layers that are no ``nn.Linear``: transformers raises where it is to split one."""
    for layer in {layer.pattern: layer for layer in facts.tensor_layers}.values():
        if layer.is_transposed and layer.role in ("column", "row"):
            yield f"tp: {layer.pattern} keeps its matrix transposed (Conv1D): linear layers alone are cut there"


TRANSFORMERS_TP = Framework(
    name="transformers-tp",
    project="transformers",
    version="5.23.0",
    documentation="https://huggingface.co/docs/transformers/v5.23.0/en/perf_infer_gpu_multi",
    form="json",
    splitter="transformers",
    choices={"pp": (1,), "ep": (1,), "cp": (1,), "recompute": ("none", "full"), "zero": (0, 3)},
    settings=(
        SettingRow("distributed_config.tp_size", lambda facts: facts.size("tp"), "tp"),
        SettingRow("distributed_config.tp_plan", _styles, "tp by layer"),
        SettingRow(
            "distributed_config.fsdp_size", lambda facts: facts.size("dp") if facts.main_zero == 3 else 1, "ZeRO 3"
        ),
        SettingRow(
            "distributed_config.dp_replicate_size",
            lambda facts: facts.size("dp") if facts.main_zero != 3 else 1,
            "dp, ZeRO 0",
        ),
        SettingRow(
            "training_arguments.per_device_train_batch_size", lambda facts: facts.plan.step.local_batch, "micro-batch"
        ),
        SettingRow(
            "training_arguments.gradient_accumulation_steps",
            lambda facts: facts.plan.step.num_microbatches,
            "micro-batches",
        ),
        SettingRow(
            "training_arguments.gradient_checkpointing", lambda facts: facts.exported_recompute == "full", "recompute"
        ),
        SettingRow("training_arguments.bf16", lambda facts: facts.dtype == "bfloat16" or None, "precision"),
        SettingRow("training_arguments.fp16", lambda facts: facts.dtype == "float16" or None, "precision"),
        SettingRow(
            "distributed_config.fsdp_mixed_precision",
            lambda facts: True if facts.dtype != facts.gradient_dtype and at(facts, "dp") else None,
            "masters",
        ),
        SYNC_BATCH_NORM,
    ),
    limits=(
        *EVERYWHERE,
        CHUNKED_LOSSES,
        only_if(
            "tokens whole on tp",
            lambda facts: facts.sequence_parallel,
            "tp: tokens are cut between layers (sequence parallelism), which is not wired up there",
        ),
        LimitRow("gathered logits", _gathered_logits),
        LimitRow("linear layers alone are cut", _transposed),
        HEADS_ALIKE,
        NO_EXCHANGE,
    ),
)
