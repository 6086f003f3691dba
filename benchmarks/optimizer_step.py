"""How long an AdamW step on a parallel module's parameters takes against the same step on plain tensors.

    python -m benchmarks.optimizer_step

One process, a mesh of one device: what differs is only that parameters, gradients and state are DTensors. Both take
turns in one run; of each the median counts.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

import planner

SIZES = {"32 linears of 64 × 64": (32, 64), "16 linears of 512 × 512": (16, 512), "8 linears of 1536 × 1536": (8, 1536)}
ROUNDS = 15


class Stack(nn.Module):
    def __init__(self, layers: int, size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = x + layer(x)
        return {"loss": x.square().mean()}


def seconds_of_a_step(optimizer: torch.optim.Optimizer) -> float:
    start = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - start


def compare(layers: int, size: int, **options: bool) -> tuple[float, float]:
    """Median seconds of a step on DTensors and on plain tensors."""
    parallel = planner.compile(Stack(layers, size), "dp=1", example_inputs={"x": torch.randn(4, size)})
    parallel.train_step(x=torch.randn(4, size))
    plain = [nn.Parameter(piece.tensor.detach().clone()) for piece in parallel.owned()]
    for parameter, piece in zip(plain, parallel.owned(), strict=True):
        assert piece.tensor.grad is not None
        parameter.grad = piece.tensor.grad.clone()
    optimizers = [torch.optim.AdamW(parameters, **options) for parameters in (list(parallel.parameters()), plain)]
    times: list[list[float]] = [[], []]
    for _ in range(ROUNDS):
        for optimizer, found in zip(optimizers, times, strict=True):
            found.append(seconds_of_a_step(optimizer))
    return statistics.median(times[0][2:]), statistics.median(times[1][2:])


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'model':28} {'AdamW':10} {'DTensor ms':>11} {'plain ms':>9} {'ratio':>6}")
    for name, (layers, size) in SIZES.items():
        for kind, options in (
            ("for loop", {"foreach": False}),
            ("foreach", {"foreach": True}),
            ("fused", {"fused": True}),
        ):
            sharded, plain = compare(layers, size, **options)
            print(f"{name:28} {kind:10} {sharded * 1e3:11.2f} {plain * 1e3:9.2f} {sharded / plain:6.3f}")


if __name__ == "__main__":
    main()
