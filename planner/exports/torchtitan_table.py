"""torchtitan: a plan's facts as arguments of ``torchtitan.train``.

Names are the fields of ``torchtitan/config/configs.py``; whatever it has no configuration of takes ``--module`` and
``--config`` of the user's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from passes.plan.step_plan import CHUNKED_LOSS
from planner.exports.common_limits import (
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

#: Names in the config library → (--module, --config).
MODELS: Mapping[str, tuple[str, str]] = {
    "llama-3-8b": ("llama3", "llama3_8b"),
    "llama-3.1-8b": ("llama3", "llama3_8b"),
    "llama-3-70b": ("llama3", "llama3_70b"),
    "llama-3.1-70b": ("llama3", "llama3_70b"),
    "llama-3.1-405b": ("llama3", "llama3_405b"),
    "qwen3-0.6b": ("qwen3", "qwen3_0_6b"),
    "qwen3-1.7b": ("qwen3", "qwen3_1_7b"),
    "qwen3-14b": ("qwen3", "qwen3_14b"),
    "qwen3-32b": ("qwen3", "qwen3_32b"),
    "qwen3-30b-a3b": ("qwen3", "qwen3_30b_a3b"),
    "deepseek-v3": ("deepseek_v3", "deepseek_v3_671b"),
    "gpt-oss-20b": ("gpt_oss", "gpt_oss_20b"),
    "gpt-oss-120b": ("gpt_oss", "gpt_oss_120b"),
}
#: Names of schedules, those of ``torch.distributed.pipelining``.
SCHEDULES: Mapping[str, str] = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "zb_h1": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
_RESHARD = {2: "never", 3: "always"}


def _parts(facts: PlanFacts) -> list[list[str]] | None:
    """Modules of each chunk by torchtitan's names."""
    if facts.size("pp") == 1:
        return None
    parts, first = [], 0
    for chunk in facts.plan.step.chunks:
        count = facts.layers_in(chunk)
        parts.append([f"layers.{layer}" for layer in range(first, first + count)])
        first += count
    return [["tok_embeddings", *parts[0]], *parts[1:-1], [*parts[-1], "norm", "lm_head"]]


def _context(facts: PlanFacts) -> Iterator[str]:
    if facts.activations_converted("cp", "all_to_all"):
        yield "cp: heads are exchanged for tokens (all-to-all): torchtitan gathers keys and values"


