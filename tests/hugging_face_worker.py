"""One rank of the tests of Hugging Face's scripts on plans; rank 0 says what was logged."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import default_data_collator

import planner
from planner.integrations import transformers as hf
from planner.integrations.accelerate import Accelerator
from planner.verification.verify_model import slow_devices
from runtime.mesh.communication_counter import CommunicationCounter
from runtime.parameters import local_of
from tests.hugging_face_cases import (
    BATCH,
    FULL,
    accelerated,
    evaluation_order,
    figures,
    lora,
    regression_script,
    samples,
    script,
    translated,
    with_own_loss,
)
from tests.ranks import answer, task
from tests.tracing import traced_once


def adapters(mesh: str) -> dict[str, Any]:
    """LoRA under a plan beside one device: how far apart they are, and bytes."""
    batch = default_data_collator([{name: row[name] for name in ("input_ids", "labels")} for row in samples(BATCH)])
    alone = lora()
    parallel = planner.compile(lora(), mesh, example_inputs=batch, fix={"zero": 0})
    trained = [[one for one in module.parameters() if one.requires_grad] for module in (parallel, alone)]
    optimizers = [torch.optim.AdamW(parameters, lr=1e-2) for parameters in trained]
    apart = []
    for _ in range(2):
        loss = alone(**batch).loss
        loss.backward()
        with CommunicationCounter(parallel.device_mesh) as counter:
            apart.append(float((parallel.train_step(**batch) - loss).abs() / loss))
        graded = sum(one.grad is not None for one in parallel.parameters())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    weights = parallel.full_state_dict()
    apart += [float((weights[name] - tensor).abs().max()) for name, tensor in alone.state_dict().items()]
    own = [local_of(one) for one in trained[0]]
    states = [value for state in optimizers[0].state.values() for value in state.values() if value.dim()]
    return {
        "apart": max(apart),
        "graded": [graded, len(own)],
        "adapters": num_bytes(own),
        "states": num_bytes([state.to_local() for state in states]),
        "reduced": sum(count[1] for (kind, axis, _), count in counter.counts.items() if axis == "dp"),
    }


def num_bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def main() -> None:
    folder = task()
    os.environ |= {"LOCAL_RANK": os.environ["RANK"], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    batch_size = BATCH // dist.get_world_size()
    checkpoint = str(Path(folder) / "dp" / "checkpoint-2")
    slow = slow_devices(dist.get_world_size())  # on a processor's own figures every rank would compute all of it
    cut: dict[str, Any] = {"plan_options": {"cluster": slow}}

    def run(name: str, **options: Any) -> Any:
        return script(hf.Trainer, str(Path(folder) / name), batch_size, **cut, **options)

    logged: dict[str, Any] = {}
    first = run("dp", mesh="dp=2")
    logged["dp=2"] = figures(first)
    logged["axes"], logged["collectives"] = first.parallel.plan.step.axes, [len(first.parallel.plan.collectives)]
    for mesh in ("tp=2", "pp=2"):
        trainer = run(mesh, mesh=mesh, resume=checkpoint)
        logged[f"resumed on {mesh}"] = figures(trainer)
        logged["collectives"].append(len(trainer.parallel.plan.collectives))
    once = {"num_train_epochs": 1, "save_strategy": "no"}
    logged["bf16"] = figures(run("bf16", sizes=FULL, changes={**once, "bf16": True}))
    smooth = {**once, "label_smoothing_factor": 0.1, "eval_strategy": "no"}
    trainer = run("smooth", mesh="dp=2", sizes=FULL, changes={**smooth, "gradient_checkpointing": True})
    logged["smoothed labels"], logged["recompute"] = figures(trainer), list(trainer.parallel.plan.step.recompute)
    own = with_own_loss(hf.Trainer)
    trainer = script(own, str(Path(folder) / "own"), batch_size, mesh="pp=2", sizes=FULL, changes=once)
    logged["own loss"] = figures(trainer)
    trainer = regression_script(hf.Trainer, str(Path(folder) / "values"), batch_size, mesh="dp=2", **cut)
    logged["regression"] = figures(trainer)
    logged["translated"] = translated(hf.Seq2SeqTrainer, str(Path(folder) / "text"), batch_size, mesh="dp=2", **cut)
    logged["adapters"] = {mesh: adapters(mesh) for mesh in ("pp=1,dp=2", "pp=1,tp=2", "pp=2")}
    logged["lora"] = figures(run("lora", mesh="pp=2", model=lora(), sizes=FULL))
    adapted = str(Path(folder) / "lora" / "checkpoint-2")
    logged["lora resumed"] = figures(run("lora2", mesh="tp=2", model=lora(), sizes=FULL, resume=adapted))
    state = str(Path(folder) / "state")
    logged["accelerate"] = accelerated(Accelerator, folder=state)
    example = {name: torch.ones(BATCH, 6, dtype=torch.int64) for name in ("input_ids", "labels")}
    planned = {"mesh": "tp=2", "plan_options": {"example_inputs": example, "cluster": slow}}
    logged["accelerate again"] = accelerated(Accelerator, resume=state, **planned)
    logged["order"] = evaluation_order(hf.Trainer, state, batch_size)
    accelerator = Accelerator(cpu=True)
    if dist.get_rank() == 1:
        accelerator.set_trigger()
    logged["triggers"] = [accelerator.check_trigger(), accelerator.check_trigger()]
    answer(logged)


if __name__ == "__main__":
    with traced_once():
        main()
