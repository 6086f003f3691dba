"""Items about plans that fill a GPU: its measured peak against the plan's bytes and its headroom.

The batch of each plan is the largest whose predicted bytes leave the headroom free. Steps run by themselves on the GPU;
other processes may plan meanwhile (``LOCK``).
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import math
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import init_device_mesh

import planner
from benchmarks.gpu.parts import Setting
from cost_models import Cluster
from planner.library import build_model, load_config, random_batch
from planner.verification.verify_model import _without_dropout
from planner.whole_step.candidates.no_plan import NoPlan
from runtime.kernels import AdamW

Row = dict[str, Any]
#: Of the device's usable bytes; what is predicted to use more is not run.
HEADROOM = 0.06
STEPS = 3
LOCK = Path(tempfile.gettempdir()) / f"meshwright-gpu-memory-{os.getuid()}.lock"
_ONE_DEVICE = {"pp": 1, "dp": 1, "ep": 1, "cp": 1, "tp": 1, "zero": 0, "num_microbatches": 1}


class FullCase(NamedTuple):
    """A model of the library, in few layers, and what its blocks keep."""

    config: str
    changes: dict[str, Any]
    dtype: str
    length: int | None
    recompute: str
    num_microbatches: int = 1


def memory(setting: Setting, *, case: tuple[Any, ...]) -> Iterator[Row]:
    """Bytes of the fullest moment of a ``FullCase``, as planned, as tensors, and as the allocator has taken them."""
    yield _row(setting, FullCase(*case))


def _row(setting: Setting, case: FullCase) -> Row:
    device = planner.init(device=setting.device).device
    cluster = Cluster.from_device_mesh(init_device_mesh(device.type, (1,), mesh_dim_names=("ranks",)))
    began = time.perf_counter()
    usable = cluster.device.usable_bytes
    batch_size = 2 if setting.tiny else _largest_batch(case, cluster, usable * (1 - HEADROOM))
    plan = _planned(case, cluster, batch_size)
    config = _config(case)
    batch = random_batch(config, batch_size=batch_size * case.num_microbatches, seq_len=case.length)
    batch = {
        key: (one.to(getattr(torch, case.dtype)) if one.is_floating_point() else one) for key, one in batch.items()
    }
    planned = time.perf_counter() - began
    with _alone():
        row = _measured(case, config, {key: one.to(device) for key, one in batch.items()}, plan, device)
        _leave_the_gpu(device)
    share = row["predicted, GiB"] * 2**30 / usable
    limit = row["predicted, GiB"] + HEADROOM * usable / 2**30
    return {
        "model": case.config, **{f"of {key}": value for key, value in case.changes.items()}, "dtype": case.dtype,
        "length": case.length, "samples": batch_size, "keeps": case.recompute, "share": f"{share:.1%}", **row,
        "planning, s": round(planned, 1), "ok": row.get("reserved, GiB") is None or row["reserved, GiB"] <= limit,
    }  # fmt: skip


def _measured(
    case: FullCase, config: Any, batch: dict[str, torch.Tensor], plan: planner.Plan, device: torch.device
) -> Row:
    """After the steps: the plan's fullest moment, the allocator's, and the time of the last step."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    model = build_model(config, dtype=case.dtype, device=str(device)).train()
    _without_dropout(model)
    parallel = planner.compile(model, plan, example_inputs=batch)
    optimizer = _adamw(case, parallel)
    del model
    gc.collect()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step = parallel.plan.step
    for _ in range(STEPS):
        start = time.perf_counter()
        loss = float(parallel.train_step(**batch))
        optimizer.step()
        optimizer.zero_grad()
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    predicted = max(rank.total for rank in step.memory) / 2**30
    row: Row = {"predicted, GiB": round(predicted, 2)}
    if on_gpu:
        tensors, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        row |= {"tensors, GiB": round(tensors / 2**30, 2), "reserved, GiB": round(reserved / 2**30, 2)}
        row |= {"off by": f"{predicted * 2**30 / tensors - 1:+.1%}"}
    return {**row, "predicted ms": round(step.costs.simulated * 1e3, 1), "ms": round(seconds * 1e3, 1), "loss": loss}


def _adamw(case: FullCase, parallel: torch.nn.Module) -> torch.optim.Optimizer:
    """What plans count: float32 masters of parameters of 16 bits."""
    if case.dtype == "float32":
        return torch.optim.AdamW(parallel.parameters(), lr=1e-5, fused=next(parallel.parameters()).is_cuda)
    return AdamW(parallel.parameters(), lr=1e-5)


def _largest_batch(case: FullCase, cluster: Cluster, most: float) -> int:
    """Bytes grow by the same with every sample."""
    low, high = (_predicted(case, cluster, batch) for batch in (2, 4))
    batch = 2 + int((most - low) // ((high - low) / 2))
    if batch < 1:
        raise RuntimeError(f"two samples take {low / 2**30:.1f} GiB already")
    while batch > 1 and _predicted(case, cluster, batch) > most:
        batch -= max(1, batch // 50)
    return batch


def _predicted(case: FullCase, cluster: Cluster, batch: int) -> float:
    """Bytes of the fullest moment; infinite where the host has no room for what goes there."""
    try:
        step = _planned(case, cluster, batch).step
    except NoPlan:
        return math.inf
    return max(rank.total for rank in step.memory)


def _planned(case: FullCase, cluster: Cluster, batch: int) -> planner.Plan:
    """A plan for memory without limit."""
    samples = batch * case.num_microbatches
    return planner.plan(
        _config(case), cluster, batch_size=samples, global_batch=samples, seq_len=case.length, dtype=case.dtype,
        fix={**_ONE_DEVICE, "recompute": case.recompute, "num_microbatches": case.num_microbatches}, headroom=0.0,
        memory_limit=1e12, offload="activations" if case.recompute == "offload" else "never",
    )  # fmt: skip


def _config(case: FullCase) -> Any:
    config = load_config(case.config)
    for name, value in case.changes.items():
        setattr(config, name, value)
    for name, value in list(vars(config).items()):
        if isinstance(value, float) and ("drop" in name or name.endswith("_pdrop")):
            setattr(config, name, 0.0)
    return config


def _leave_the_gpu(device: torch.device) -> None:
    """Whoever waits for it finds all of its memory free."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """With the GPU: another process that measures here is waited for."""
    with LOCK.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
