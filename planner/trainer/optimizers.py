"""The trainer's default optimizer, and helpers to choose another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from passes.plan import Plan
from runtime.parameters.offloaded_optimizer import OffloadedOptimizer

#: Parameters of the model (this rank's shards) → the optimizer that trains them.
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def decay_groups(parameters: Iterable[nn.Parameter], *, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups for any torch optimizer: matrices with weight decay, norms and biases (one dim) without.

    Both groups are there on every rank, even if a rank holds nothing of one of them.
    """
    groups: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for parameter in parameters:
        groups[parameter.dim() < 2].append(parameter)
    return [{"params": groups[0], "weight_decay": weight_decay}, {"params": groups[1], "weight_decay": 0.0}]


def default_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with a learning rate of 1e-3 and a weight decay of 0.01 on matrices."""
    return torch.optim.AdamW(decay_groups(parameters, weight_decay=0.01), lr=1e-3)


def warmup_cosine(
    num_warmup_steps: int, num_steps: int, *, final: float = 0.0
) -> Callable[[torch.optim.Optimizer], LambdaLR]:
    """A schedule for ``Trainer(lr_schedule=…)``: a linear rise, then half a cosine down to ``final`` × the peak.

    Raises:
        ValueError: unless 0 <= num_warmup_steps < num_steps.
    """
    if not 0 <= num_warmup_steps < num_steps:
        raise ValueError(
            f"the warm-up of {num_warmup_steps} steps must be shorter than the whole schedule of {num_steps}"
        )

    def factor(step: int) -> float:
        if step < num_warmup_steps:
            return (step + 1) / num_warmup_steps
        progress = min(1.0, (step - num_warmup_steps) / (num_steps - num_warmup_steps))
        return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2

    return lambda optimizer: LambdaLR(optimizer, factor)


def on_planned_memory(optimizer: torch.optim.Optimizer, plan: Plan) -> torch.optim.Optimizer:
    """``optimizer``, with its state in the host's memory if the plan has it there.

    Raises:
        ValueError: for an optimizer that cannot run on the host.
    """
    if not plan.step.optimizer_on_host or isinstance(optimizer, OffloadedOptimizer):
        return optimizer
    return OffloadedOptimizer(optimizer)
