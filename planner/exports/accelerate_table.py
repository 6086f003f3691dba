"""Accelerate with FSDP2: a plan's facts as the YAML that ``accelerate launch --config_file`` reads."""

from __future__ import annotations

from cost_models import Cluster
from planner.exports.common_limits import CHUNKED_LOSSES, EVERYWHERE, SYNC_BATCH_NORM, only_if
from planner.exports.framework import Framework, SettingRow
from planner.exports.plan_facts import PlanFacts

_MIXED = {"bfloat16": "bf16", "float16": "fp16"}


def _num_machines(facts: PlanFacts) -> int:
    """Nodes that have the plan's devices."""
    if not facts.plan.cluster.get("levels"):
        return 1  # a plan made for prices that are not a cluster's
    return -(-facts.plan.step.num_devices // Cluster.from_dict(facts.plan.cluster).devices_per_node)


ACCELERATE_FSDP2 = Framework(
    name="accelerate-fsdp2",
    project="Accelerate",
    version="1.15.0",
    documentation="https://huggingface.co/docs/accelerate/v1.15.0/en/usage_guides/fsdp",
    form="yaml",
    divides_within=(2, 3),
    command=("accelerate", "launch", "--config_file"),
    choices={"pp": (1,), "ep": (1,), "cp": (1,), "tp": (1,), "recompute": ("none", "full"), "zero": (2, 3)},
    settings=(
        SettingRow("compute_environment", lambda facts: "LOCAL_MACHINE", "launcher"),
        SettingRow("distributed_type", lambda facts: "FSDP", "dp"),
        SettingRow("num_machines", _num_machines, "nodes"),
        SettingRow("num_processes", lambda facts: facts.plan.step.num_devices, "devices"),
        SettingRow("mixed_precision", lambda facts: _MIXED.get(facts.dtype, "no"), "precision"),
        SettingRow("fsdp_config.fsdp_version", lambda facts: 2, "ZeRO"),
        SettingRow("fsdp_config.fsdp_reshard_after_forward", lambda facts: facts.main_zero == 3, "ZeRO 3, or 2"),
        SettingRow(
            "parallelism_config.parallelism_config_dp_replicate_size",
            lambda facts: facts.num_replicas if facts.num_replicas > 1 else None,
            "groups that hold the same pieces",
        ),
        SettingRow(
            "parallelism_config.parallelism_config_dp_shard_size",
            lambda facts: facts.plan.step.zero_ranks or None,
            "zero_ranks",
        ),
        SettingRow("fsdp_config.fsdp_auto_wrap_policy", lambda facts: "TRANSFORMER_BASED_WRAP", "units"),
        SettingRow(
            "fsdp_config.fsdp_activation_checkpointing", lambda facts: facts.exported_recompute == "full", "recompute"
        ),
        SettingRow("fsdp_config.fsdp_offload_params", lambda facts: False, "nothing is offloaded"),
        SettingRow("fsdp_config.fsdp_state_dict_type", lambda facts: "SHARDED_STATE_DICT", "checkpoints"),
        SettingRow(
            "DataLoader(batch_size=…)", lambda facts: facts.plan.step.local_batch, "samples of a micro-batch", "script"
        ),
        SettingRow(
            "Accelerator(gradient_accumulation_steps=…)",
            lambda facts: facts.plan.step.num_microbatches,
            "micro-batches",
            "script",
        ),
        SettingRow("from_pretrained(dtype=…)", lambda facts: "float32", "masters", "script"),
        SYNC_BATCH_NORM,
    ),
    limits=(
        *EVERYWHERE,
        CHUNKED_LOSSES,
        only_if(
            "several ranks", lambda facts: facts.zero == (0,) and facts.size("dp") == 1, "one rank has nothing to shard"
        ),
    ),
)
