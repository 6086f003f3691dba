"""Ten plans as the configuration of every framework, read by each project's own parser where it is installed.

    python -m benchmarks.exports              # plans, exports, parses; writes benchmarks/results/exports.md
    python -m benchmarks.exports plan.json …  # the same of saved plans

torchtitan, DeepSpeed and Megatron's core are no dependency of ours: put them on the path (``pip install --no-deps
--target``), else their rows say so. Megatron's arguments are compared with the dataclasses of its core that they fill.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import planner
from passes.plan import Plan
from passes.plan.text_tables import format_seconds
from planner.exports.configuration_files import arguments, nested
from planner.exports.export_plan import FRAMEWORKS, ExportedLayout

RESULTS = Path(__file__).parent / "results" / "exports.md"
#: Model, cluster, samples of a step, tokens of a sample, and what else is asked of the plan.
PLANS: tuple[tuple[str, str, int, int, Mapping[str, Any]], ...] = (
    ("llama-3-8b", "dgx-h100:2", 64, 4096, {}),
    ("llama-3-8b", "dgx-h100:2", 64, 4096, {"fix": {"pp": 2, "schedule": "1f1b"}}),
    ("llama-3-8b", "dgx-a100-80g:2", 64, 4096, {"fix": {"pp": 4, "schedule": "interleaved_1f1b"}}),
    ("qwen3-14b", "dgx-h100:2", 64, 4096, {"fix": {"pp": 2, "schedule": "zbv"}}),
    ("qwen3-14b", "dgx-h100:1", 64, 4096, {"framework": "torchtitan"}),
    ("llama-2-13b", "dgx-a100-80g:2", 64, 4096, {"framework": "megatron"}),
    ("mistral-7b", "a10g:4", 32, 2048, {"framework": "accelerate-fsdp2"}),
    ("phi-2", "dgx-v100-32g:1", 32, 2048, {"framework": "deepspeed"}),
    ("qwen2.5-7b", "dgx-h100:1", 32, 4096, {"framework": "transformers-tp", "fix": {"tp": 4}}),
    ("qwen3-30b-a3b", "dgx-h100:2", 64, 4096, {"fix": {"ep": 8}}),
)


def read_torchtitan(exported: ExportedLayout) -> str:
    """The arguments through ``torchtitan.config.ConfigManager``."""
    from torchtitan.config.manager import ConfigManager

    settings = dict(exported.settings)
    if "--module" not in settings:
        settings = {"--module": "llama3", "--config": "llama3_8b", **settings}
    config = ConfigManager().parse_args(arguments(settings))
    for name, value in settings.items():
        if name.startswith("--") and "." in name:
            section, _, field = name.removeprefix("--").partition(".")
            negated = field.startswith("no-")
            got = getattr(getattr(config, section), field.removeprefix("no-").replace("-", "_"))
            assert got == (not value if negated else None if value == "None" else value), (
                f"{name}: {value} read as {got}"
            )
    recomputes = "activation-checkpoint:full" in settings
    assert (config.activation_checkpoint is not None) == recomputes, "activation checkpointing"
    return "every setting read back"


def read_megatron(exported: ExportedLayout) -> str:
    """Every argument is a field of the dataclasses that it fills, and the layout of stages is valid."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    from megatron.core.transformer.transformer_config import TransformerConfig

    layout = exported.settings.get("--pipeline-model-parallel-layout")
    if layout is not None:
        ranks = exported.settings["--pipeline-model-parallel-size"]
        parsed = PipelineParallelLayerLayout(layout, ranks)
        parsed.validate_layer_layout(exported.settings["--num-layers"], 0)
    kinds = (ModelParallelConfig, TransformerConfig, DistributedDataParallelConfig)
    names = {field.name for kind in kinds for field in fields(kind)}
    others = sorted(
        name for name in exported.settings if re.sub(r"^no_|^use_", "", name[2:].replace("-", "_")) not in names
    )
    return "layout and fields read" + (f"; of arguments.py alone: {', '.join(others)}" if others else "")


