"""How long an AdamW step on a parallel module's parameters takes against the same step on plain tensors.

    python -m benchmarks.optimizer_step

One process, a mesh of one device: what differs is only that parameters, gradients and state are DTensors. Both take
turns in one run; of each the median of processor time counts.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

import planner

SIZES = {"32 linears of 64 × 64": (32, 64), "16 linears of 512 × 512": (16, 512), "4 linears of 1536 × 1536": (4, 1536)}
ROUNDS = 16


class Stack(nn.Module):
    def __init__(self, layers: int, size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = x + layer(x)
        return {"loss": x.square().mean()}


def seconds_of_a_step(optimizer: torch.optim.Optimizer) -> float:
    start = time.process_time()
    optimizer.step()
    return time.process_time() - start


def compare(layers: int, size: int, **options: bool) -> tuple[float, float]:
    """Median processor seconds of a step on DTensors, and on the plain tensors that lie under them."""
    parallel = planner.compile(Stack(layers, size), "dp=1", example_inputs={"x": torch.randn(4, size)})
    parallel.train_step(x=torch.randn(4, size))
    contestants = list(parallel.parameters()), [piece.tensor for piece in parallel.owned()]
    optimizers = [torch.optim.AdamW(parameters, **options) for parameters in contestants]
    times: list[list[float]] = [[], []]
    for number in range(ROUNDS):
        # Whoever is second finds the memory warm.
        for place in (0, 1) if number % 2 else (1, 0):
            times[place].append(seconds_of_a_step(optimizers[place]))
    sharded, plain = (statistics.median(some[2:]) for some in times)
    return sharded, plain


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
