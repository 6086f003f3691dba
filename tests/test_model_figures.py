"""Model flops by hand: six for each weight and token, two fewer for what nobody needs since parameters are frozen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from passes.capture import capture
from planner.sharding_ilp.model_figures import model_flops

ROWS, WIDTH, LAYERS = 8, 16, 4
LAYER = ROWS * WIDTH * WIDTH


class Stack(nn.Module):
    """Linear layers; the first of them are frozen."""

    def __init__(self, frozen: int, *, trained_scale: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=trained_scale)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        for layer in list(self.layers)[:frozen]:
            layer.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


@pytest.mark.parametrize(
    ("model", "products"),
    [
        (Stack(0, trained_scale=True), 3 * LAYERS),
        (Stack(2), 1 + 1 + 2 + 3),  # nothing goes back through the frozen layers, nor into the first that trains
        (Stack(2, trained_scale=True), 2 + 2 + 3 + 3),  # what trains before them needs the gradients of their inputs
    ],
)
def test_gradients_that_frozen_parameters_would_have_are_not_counted(model: Stack, products: int) -> None:
    graph = capture(model, args=(torch.ones(ROWS, WIDTH),))
    assert model_flops(graph) == 2 * LAYER * products


def test_frozen_queries_keys_and_values_have_no_backward_pass() -> None:
    class Attention(nn.Module):
        def __init__(self, trains: bool) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH), requires_grad=trains)
            self.last = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = (x @ self.weight).unsqueeze(1)
            attention = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
            return (attention * self.last).mean()

    x = torch.ones(2, ROWS, WIDTH)
    scores = 2 * 2 * ROWS * ROWS * WIDTH * 2  # scores and their product with the values, not halved by the mask
    assert model_flops(capture(Attention(True), args=(x,))) == 3 * (2 * 2 * LAYER + scores)
    assert model_flops(capture(Attention(False), args=(x,))) == 2 * 2 * LAYER + scores
