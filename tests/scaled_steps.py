"""Steps under ``torch.amp.GradScaler`` of which one is skipped: a number that is not finite is on one rank alone."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.small_models import seeded
from tests.torch_tools_cases import Odd, difference, odd_batch, renewed

#: Every module, and the last layer alone, of which the first stage of a pipeline has no parameter.
TRAINED = ("", "last")


def wrong_scaled_steps(plan: str) -> list[str]:
    """What is not as on one device: scales after each step, or weights after all of them."""
    wrong = []
    for prefix in TRAINED:
        parallel, single = renewed(plan), seeded(Odd)
        scales = [_scales(module, prefix) for module in (parallel, single)]
        error = difference(parallel.full_state_dict(), dict(single.state_dict()))
        if scales[0] != scales[1] or not error < 1e-9:
            wrong.append(f"{prefix or 'all'}: scales {scales}, weights {error:.0e}")
    return wrong


def _scales(module: Any, prefix: str) -> list[float]:
    trained = [one for name, one in module.named_parameters() if name.startswith(prefix)]
    trained.sort(key=_is_cut)  # DTensor asks other ranks as the first gradient is placed
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    scaler, scales = torch.amp.GradScaler("cpu", init_scale=8.0), []
    for number in range(3):
        scaler.scale(module(**odd_batch())["loss"]).backward()
        if number == 1:
            _overflow(trained)
        if number == 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        module.zero_grad()
        scales.append(scaler.get_scale())
    return scales


def _is_cut(parameter: Any) -> bool:
    return isinstance(parameter, DTensor) and any(placement.is_shard() for placement in parameter.placements)


def _overflow(parameters: list[Any]) -> None:
    """Make one number infinite: of DTensors on the last rank alone."""
    for parameter in reversed(parameters):
        shown = parameter.grad
        gradient = shown.to_local() if isinstance(shown, DTensor) else shown
        if gradient.numel() and (not isinstance(shown, DTensor) or dist.get_rank() == dist.get_world_size() - 1):
            gradient.view(-1)[-1] = math.inf
            return
