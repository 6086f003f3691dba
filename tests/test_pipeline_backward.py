"""A chunk's backward pass in two parts: the same gradients, and no more work than the whole one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from runtime.pipeline.backward import Gradient, backward, input_backward
from tests.pipeline_stages import Weights

LAYERS, WIDTH = 3, 8
Body = Callable[[torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]


def layer(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    gain, up, down = weights
    h = F.linear(torch.tanh(F.linear(x * gain, up)), down)
    return x + h * gain


class Stack:
    """Layers whose weights are leaves, or come from one token a layer."""

    def __init__(self, weights_are: str, *, again: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weights_are, self.again = weights_are, again
        self.layers = [
            [
                nn.Parameter(torch.randn(shape, generator=generator))
                for shape in ((WIDTH,), (WIDTH, WIDTH), (WIDTH, WIDTH))
            ]
            for _ in range(LAYERS)
        ]
        self.x = torch.randn(4, WIDTH, generator=generator, requires_grad=True)

    def working(self, owners: list[nn.Parameter]) -> Sequence[torch.Tensor]:
        if self.weights_are == "leaves":
            return owners
        owned: tuple[torch.Tensor, ...] = Weights.apply(nn.Parameter(torch.zeros(())), owners)
        return [weight.view_as(weight) for weight in owned] if self.weights_are == "views" else owned

    def output(self) -> torch.Tensor:
        x = self.x
        for owners in self.layers:
            run = lambda x, owners=owners: layer(x, self.working(owners))  # noqa: E731
            x = checkpoint(run, x, use_reentrant=False) if self.again else run(x)
        return x

    def gradients(self) -> list[torch.Tensor]:
        return [owner.grad for owners in self.layers for owner in owners if owner.grad is not None]


def flops(function: Callable[[], Any]) -> tuple[Any, float]:
    """What it returns, and its matrix products' operations, in those of one forward pass of the layers."""
    with FlopCounterMode(display=False) as counter:
        result = function()
    return result, counter.get_total_flops() / (LAYERS * 2 * 2 * 4 * WIDTH * WIDTH)


@pytest.mark.parametrize(
    ("weights_are", "again", "work"),
    [
        ("leaves", False, (1, 1)),
        ("views", False, (1, 1)),
        ("token", False, (2, 0)),  # autograd cannot tell the weights of one node apart: all in I
        ("leaves", True, (3, 0)),  # run again once, not once a phase
        ("views", True, (3, 0)),
    ],
)
def test_both_parts_together_work_as_much_as_the_whole(
    weights_are: str, again: bool, work: tuple[float, float]
) -> None:
    whole, parts = Stack(weights_are, again=again), Stack(weights_are, again=again)
    output, gradient = parts.output(), torch.randn(4, WIDTH)
    (expected,) = backward([whole.output()], [gradient], [whole.x])
    ((input_gradients,), weight_backward), first = flops(lambda: input_backward([output], [gradient], [parts.x]))
    _, second = flops(weight_backward)
    torch.testing.assert_close(input_gradients, expected)
    torch.testing.assert_close(parts.gradients(), whole.gradients())
    assert len(parts.gradients()) == 3 * LAYERS
    assert (first, second) == work


@pytest.mark.parametrize("weights_are", ["leaves", "views"])
def test_weight_gradients_come_with_the_second_part(weights_are: str) -> None:
    stack = Stack(weights_are)
    _, weight_backward = input_backward([stack.output()], [torch.ones(4, WIDTH)], [stack.x])
    assert stack.gradients() == []
    weight_backward()
    assert len(stack.gradients()) == 3 * LAYERS


def test_without_a_received_gradient_all_is_in_the_second_part() -> None:
    stack = Stack("leaves", again=True)
    stack.x.requires_grad_(False)
    output = stack.output()
    (input_gradients, weight_backward), first = flops(
        lambda: input_backward([output], [torch.ones(4, WIDTH)], [stack.x])
    )
    _, second = flops(weight_backward)
    assert input_gradients == (None,)
    assert (first, second) == (0, 3)


class Cut:
    """One chunk's outputs of every kind, from two received tensors, a weight and a weight used twice."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.received = [torch.randn(3, 3, generator=generator, requires_grad=True) for _ in range(3)]
        self.received.append(torch.arange(3))
        self.weight = nn.Parameter(torch.randn(3, 3, generator=generator))
        self.twice = nn.Parameter(torch.randn(3, 3, generator=generator))

    def outputs(self) -> list[torch.Tensor]:
        x, passing, _, ids = self.received
        h = torch.tanh(x @ self.twice) @ self.weight @ self.twice
        from_weights_only = (self.weight * 2 + self.twice)[ids]
        return [h.t(), passing, from_weights_only, h + passing, ids, h.detach(), h]

    def all_gradients(self, input_gradients: Sequence[Gradient]) -> list[Gradient]:
        return [*input_gradients, self.weight.grad, self.twice.grad]


def test_every_kind_of_output() -> None:
    whole, parts = Cut(), Cut()
    gradients = [torch.randn(3, 3) for _ in range(7)]
    gradients[4] = gradients[5] = gradients[6] = None  # type: ignore[call-overload]
    expected = whole.all_gradients(backward(whole.outputs(), gradients, whole.received))
    input_gradients, weight_backward = input_backward(parts.outputs(), gradients, parts.received)
    weight_backward()
    assert [gradient is None for gradient in expected] == [False, False, True, True, False, False]
    torch.testing.assert_close(parts.all_gradients(input_gradients), expected)
