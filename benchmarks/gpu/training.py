"""Items about training small models on a GPU as scripts do, against plain torch there, in float64 or float32."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import planner
from benchmarks.gpu.drawn import ONE_DEVICE, drawn
from benchmarks.gpu.parts import TINY_MODELS, Setting
from benchmarks.gpu.user_models import USER_MODELS, Batch, Tagger, tokens
from planner.library import build_model, load_config, random_batch
from planner.verification.verify_model import _without_dropout

Row = dict[str, Any]
STEPS = 3
#: Largest relative difference of losses, and that of weights after the steps over the largest change of a weight.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 3e-2}
#: Plans of one device, by name: options of ``compile`` beside the model.
PLANS: dict[str, dict[str, Any]] = {
    "nothing kept back": {"recompute": "none", "num_microbatches": 1},
    "selective": {"recompute": "selective", "num_microbatches": 1},
    "full, 2 micro-batches": {"recompute": "full", "num_microbatches": 2},
    "chunked loss": {"recompute": "chunked_loss", "num_microbatches": 1},
    "activations on the host, 2 micro-batches": {"recompute": "offload", "num_microbatches": 2},
}


def user_model(setting: Setting, *, name: str) -> Iterator[Row]:
    """One of ``USER_MODELS`` as its script compiles it."""
    case = USER_MODELS[name]
    torch.manual_seed(0)
    model = case.make().to(case.dtype)
    yield _trained(setting, model, [case.batch(case.dtype) for _ in range(STEPS)], name, case.dtype)


def family(setting: Setting, *, name: str, dtype: str = "float32") -> Iterator[Row]:
    """A tiny model of a family of transformers."""
    model, batches = _of_family(name, dtype)
    yield _trained(setting, model, batches, f"{name}, {dtype}", getattr(torch, dtype))


def planned(setting: Setting, *, name: str, plan: str, compiled: bool = False) -> Iterator[Row]:
    """A tiny model under one of ``PLANS``."""
    model, batches = _of_family(name, "float32")
    options: dict[str, Any] = {"fix": {**ONE_DEVICE, **PLANS[plan]}, "compiled": compiled}
    if PLANS[plan]["recompute"] == "offload":
        options["offload"] = "activations"
    what = f"{name}, {plan}{', compiled' * compiled}"
    yield _trained(setting, model, batches, what, torch.float32, "dgx-h100:1x1", **options)


def offloaded_optimizer(setting: Setting) -> Iterator[Row]:
    """Weights that the host updates."""
    model, batches = _of_family("Llama", "float32")
    yield _trained(
        setting, model, batches, "Llama, optimizer on the host", torch.float32, "dgx-h100:1x1", offload="optimizer"
    )


def autocast(setting: Setting, *, dtype: str) -> Iterator[Row]:
    """A loop under autocast with a scaler for float16, clipping, an optimizer that was made before."""
    process = planner.init(device=setting.device)
    torch.manual_seed(0)
    model = Tagger().to(process.device)
    plain, losses = copy.deepcopy(model), []
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    parallel = planner.compile(model, optimizer=optimizers[0])
    batches = [_on(tokens(torch.float32), process.device) for _ in range(STEPS)]
    for each, optimizer in zip((parallel, plain), optimizers):
        scaler = torch.amp.GradScaler(setting.device, enabled=dtype == "float16", init_scale=1024.0)
        for batch in batches:
            with torch.autocast(setting.device, dtype=getattr(torch, dtype)):
                loss = each(**batch)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    yield _row(f"autocast to {dtype}", losses[:STEPS], losses[STEPS:], parallel, plain, model, torch.bfloat16)


def draws(setting: Setting) -> Iterator[Row]:
    """Random numbers are those of a processor, with and without recomputation."""
    here = drawn(setting.device)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    there = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.drawn"], env=environment, capture_output=True, text=True, check=True
    )
    pairs = list(zip(here, json.loads(there.stdout.splitlines()[-1]), strict=True))
    worst = max(abs(one - other) / abs(other) for one, other in pairs)
    yield {"what": "random numbers, as on a processor", "losses": float(f"{worst:.1e}"), "ok": worst <= 1e-5}


def verified(setting: Setting, *, mesh: str) -> Iterator[Row]:
    """A model and a batch that are on the GPU, verified on virtual ranks."""
    device = planner.init(device=setting.device).device
    torch.manual_seed(0)
    report = planner.verify(Tagger().double().to(device), mesh, batch=_on(tokens(torch.float64), device))
    yield {"what": f"verify on {mesh}", "ok": report.ok}


def _of_family(name: str, dtype: str) -> tuple[nn.Module, list[Batch]]:
    size = TINY_MODELS[name]
    config = load_config(size.config)
    for key, value in size.changes.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    model = build_model(config, dtype=dtype, device="cpu")
    _without_dropout(model)
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    batches = [random_batch(config, batch_size=4, seq_len=32) for _ in range(STEPS)]
    torch_dtype = getattr(torch, dtype)
    return model.train(), [
        {key: one.to(torch_dtype) if one.is_floating_point() else one for key, one in batch.items()}
        for batch in batches
    ]


def _on(batch: Batch, device: torch.device) -> Batch:
    return {name: tensor.to(device) for name, tensor in batch.items()}


def _trained(
    setting: Setting,
    model: nn.Module,
    batches: list[Batch],
    what: str,
    dtype: torch.dtype,
    *target: str,
    **options: Any,
) -> Row:
    """Steps of SGD with momentum of a plan and of the model itself, both on the device."""
    process = planner.init(device=setting.device)
    model = model.to(process.device)
    plain = copy.deepcopy(model)
    batches = [_on(batch, process.device) for batch in batches]
    parallel = planner.compile(copy.deepcopy(model), *target, example_inputs=batches[0], **options)
    optimizer: Any = _sgd(parallel)
    if options.get("offload") == "optimizer":
        optimizer = planner.OffloadedOptimizer(optimizer)
    losses = _losses(lambda batch: parallel.train_step(**batch), optimizer, batches)
    expected = _losses(lambda batch: _backward(plain, batch), _sgd(plain), batches)
    return _row(what, losses, expected, parallel, plain, model, dtype)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.05, momentum=0.9)


def _backward(model: nn.Module, batch: Batch) -> torch.Tensor:
    outputs = model(**batch)
    loss: torch.Tensor = outputs if isinstance(outputs, torch.Tensor) else outputs.loss
    loss.backward()
    return loss.detach()


def _losses(step: Callable[[Batch], torch.Tensor], optimizer: Any, batches: list[Batch]) -> list[float]:
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        losses.append(float(step(batch)))
        optimizer.step()
    return losses


def _row(
    what: str,
    losses: list[float],
    expected: list[float],
    parallel: Any,
    plain: nn.Module,
    before: nn.Module,
    dtype: torch.dtype,
) -> Row:
    """Losses relatively; weights relatively to what training has changed most, as some have no gradient."""
    loss = max(abs(one - other) / abs(other) for one, other in zip(losses, expected, strict=True))
    weights, began = parallel.full_state_dict(), dict(before.named_parameters())
    changes, errors = [], []
    for name, one in plain.named_parameters():
        end = one.detach().double().cpu()
        changes.append(float((end - began[name].detach().double().cpu()).abs().max()))
        errors.append(float((weights[name].detach().double().cpu() - end).abs().max()))
    weight = max(errors) / max(changes)
    tolerance = TOLERANCES[dtype]
    return {
        "what": what, "losses": float(f"{loss:.1e}"), "weights": float(f"{weight:.1e}"),
        # Weights of 16 bits are rounded at every step.
        "ok": loss <= tolerance and (weight <= 10 * tolerance or dtype == torch.bfloat16),
    }  # fmt: skip