def read_accelerate(exported: ExportedLayout) -> str:
    """The YAML through ``accelerate launch``'s loader."""
    from accelerate.commands.config.config_args import load_config_from_file

    with tempfile.TemporaryDirectory() as folder:
        exported.save(Path(folder) / "accelerate.yaml")
        read = load_config_from_file(str(Path(folder) / "accelerate.yaml"))
    assert read.num_processes == exported.settings["num_processes"]
    return "read"


def read_deepspeed(exported: ExportedLayout) -> str:
    """The JSON through ``DeepSpeedConfig``, on one rank."""
    from deepspeed.runtime.config import DeepSpeedConfig

    settings = nested(exported.settings)
    rows = settings["train_micro_batch_size_per_gpu"] * settings["gradient_accumulation_steps"]
    config = DeepSpeedConfig({**json.loads(exported.text), "train_batch_size": rows})  # as read on one rank
    assert config.zero_optimization_stage == settings["zero_optimization"]["stage"]
    return "read"


def read_transformers(exported: ExportedLayout) -> str:
    """The JSON through ``DistributedConfig`` and ``TrainingArguments``."""
    from transformers import TrainingArguments
    from transformers.distributed import DistributedConfig

    settings = nested(exported.settings)
    config = DistributedConfig(**settings["distributed_config"])
    TrainingArguments(
        output_dir=tempfile.gettempdir(), **{**settings["training_arguments"], "bf16": False, "fp16": False}
    )
    assert config.tp_size == settings["distributed_config"]["tp_size"]
    return "read"


READERS: Mapping[str, Callable[[ExportedLayout], str]] = {
    "torchtitan": read_torchtitan,
    "megatron": read_megatron,
    "accelerate-fsdp2": read_accelerate,
    "deepspeed": read_deepspeed,
    "transformers-tp": read_transformers,
}


def planned(model: str, cluster: str, batch: int, seq_len: int, options: Mapping[str, Any]) -> Plan:
    return planner.plan(model, cluster, global_batch=batch, seq_len=seq_len, time_limit=30.0, **options)


def row(plan: Plan, framework: str) -> str:
    """One line of the table: read or not, and how many things the framework cannot express."""
    exported = plan.export(framework)
    try:
        verdict = READERS[framework](exported)
    except ImportError as error:
        verdict = f"cannot be imported ({error.name or error})"
    except Exception as error:  # parsers raise what they like
        verdict = f"refused: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    lacks = "; ".join(exported.inexpressible).replace("|", "\\|") or "—"
    return f"| {framework} | {verdict} | {lacks} |"


def section(plan: Plan, title: str) -> list[str]:
    """One plan under its title, with a row for each framework."""
    axes = ", ".join(f"{axis}={size}" for axis, size in plan.step.axes.items() if size > 1) or "one device"
    units = f"recompute {', '.join(plan.step.recompute)}; ZeRO {', '.join(map(str, plan.step.zero))}"
    batches = f"{plan.step.num_microbatches} micro-batches of {plan.step.local_batch}"
    seconds = format_seconds(plan.step.costs.simulated)
    lines = ["", f"## {title}", "", f"{axes}; {plan.step.schedule}; {batches}; {units}; {seconds} a step", ""]
    lines += ["| framework | its parser | cannot be expressed |", "|---|---|---|"]
    return [*lines, *(row(plan, framework) for framework in FRAMEWORKS)]


def main(paths: Sequence[str]) -> None:
    versions = ", ".join(framework.title for framework in FRAMEWORKS.values())
    lines = [
        "# Plans in other frameworks' words",
        "",
        f"Written by `python -m benchmarks.exports`; tables of {versions}.",
    ]
    for path in paths:
        plan = Plan.load(path)
        searched = [note for note in plan.notes if note.startswith("searched among")]
        lines += section(
            plan, f"{plan.config_name} on {plan.cluster['name']}" + (f", {searched[0]}" if searched else "")
        )
    for model, cluster, batch, seq_len, options in () if paths else PLANS:
        title = f"{model} on {cluster}, {batch} × {seq_len} tokens, {dict(options) or 'searched freely'}"
        try:
            lines += section(planned(model, cluster, batch, seq_len, options), title)
        except ValueError as error:
            lines += ["", f"## {title}", "", f"no plan: {error}"]
        RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
