"""One rank of the tests of what is on the host: trains a model under plans that offload, and one process alone."""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import planner
from cost_models import Cluster
from cost_models.host import Host
from passes.capture import keep_float64
from passes.plan.step_plan import ACTIVATIONS, OPTIMIZER, StepPlan
from planner.library import load_config, random_batch
from planner.verification.comparison import single_loss
from planner.verification.verify_model import real_module, slow_devices
from runtime.parameters import ShardedParameter, local_of
from runtime.parameters.offloaded_optimizer import MASTER
from runtime.program_tools.offloaded_activations import ProcessorLink, use_link
from runtime.torch_compat.dtensors import local_part
from tests.patience import PATIENCE
from tests.ranks import answer, task
from tests.tracing import traced_once

MAKERS: dict[str, Any] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
}
STEPS = 3


class Blocks(torch.nn.Module):
    """Three blocks, two of them in a row alike, of which autograd keeps the same on every device."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.LayerNorm(16), torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16)
            )
            for _ in range(3)
        )
        self.stem, self.head = torch.nn.Linear(16, 16), torch.nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).square().mean()


def hosted_devices(num_devices: int) -> Cluster:
    """Devices on which splitting pays, with a host."""
    return dataclasses.replace(slow_devices(num_devices), host=Host(1e12, 1e11, 1e10))


def compiled(model: torch.nn.Module, batch: dict[str, Any], fix: dict[str, Any], offload: str) -> Any:
    return planner.compile(
        copy.deepcopy(model), hosted_devices(dist.get_world_size()), example_inputs=batch, fix=fix, offload=offload,
        time_limit=PATIENCE,
    )  # fmt: skip


def trained_alone(
    model: torch.nn.Module, batch: dict[str, Any], make: Any, norm: float | None
) -> dict[str, torch.Tensor]:
    """Weights after the steps on one device, with torch's own clipping and a schedule."""
    single = copy.deepcopy(model)
    optimizer = make(single.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    for _ in range(STEPS):
        single_loss(single, (), batch, None).backward()
        if norm is not None:
            torch.nn.utils.clip_grad_norm_(single.parameters(), norm)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return dict(single.state_dict())


def error_of(case: dict[str, Any], model: torch.nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """Largest relative error of a weight, and where the optimizer's state is."""
    make = MAKERS[case["optimizer"]]
    parallel = compiled(model, batch, case["fix"], case.get("offload", OPTIMIZER))
    optimizer = make(parallel.parameters())
    if parallel.plan.step.offload != ACTIVATIONS:
        optimizer = planner.OffloadedOptimizer(optimizer)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    sent_before = LINK.num_bytes
    refused = ""
    for step in range(STEPS):
        parallel.train_step(**batch)
        if step == 0 and parallel.plan.step.optimizer_on_host:
            try:
                make(parallel.parameters()).step()
            except ValueError as error:
                refused = str(error)
        if case.get("norm"):
            parallel.clip_grad_norm_(case["norm"])
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step == case.get("moved_after"):
            parallel, optimizer, schedule = moved(case, model, batch, parallel, optimizer, schedule)
    expected = trained_alone(model, batch, make, case.get("norm"))
    weights = parallel.full_state_dict()
    scale = max(float(one.abs().max()) for one in expected.values())
    largest = max(float((weights[name] - one).abs().max()) for name, one in expected.items()) / scale
    carried = {"sent": (LINK.num_bytes - sent_before) / STEPS, "predicted": predicted_bytes(parallel.plan.step)}
    return {"error": largest, "refused": refused, **carried, **where_state_is(optimizer)}


class CountingLink(ProcessorLink):
    """Counts what activations take to the host."""

    num_bytes = 0

    def to_host(self, data: torch.Tensor) -> tuple[torch.Tensor, Any]:
        self.num_bytes += data.numel()
        return super().to_host(data)


LINK = CountingLink()


def predicted_bytes(step: StepPlan) -> float:
    """Bytes of activations that this rank's units take to the host in a step."""
    rank = dist.get_rank() if step.axes["pp"] > 1 else 0
    layers = [layer for chunk in step.chunks if chunk.rank == rank for layer in chunk.costs.layers]
    return step.num_microbatches * sum(count * costs.host_bytes for costs, count in layers)


def moved(
    case: dict[str, Any], model: torch.nn.Module, batch: dict[str, Any], parallel: Any, optimizer: Any, schedule: Any
) -> tuple[Any, Any, Any]:
    """Training that goes on elsewhere: from a checkpoint under another plan, or in place by ``replan``."""
    if case["moves_by"] == "state_dict":
        again = planner.OffloadedOptimizer(MAKERS[case["optimizer"]](parallel.parameters()))
        again.load_state_dict(optimizer.state_dict())
        schedule.optimizer = again  # its factor goes on
        return parallel, again, schedule
    if case["moves_by"] == "replan":
        parallel.replan(hosted_devices(dist.get_world_size()), optimizer, fix=case["then"], offload=OPTIMIZER)
        return parallel, optimizer, schedule
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    planner.CheckpointManager(Path(folder[0])).save(parallel, optimizer, step=1, scheduler=schedule)
    parallel = compiled(model, batch, case["then"], case["then_offload"])
    optimizer = MAKERS[case["optimizer"]](parallel.parameters())
    if parallel.plan.step.offload:
        optimizer = planner.OffloadedOptimizer(optimizer)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    planner.CheckpointManager(Path(folder[0])).load(parallel, optimizer, scheduler=schedule)
    return parallel, optimizer, schedule


def where_state_is(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """How many tensors of parameters' shapes are state; and how many share memory with a weight."""
    weights = {
        local_of(one).untyped_storage().data_ptr() for group in optimizer.param_groups for one in group["params"]
    }
    tensors, shared, narrow, off = 0, 0, 0, 0
    for parameter, entry in optimizer.state.items():
        for key, value in entry.items():
            if isinstance(parameter, ShardedParameter) and isinstance(value, torch.Tensor) and key != "step":
                local = local_part(value)
                tensors += 1
                shared += local.untyped_storage().data_ptr() in weights or local.device.type != "cpu"
                narrow += local.dtype != torch.float64
            if key == MASTER:
                off += not torch.equal(local_part(value).to(parameter.dtype), local_of(parameter))
    return {"tensors": tensors, "shared": shared, "narrow": narrow, "off": off}


def model_and_batch(name: str, dtype: torch.dtype) -> tuple[torch.nn.Module, dict[str, Any]]:
    if name == "blocks":
        torch.manual_seed(0)
        return Blocks().to(dtype), {"x": torch.randn(4, 8, 16, dtype=dtype)}
    config = load_config("tiny-llama")
    config.num_hidden_layers = 2
    model = real_module(config, dtype=dtype, seed=0)
    return model, random_batch(model, batch_size=4, seq_len=8)


def main() -> None:
    results = {}
    use_link(torch.device("cpu"), LINK)
    with keep_float64():
        for case in task():
            dtype = getattr(torch, case.get("dtype", "float64"))
            model, batch = model_and_batch(case.get("model", "llama"), dtype)
            results[case["name"]] = error_of(case, model, batch)
    answer(results)


if __name__ == "__main__":
    with traced_once():
        main()
