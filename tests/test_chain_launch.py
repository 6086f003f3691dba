"""What a launch of a chain costs the host: everything but Triton's own call is computed once for a kind of call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runtime.kernels.chain_call import Chain
from runtime.kernels.chain_launch import Launch
from tests.patience import calls_made


class KernelThatDoesNothing:
    """Counts its launches, as ``kernel[grid](*arguments, **options)``."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self.launches.append((grid, options))


def chain_of(forward: KernelThatDoesNothing, backward: KernelThatDoesNothing) -> Chain:
    """gelu(x + bias), with a bias whose gradient is summed."""
    return Chain(
        plain=lambda x, bias: torch.nn.functional.gelu(x + bias),
        forward=forward,
        backward=backward,
        inputs={"x": "float32", "bias": "float32"},
        outputs={"y": "float32"},
        grads=["y"],
        saved=["x", "bias"],
        gradients={"x": "full", "bias": "row"},
    )


def test_a_further_launch_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned: list[Launch] = []
    choose = Launch._tuned
    monkeypatch.setattr(Launch, "_tuned", lambda launch, *call: (tuned.append(launch), choose(launch, *call))[1])
    forward, backward = KernelThatDoesNothing(), KernelThatDoesNothing()
    chain, x, bias = chain_of(forward, backward), torch.randn(6, 8, 32), torch.randn(32)
    shapes = {"x": (6, 8, 32), "bias": (32,)}

    def step() -> None:
        chain.run([x, bias], extra=True)
        chain.run_backward([x], [x, bias], (6, 8, 32), shapes)

    first, second = calls_made(step), calls_made(step)
    assert len(tuned) == 2, "one tile for each of the two kernels"
    assert forward.launches[0] == forward.launches[1] and backward.launches[0] == backward.launches[1]
    assert second < 130 and second < first / 3


@pytest.mark.parametrize("other", [torch.randn(6, 4, 32), torch.randn(32, 8, 6).permute(2, 1, 0)])
def test_other_shapes_and_strides_are_other_launches(other: torch.Tensor) -> None:
    forward = KernelThatDoesNothing()
    chain = chain_of(forward, KernelThatDoesNothing())
    for x in (torch.randn(6, 8, 32), other):
        chain.run([x, torch.randn(32)], extra=False)
    assert len(chain._launches) == 2
