"""One rank of the tests of exports: a model trains in the framework, with the exported settings, and under the plan."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import planner
from planner.library import load_config
from planner.verification.verify_model import real_module
from tests.ranks import answer, task
from tests.tracing import traced_once

STEPS, LEARNING_RATE = 3, 0.1
Batch = Mapping[str, torch.Tensor]


def main() -> None:
    losses = {}
    for case in task():
        config = load_config(case["model"])
        model = real_module(config, dtype=torch.float32, seed=0)
        generator = torch.Generator().manual_seed(0)
        tokens = [torch.randint(config.vocab_size, (8, 12), generator=generator) for _ in range(STEPS)]
        batches = [{"input_ids": ids, "labels": ids} for ids in tokens]  # as many labels on every rank
        theirs = FRAMEWORKS[case["framework"]](case, copy.deepcopy(model), batches)
        losses[case["name"]] = {"theirs": theirs, "ours": under_plan(case["plan"], model, batches)}
    answer(losses)


def under_plan(path: str, model: torch.nn.Module, batches: list[Batch]) -> list[float]:
    """Losses of our own runtime."""
    parallel = planner.compile(model, path, example_inputs=batches[0])
    optimizer = torch.optim.SGD(parallel.parameters(), lr=LEARNING_RATE)
    losses = []
    for batch in batches:
        losses.append(float(parallel.train_step(**batch)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def in_accelerate(case: Mapping[str, Any], model: torch.nn.Module, batches: list[Batch]) -> list[float]:
    """Losses under FSDP2, as ``accelerate launch --config_file`` sets it up; its launcher reads the exported file."""
    from accelerate import Accelerator, PartialState
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import DistributedType
    from accelerate.utils.launch import prepare_multi_gpu_env

    options, _, _ = _validate_launch_command(
        launch_command_parser().parse_args(["--config_file", case["file"], "train.py"])
    )
    environment = prepare_multi_gpu_env(options)
    os.environ.update({name: value for name, value in environment.items() if name.startswith(("FSDP_", "ACCELERATE_"))})
    os.environ.update(ACCELERATE_USE_CPU="true", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # the group is there
    # Accelerate shards on GPUs alone; nothing of FSDP2 needs one.
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    accelerator = Accelerator(gradient_accumulation_steps=case["script"]["Accelerator(gradient_accumulation_steps=…)"])
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert type(model).__name__.startswith("FSDP"), type(model)
    rows = case["script"]["DataLoader(batch_size=…)"]
    losses = []
    for batch in batches:
        own = {name: value.chunk(dist.get_world_size())[dist.get_rank()] for name, value in batch.items()}
        parts = [
            {name: value[start : start + rows] for name, value in own.items()}
            for start in range(0, len(own["input_ids"]), rows)
        ]
        total = torch.zeros(())
        for part in parts:
            with accelerator.accumulate(model):
                loss = model(**part).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach() / len(parts)
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
    return losses


def in_transformers(case: Mapping[str, Any], model: torch.nn.Module, batches: list[Batch]) -> list[float]:
    """Losses under transformers' own tensor parallelism."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    exported = json.loads(Path(case["file"]).read_text(encoding="utf-8"))
    folder = Path(os.environ["MESHWRIGHT_TEST_FOLDER"]) / "weights"
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    split = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, distributed_config=DistributedConfig(**exported["distributed_config"])
    ).train()
    optimizer = torch.optim.SGD(split.parameters(), lr=LEARNING_RATE)
    parts = exported["training_arguments"]["gradient_accumulation_steps"]
    losses = []
    for batch in batches:
        total = 0.0
        for part in range(parts):
            loss = split(**{name: value.chunk(parts)[part] for name, value in batch.items()}).loss / parts
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


FRAMEWORKS: Mapping[str, Callable[[Mapping[str, Any], torch.nn.Module, list[Batch]], list[float]]] = {
    "accelerate-fsdp2": in_accelerate,
    "transformers-tp": in_transformers,
}

if __name__ == "__main__":
    with traced_once():
        main()
