"""DeepSpeed: a plan's facts as its JSON configuration, for ``deepspeed.initialize`` and ``Trainer(deepspeed=…)``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from planner.exports.common_limits import CHUNKED_LOSSES, EVERYWHERE, HEADS_ALIKE, NO_EXCHANGE, SYNC_BATCH_NORM, only_if
from planner.exports.framework import Framework, LimitRow, SettingRow, at
from planner.exports.plan_facts import PlanFacts

_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def _layer_specs(facts: PlanFacts) -> list[dict[str, Any]] | None:
    """Rules of AutoTP: which matrices are cut into columns and which into rows."""
    if facts.size("tp") == 1:
        return None
    specs = []
    for role in ("column", "row"):
        modules = {layer.pattern for layer in facts.tensor_layers if layer.role == role and not layer.is_head}
        if modules:
            specs.append({"patterns": [_path_pattern(module) for module in sorted(modules)], "partition_type": role})
    return specs


def _path_pattern(module: str) -> str:
    """A regular expression of the weights of all modules that a path with ``*`` for numbers stands for."""
    return ".*" + r"\.".join("[0-9]+" if part == "*" else re.escape(part) for part in module.split(".")) + r"\.weight$"


def _whole_between(facts: PlanFacts) -> Iterator[str]:
    """Layers that give or take all features of a token: AutoTP gathers and splits nothing between layers."""
    for layer in {layer.pattern: layer for layer in facts.tensor_layers if not layer.is_head}.values():
        if layer.role == "column" and layer.gathered:
            yield f"tp: the output of {layer.pattern} is gathered, which AutoTP leaves cut"
        elif layer.takes_whole:
            yield f"tp: {layer.pattern} takes its part of a whole input, AutoTP's row layers take one that is cut"


def _mics_ranks(facts: PlanFacts) -> int | None:
    """The ranks that hold all pieces together, of ZeRO 3 alone."""
    return facts.plan.step.zero_ranks or None if facts.main_zero == 3 else None


DEEPSPEED = Framework(
    name="deepspeed",
    project="DeepSpeed",
    version="0.19.8",
    documentation="https://www.deepspeed.ai/docs/config-json/",
    form="json",
    splitter="deepspeed",
    divides_within=(3,),
    choices={"pp": (1,), "ep": (1,), "cp": (1,), "recompute": ("none", "full")},
    cases=({"zero": (0, 1, 2)}, {"zero": (3,), "tp": (1,)}),
    settings=(
        SettingRow("train_batch_size", lambda facts: facts.plan.step.global_batch, "samples of a step"),
        SettingRow("train_micro_batch_size_per_gpu", lambda facts: facts.plan.step.local_batch, "micro-batch"),
        SettingRow("gradient_accumulation_steps", lambda facts: facts.plan.step.num_microbatches, "micro-batches"),
        SettingRow("zero_optimization.stage", lambda facts: facts.main_zero, "ZeRO"),
        SettingRow("zero_optimization.mics_shard_size", _mics_ranks, "zero_ranks (MiCS)"),
        SettingRow("zero_optimization.overlap_comm", lambda facts: facts.samples > 1 or None, "reductions overlap"),
        SettingRow("zero_optimization.contiguous_gradients", lambda facts: facts.main_zero > 0 or None, "ZeRO"),
        SettingRow("bf16.enabled", lambda facts: facts.dtype == "bfloat16" or None, "precision"),
        SettingRow("fp16.enabled", lambda facts: facts.dtype == "float16" or None, "precision"),
        SettingRow("data_types.grad_accum_dtype", lambda facts: _SHORT.get(facts.gradient_dtype), "dtype of gradients"),
        SettingRow("communication_data_type", lambda facts: _SHORT.get(facts.gradient_dtype), "dtype of gradients"),
        SettingRow("tensor_parallel.autotp_size", lambda facts: at(facts, "tp"), "tp"),
        SettingRow(
            "tensor_parallel.partition_config.use_default_specs",
            lambda facts: False if facts.size("tp") > 1 else None,
            "tp by layer",
        ),
        SettingRow("tensor_parallel.partition_config.layer_specs", _layer_specs, "tp by layer"),
        SettingRow(
            "model made under deepspeed.zero.MiCS_Init(config_dict_or_path=FILE)",
            lambda facts: _mics_ranks(facts) and True,
            "zero_ranks (MiCS)",
            "script",
        ),
        SettingRow(
            "model.gradient_checkpointing_enable()",
            lambda facts: True if facts.exported_recompute == "full" else None,
            "recompute",
            "script",
        ),
        SYNC_BATCH_NORM,
    ),
    limits=(
        *EVERYWHERE,
        CHUNKED_LOSSES,
        only_if(
            "tokens whole on tp",
            lambda facts: facts.sequence_parallel,
            "tp: tokens are cut between layers (sequence parallelism), AutoTP keeps them whole",
        ),
        only_if(
            "ZeRO 3 without tp",
            lambda facts: facts.main_zero == 3 and facts.size("tp") > 1,
            "ZeRO 3 with tp: parameters are gathered whole there",
        ),
        only_if(
            "vocabulary whole on tp",
            lambda facts: any(layer.role in ("vocabulary", "hidden") for layer in facts.tensor_layers),
            "tp: the embedding is cut, AutoTP's layer_specs are of linear layers",
        ),
        only_if(
            "head whole on tp",
            lambda facts: any(layer.is_head and layer.role != "whole" for layer in facts.tensor_layers),
            "tp: the layer of the logits is cut, its layer_specs keep it whole",
        ),
        LimitRow("features stay cut between column and row layers", _whole_between),
        HEADS_ALIKE,
        NO_EXCHANGE,
    ),
)
