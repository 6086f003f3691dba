"""Items about several GPUs: schedules, ZeRO stages and experts against one device, by operators of torch alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import planner
from benchmarks.gpu.parts import TINY_MODELS, Setting
from passes.capture import keep_float64
from planner.library import load_config, random_batch
from planner.verification.verify_model import real_module, slow_devices

Row = dict[str, Any]
#: Largest relative difference in float64, and weights below this share of the largest, which are not compared.
TOLERANCE = 1e-9


def parity(setting: Setting, *, fix: dict[str, Any], model: str = "") -> Iterator[Row]:
    """Loss, gradients and the weights after an SGD step of a tiny model (default: Llama), in float64."""
    process = planner.init(device=setting.device)
    config = load_config(TINY_MODELS[model].config if model else "tiny-llama")
    for name, value in (TINY_MODELS[model].changes if model else {}).items():
        setattr(config, name, value)
    alone = real_module(config, dtype=torch.float64, seed=0).to(process.device)
    batch = {name: tensor.to(process.device) for name, tensor in random_batch(config, batch_size=8, seq_len=12).items()}
    plainest = {"pp": 1, "dp": 1, "ep": 1, "cp": 1, "tp": 1, "recompute": "none", "zero": 0, "num_microbatches": 1}
    with keep_float64():
        parallel = planner.compile(
            copy.deepcopy(alone), slow_devices(dist.get_world_size()), example_inputs=batch, fix={**plainest, **fix}
        )
        loss = parallel.train_step(**batch)
        gradients = parallel.full_gradients()
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        optimizer.step()
        weights = parallel.full_state_dict()
        if model == "Mixtral":
            alone.set_experts_implementation("eager")  # type: ignore[operator]  # grouped products take no float64
        expected = alone(**batch).loss
        expected.backward()
        torch.optim.SGD(alone.parameters(), lr=0.1).step()
    errors = {
        "loss": _difference(loss, expected),
        "gradients": max(_difference(gradients[name], one.grad) for name, one in alone.named_parameters()),
        "weights": max(_difference(weights[name], one) for name, one in alone.named_parameters()),
    }
    yield {
        "case": " ".join(f"{name}={value}" for name, value in fix.items()),
        **{name: float(f"{error:.1e}") for name, error in errors.items()},
        "ok": max(errors.values()) <= TOLERANCE,
    }


def _difference(actual: torch.Tensor, expected: Any) -> float:
    """Largest difference over the largest value."""
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    return float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-300))
