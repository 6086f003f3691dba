"""Items about whole training steps: time and peak memory against the prediction, Hugging Face's model and FSDP2."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import planner
from benchmarks.gpu.parts import MODELS, TINY_MODELS, ModelSize, Setting
from cost_models import Cluster
from planner.library import build_model, load_config, random_batch
from planner.verification.verify_model import _without_dropout

WARM_UP, TIMED = 3, 10
Row = dict[str, Any]
Batch = dict[str, torch.Tensor]
#: One training step, which gives the loss; and what is predicted of it.
Step = tuple[Callable[[], torch.Tensor], Row]


def step(setting: Setting, *, model: str, contestant: str) -> Iterator[Row]:
    """Seconds of a step (forward, backward, AdamW), peak memory, and the first loss."""
    size = (TINY_MODELS if setting.tiny else MODELS)[model]
    process = planner.init(device=setting.device)
    name, _, mode = contestant.rpartition(" ")
    if not name:
        name, mode = contestant, ""
    if name == "Hugging Face" and process.world_size > 1:
        yield {"contestant": contestant, "note": "one GPU only"}
        return
    torch.compiler.reset()
    run, predicted = _made(size, setting, process.device, _MAKERS[name], compiled=mode == "compiled")
    # What making it took, the original model of a plan above all, is no part of a step's memory.
    gc.collect()
    if setting.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    yield {"contestant": contestant, **_measured(run, process.device, tiny=setting.tiny), **predicted}
    del run
    gc.collect()


def _made(
    size: ModelSize, setting: Setting, device: torch.device, make: Callable[..., Step], *, compiled: bool
) -> Step:
    """A contestant's step on a model and a batch that nobody else holds."""
    module, config = _model(size, setting)
    batch = random_batch(config, batch_size=size.batch * dist.get_world_size(), seq_len=size.length)
    batch = {key: _as(tensor, module).to(device) for key, tensor in batch.items()}
    return make(module, batch, compiled=compiled)


def _measured(run: Callable[[], torch.Tensor], device: torch.device, *, tiny: bool) -> Row:
    on_gpu = device.type == "cuda"

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize(device)

    losses = [float(run()) for _ in range(1 if tiny else WARM_UP)]
    wait()
    times = []
    for _ in range(2 if tiny else TIMED):
        start = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if on_gpu else None
    return {
        "ms": round(statistics.median(times) * 1e3, 2),
        "peak, GiB": None if peak is None else round(peak, 2),
        "first loss": round(losses[0], 5),
    }


def _model(size: ModelSize, setting: Setting) -> tuple[nn.Module, Any]:
    """Without dropout, the same on all ranks; float32 in the rehearsal, where processors are slow with less."""
    config = load_config(size.config)
    for name, value in size.changes.items():
        setattr(config, name, value)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    module = build_model(config, dtype="float32" if setting.tiny else "bfloat16", device=setting.device)
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    _without_dropout(module)
    return module.train(), config


def _as(tensor: torch.Tensor, module: nn.Module) -> torch.Tensor:
    dtype = next(module.parameters()).dtype
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _own(batch: Batch) -> Batch:
    """This rank's samples."""
    rank, count = dist.get_rank(), dist.get_world_size()
    return {name: tensor.chunk(count)[rank].contiguous() for name, tensor in batch.items()}


def _adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-5, fused=next(module.parameters()).is_cuda)


def _eager_step(module: nn.Module, call: Callable[..., Any], batch: Batch) -> Callable[[], torch.Tensor]:
    optimizer = _adamw(module)

    def run() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = call(**batch).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return run


def _hugging_face(module: nn.Module, batch: Batch, *, compiled: bool) -> Step:
    call = torch.compile(module, dynamic=False) if compiled else module
    return _eager_step(module, call, batch), {}


def _fsdp(module: nn.Module, batch: Batch, *, compiled: bool) -> Step:
    """Every block, and what is left, are sharded over all ranks."""
    mesh = init_device_mesh(next(module.parameters()).device.type, (dist.get_world_size(),))
    for part in module.modules():
        if isinstance(part, nn.ModuleList) and len(part) and len(list(part[0].parameters())) > 1:
            for block in part:
                if compiled:
                    block.compile(dynamic=False)
                fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    run = _eager_step(module, module, _own(batch))

    def averaged() -> torch.Tensor:
        loss = run().clone()
        dist.all_reduce(loss)
        return loss / dist.get_world_size()

    return averaged, {}


def _ours(module: nn.Module, batch: Batch, *, compiled: bool) -> Step:
    """The plan that the planner finds for these devices."""
    mesh = init_device_mesh(next(module.parameters()).device.type, (dist.get_world_size(),), mesh_dim_names=("ranks",))
    cluster = Cluster.from_device_mesh(mesh)
    parallel = planner.compile(module, cluster, example_inputs=batch, compiled=compiled, time_limit=15.0)
    optimizer = _adamw(parallel)
    plan = parallel.plan.step
    assert plan is not None

    def run() -> torch.Tensor:
        optimizer.zero_grad()
        loss = parallel.train_step(**batch)
        optimizer.step()
        return loss

    axes = " ".join(f"{axis}={count}" for axis, count in plan.axes.items() if count > 1) or "one device"
    zero = "/".join(map(str, plan.zero))
    what = f"{axes}, {plan.num_microbatches} micro-batches, {'/'.join(plan.recompute)}, ZeRO {zero}"
    return run, {
        "predicted ms": round(plan.costs.simulated * 1e3, 2),
        "predicted GiB": round(max(rank.total for rank in plan.memory) / 2**30, 2),
        "plan": what,
    }


_MAKERS: dict[str, Callable[..., Step]] = {"Hugging Face": _hugging_face, "FSDP2": _fsdp, "Meshwright": _ours}