TORCHTITAN = Framework(
    name="torchtitan",
    project="torchtitan",
    version="0.3.0",
    documentation="https://github.com/pytorch/torchtitan/blob/v0.3.0/torchtitan/config/configs.py",
    form="shell",
    command=("torchrun", "-m", "torchtitan.train"),
    splitter="megatron",
    overlaps_tensor=True,
    divides_within=(2, 3),
    choices={
        "schedule": tuple(SCHEDULES),
        "recompute": ("none", "full"),
        "zero": (0, 2, 3),
        "cp": (1,),
    },
    settings=(
        SettingRow("--module", lambda facts: MODELS.get(facts.plan.config_name, (None, None))[0], "model"),
        SettingRow("--config", lambda facts: MODELS.get(facts.plan.config_name, (None, None))[1], "model"),
        SettingRow(
            "--parallelism.data_parallel_replicate_degree",
            lambda facts: facts.samples if facts.main_zero == 0 else facts.num_replicas,
            "dp × ep, ZeRO 0; groups that hold the same pieces",
        ),
        SettingRow(
            "--parallelism.data_parallel_shard_degree",
            lambda facts: facts.samples // facts.num_replicas if facts.main_zero else 1,
            "dp × ep, ZeRO 2 and 3; zero_ranks",
        ),
        SettingRow(
            "--parallelism.fsdp_reshard_after_forward", lambda facts: _RESHARD.get(facts.main_zero), "ZeRO 2 or 3"
        ),
        SettingRow("--parallelism.tensor_parallel_degree", lambda facts: facts.size("tp"), "tp"),
        SettingRow(
            "--parallelism.no-enable-sequence-parallel",
            lambda facts: True if facts.size("tp") > 1 and not facts.sequence_parallel else None,
            "tokens whole on tp",
        ),
        SettingRow(
            "--parallelism.enable_async_tensor_parallel",
            lambda facts: facts.overlaps_tensor or None,
            "layers exchange their rows",
        ),
        SettingRow("--parallelism.context_parallel_degree", lambda facts: facts.size("cp"), "cp"),
        SettingRow(
            "--parallelism.context_parallel_load_balancer",
            lambda facts: "None" if facts.size("cp") > 1 else None,
            "tokens of cp in order",
        ),
        SettingRow("--parallelism.expert_parallel_degree", lambda facts: at(facts, "ep"), "ep"),
        SettingRow("--parallelism.pipeline_parallel_degree", lambda facts: facts.size("pp"), "pp"),
        SettingRow(
            "--parallelism.pipeline_parallel_schedule",
            lambda facts: SCHEDULES.get(facts.schedule) if at(facts, "pp") else None,
            "schedule",
        ),
        SettingRow(
            "--parallelism.pipeline_parallel_microbatch_size",
            lambda facts: facts.plan.step.local_batch if at(facts, "pp") else None,
            "samples of a micro-batch",
        ),
        SettingRow("--parallelism.module_fqns_per_model_part", _parts, "cuts"),
        SettingRow(
            "--training.local_batch_size",
            lambda facts: facts.plan.step.local_batch * (facts.plan.step.num_microbatches if at(facts, "pp") else 1),
            "samples of a rank at a time",
        ),
        SettingRow("--training.global_batch_size", lambda facts: facts.plan.step.global_batch, "samples of a step"),
        SettingRow("--training.seq_len", lambda facts: facts.seq_len, "tokens of a sample"),
        SettingRow("--training.mixed_precision_param", lambda facts: facts.dtype, "precision"),
        SettingRow("--training.mixed_precision_reduce", lambda facts: "float32", "dtype of gradients"),
        SettingRow(
            "--training.disable_cuda_graphs",
            lambda facts: True if facts.size("pp") > 1 or facts.size("ep") > 1 else None,
            "CUDA graphs are for neither pipelines nor exchanged tokens",
        ),
        SettingRow("--compile.enable", lambda facts: facts.plan.step.compiled or None, "compiled kernels"),
        SettingRow(
            "activation-checkpoint:full",
            lambda facts: True if facts.exported_recompute == "full" else None,
            "recompute",
        ),
        SettingRow(
            "activation-checkpoint:None",
            lambda facts: True if facts.exported_recompute != "full" else None,
            "recompute",
        ),
        SettingRow(
            "--module and --config of the model, of which torchtitan has none",
            lambda facts: None if facts.plan.config_name in MODELS else facts.plan.config_name or facts.plan.model,
            "model",
            place="script",
        ),
    ),
    limits=(
        *EVERYWHERE,
        OWN_BATCH_NORM,
        only_if(
            "parameters in 16 bits or 32",
            lambda facts: facts.dtype not in ("bfloat16", "float32"),
            "parameters are computed in neither bfloat16 nor float32",
        ),
        only_if(
            "gradients in float32",
            lambda facts: facts.gradient_dtype != "float32",
            "gradients are reduced in float32 there",
        ),
        only_if(
            "losses in chunks by default",
            lambda facts: CHUNKED_LOSS in facts.end_recompute and facts.size("pp") > 1,
            "recompute=chunked_loss with a pipeline: the loss is computed at once there",
        ),
        LimitRow("keys and values are gathered on cp", _context),
        megatron_split(vocabulary=True),
        NO_EXCHANGE,
        PLAIN_ENDS,
        orders(("pp", "dp", "cp", "tp")),
    ),
)
