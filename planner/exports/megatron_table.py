"""Megatron-LM: a plan's facts as its command-line arguments.

Names and meanings are those of ``megatron/training/arguments.py`` and of the dataclasses in ``megatron.core`` that it
fills (``ModelParallelConfig``, ``TransformerConfig``, ``DistributedDataParallelConfig``).
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.exports.common_limits import (
    CHUNKED_LOSSES,
    EVERYWHERE,
    NO_EXCHANGE,
    OWN_BATCH_NORM,
    PLAIN_ENDS,
    megatron_split,
    only_if,
    orders,
)
from planner.exports.framework import Framework, LimitRow, SettingRow, at
from planner.exports.plan_facts import PlanFacts

#: Megatron's names of how keys and values reach the ranks of a context axis.
_CONTEXT_COLLECTIVES = {"all_to_all": "a2a", "all_gather": "all_gather"}
#: ZeRO stages that Megatron-FSDP divides, and its name for them.
_FSDP_SHARDS = {2: "optim_grads", 3: "optim_grads_params"}


def _layout(facts: PlanFacts) -> str | None:
    """Layers of each chunk: ``Etttt|tttt|ttttL``, in the order of chunks, which runs over the ranks round by round."""
    if facts.size("pp") == 1:
        return None
    chunks = ["t" * facts.layers_in(chunk) for chunk in facts.plan.step.chunks]
    chunks[0], chunks[-1] = "E" + chunks[0], chunks[-1] + "L"
    return "|".join(chunks)


def _context_collective(facts: PlanFacts) -> str | None:
    if facts.size("cp") == 1:
        return None
    names = [name for key, name in _CONTEXT_COLLECTIVES.items() if facts.activations_converted("cp", key)]
    return names[0] if names else None


def _gathers_again(facts: PlanFacts) -> Iterator[str]:
    """With sequence parallelism the inputs of column layers are kept in parts, and gathered again going backward."""
    if facts.sequence_parallel and facts.gathers_in_blocks and "none" in facts.layer_recompute:
        yield "recompute=none with sequence parallelism: Megatron gathers inputs of column layers again (regather)"
    if "regather" in facts.layer_recompute and not facts.sequence_parallel:
        yield "recompute=regather without sequence parallelism: there is nothing to gather again"


def _interleaved_rounds(facts: PlanFacts) -> Iterator[str]:
    ranks, m = facts.size("pp"), facts.plan.step.num_microbatches
    if facts.schedule == "interleaved_1f1b" and m % ranks:
        yield f"{m} micro-batches on {ranks} interleaved ranks: rounds of Megatron's are of {ranks} micro-batches"


MEGATRON = Framework(
    name="megatron",
    project="Megatron-LM",
    version="core_v0.16.1",
    documentation="https://docs.nvidia.com/megatron-core/developer-guide/latest/ (megatron/training/arguments.py)",
    form="shell",
    command=("torchrun", "pretrain_gpt.py"),
    splitter="megatron",
    overlaps_tensor=True,
    divides_within=(1, 2, 3),
    choices={
        "schedule": ("1f1b", "interleaved_1f1b"),
        "recompute": ("none", "regather", "full"),
        "cp": (1,),
    },
    cases=(
        {"zero": (0, 1), "recompute": ("none",), "tp": (1,)},
        {"zero": (0, 1), "recompute": ("regather", "full")},
        {"zero": (2, 3), "pp": (1,), "recompute": ("none",), "tp": (1,)},
        {"zero": (2, 3), "pp": (1,), "recompute": ("regather", "full")},
    ),
    settings=(
        SettingRow("--tensor-model-parallel-size", lambda facts: facts.size("tp"), "tp"),
        SettingRow("--pipeline-model-parallel-size", lambda facts: facts.size("pp"), "pp"),
        SettingRow("--context-parallel-size", lambda facts: facts.size("cp"), "cp"),
        SettingRow("--cp-comm-type", _context_collective, "collective of cp"),
        SettingRow("--expert-model-parallel-size", lambda facts: at(facts, "ep"), "ep"),
        SettingRow("--expert-tensor-parallel-size", lambda facts: facts.size("tp") if at(facts, "ep") else None, "tp"),
        SettingRow("--pipeline-model-parallel-layout", _layout, "cuts and chunks"),
        SettingRow("--use-tp-pp-dp-mapping", lambda facts: _is_data_outside(facts) or None, "order of the axes"),
        SettingRow("--sequence-parallel", lambda facts: facts.sequence_parallel or None, "tokens cut on tp"),
        SettingRow("--tp-comm-overlap", lambda facts: facts.overlaps_tensor or None, "layers exchange their rows"),
        SettingRow("--num-layers", lambda facts: facts.num_layers or None, "layers"),
        SettingRow("--seq-length", lambda facts: facts.seq_len, "tokens of a sample"),
        SettingRow("--max-position-embeddings", lambda facts: facts.seq_len, "tokens of a sample"),
        SettingRow("--micro-batch-size", lambda facts: facts.plan.step.local_batch, "samples of a micro-batch"),
        SettingRow("--global-batch-size", lambda facts: facts.plan.step.global_batch, "samples of a step"),
        SettingRow("--bf16", lambda facts: facts.dtype == "bfloat16" or None, "precision"),
        SettingRow("--fp16", lambda facts: facts.dtype == "float16" or None, "precision"),
        SettingRow(
            "--accumulate-allreduce-grads-in-fp32",
            lambda facts: (facts.dtype != "float32" and facts.gradient_dtype == "float32") or None,
            "dtype of gradients",
        ),
        SettingRow(
            "--grad-reduce-in-bf16", lambda facts: facts.gradient_dtype == "bfloat16" or None, "dtype of gradients"
        ),
        SettingRow("--use-distributed-optimizer", lambda facts: facts.main_zero > 0 or None, "ZeRO 1"),
        SettingRow(
            "--num-distributed-optimizer-instances",
            lambda facts: facts.num_replicas if facts.num_replicas > 1 else None,
            "groups that hold the same pieces (zero_ranks)",
        ),
        SettingRow("--use-megatron-fsdp", lambda facts: facts.main_zero in _FSDP_SHARDS or None, "ZeRO 2, 3"),
        SettingRow("--data-parallel-sharding-strategy", lambda facts: _FSDP_SHARDS.get(facts.main_zero), "ZeRO 2 or 3"),
        SettingRow("--no-gradient-accumulation-fusion", lambda facts: facts.main_zero > 1 or None, "ZeRO 2, 3"),
        SettingRow("--ckpt-format", lambda facts: "fsdp_dtensor" if facts.main_zero > 1 else None, "ZeRO 2, 3"),
        SettingRow("--overlap-grad-reduce", lambda facts: facts.samples > 1 or None, "reductions overlap"),
        SettingRow("--overlap-param-gather", lambda facts: facts.main_zero > 0 or None, "gathers overlap"),
        SettingRow("--recompute-granularity", lambda facts: _if_full(facts, "full"), "recompute"),
        SettingRow("--recompute-method", lambda facts: _if_full(facts, "uniform"), "recompute"),
        SettingRow("--recompute-num-layers", lambda facts: _if_full(facts, 1), "recompute"),
        SettingRow(
            "the model's own arguments (hidden size, heads, tokenizer, data, optimizer)",
            lambda facts: facts.plan.config_name or facts.plan.model,
            "model",
            place="script",
        ),
    ),
    limits=(
        only_if(
            "GPT models",
            lambda facts: not facts.plan.model.endswith(("ForCausalLM", "LMHeadModel")),
            "the model is no decoder of text alone (…ForCausalLM), which pretrain_gpt.py builds",
        ),
        *EVERYWHERE,
        OWN_BATCH_NORM,
        CHUNKED_LOSSES,
        LimitRow("inputs of column layers are gathered again", _gathers_again),
        LimitRow("rounds of interleaved micro-batches", _interleaved_rounds),
        only_if(
            "ZeRO 2 and 3 without a pipeline",
            lambda facts: facts.main_zero > 1 and facts.size("pp") > 1,
            "ZeRO 2 or 3 with a pipeline: Megatron-FSDP has none",
        ),
        megatron_split(vocabulary=True),
        NO_EXCHANGE,
        PLAIN_ENDS,
        orders(("pp", "dp", "cp", "tp"), ("dp", "pp", "cp", "tp")),
    ),
)


def _is_data_outside(facts: PlanFacts) -> bool:
    order = facts.order
    return "pp" in order and "dp" in order and order.index("dp") < order.index("pp")


def _if_full(facts: PlanFacts, value: str | int) -> str | int | None:
    return value if facts.exported_recompute == "full" else None
