"""Small graphs for tests of the pattern pass, and a way to run them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import runtime.kernels  # noqa: F401  (registers the fused operators)
from passes.capture import capture
from passes.fuse import Fused, fuse
from passes.ir.graph import Graph


class Layer(nn.Module):
    """A function of a tensor and a weight as a module, so that it has a path."""

    def __init__(self, function: Callable[..., torch.Tensor], width: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self.function(*tensors, self.weight, self.bias)


class Model(nn.Module):
    """One layer, and the sum of what it gives as the loss."""

    def __init__(self, function: Callable[..., Any], width: int) -> None:
        super().__init__()
        self.layer = Layer(function, width)

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self.layer(*tensors).float().sum()


def graph_of(
    function: Callable[..., Any], *shapes: tuple[int, ...], width: int = 8, dtype: torch.dtype = torch.float32
) -> Graph:
    """The graph of ``function(*tensors, weight, bias)`` in a module called ``layer``."""
    model = Model(function, width).to(dtype)
    tensors = tuple(torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    return capture(model, args=tensors)


def fused(function: Callable[..., Any], *shapes: tuple[int, ...], **options: Any) -> Fused:
    """What the pattern pass makes of ``graph_of`` the same arguments."""
    return fuse(graph_of(function, *shapes, **options))


def fused_rows(result: Fused) -> dict[str, int]:
    """How often each pattern was matched."""
    return dict(Counter(match.pattern for match in result.matches))


def operators(graph: Graph) -> list[str]:
    """The operators of a graph in order, but for the loss at its end."""
    return [node.op for node in graph.nodes if node.module_path]
