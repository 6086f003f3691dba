"""The norm of gradients whose pieces lie on many ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from runtime.parallel_module import ParallelModule


def clip_grad_norm(parallel: ParallelModule, max_norm: float) -> torch.Tensor:
    """Scale gradients down to ``max_norm`` together; returns their norm before, the same on every rank."""
    pieces = [(owned.tensor.grad, owned.primary) for owned in parallel.owned() if owned.tensor.grad is not None]
    total = torch.zeros((), dtype=torch.float64, device=parallel.layout.device)
    for gradient, primary in pieces:
        if gradient is not None and primary:
            total += gradient.detach().double().square().sum()
    if dist.is_initialized():
        dist.all_reduce(total)
    norm = total.sqrt()
    scale = float((max_norm / (norm + 1e-6)).clamp(max=1.0))
    for gradient, _ in pieces:
        if gradient is not None:
            gradient.mul_(scale)
    return norm
