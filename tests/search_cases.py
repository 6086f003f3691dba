"""Small models and prices shared by the search tests."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cost_models.collectives import collective_seconds
from passes.capture import capture
from passes.ir.graph import Graph
from passes.ir.types import MeshShape
from passes.plan import Plan
from planner.sharding_ilp import search


@dataclass(frozen=True)
class UnitCosts:
    """Collectives with latency and bandwidth 1, compute for ``second_per_flop`` (free by default)."""

    axes: Mapping[str, int]
    latency: float = 1.0
    second_per_flop: float = 0.0
    second_per_byte: float = 0.0

    def compute_seconds(self, *, flops: float, num_bytes: float, dtype: str, kind: str | None = None) -> float:
        return self.second_per_flop * flops + self.second_per_byte * num_bytes

    def collective_seconds(self, collective: str, *, num_bytes: float, axis: str) -> float:
        return collective_seconds(
            collective, num_bytes=num_bytes, group_size=self.axes[axis], latency=self.latency, bandwidth=1.0
        )


class Linears(nn.Module):
    """Linear layers one after the other, with an activation between them if asked."""

    def __init__(self, *sizes: int, activation: bool = False, bias: bool = False) -> None:
        super().__init__()
        pairs = itertools.pairwise(sizes)
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=bias, device="meta") for a, b in pairs)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if self.activation and index < len(self.layers) - 1:
                x = torch.relu(x)
        return x


class Attention(nn.Module):
    """Self-attention without masks or biases."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        for name in ("q", "k", "v", "o"):
            setattr(self, name, nn.Linear(hidden, hidden, bias=False, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        q, k, v = (
            layer(x).view(batch, length, self.heads, hidden // self.heads).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o(mixed.transpose(1, 2).reshape(batch, length, hidden))


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(hidden, device="meta") for _ in range(2))
        self.attention = Attention(hidden, heads)
        self.up = nn.Linear(hidden, 4 * hidden, device="meta")
        self.down = nn.Linear(4 * hidden, hidden, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Stack(nn.Module):
    """Several layers."""

    def __init__(self, depth: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(hidden, heads) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def square_mean(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    """A loss that is not linear."""
    return outputs.pow(2).mean()


def capture_on(model: nn.Module, *shape: int, loss: bool = True, requires_grad: bool = False) -> Graph:
    """Capture ``model`` on one float input of ``shape``."""
    x = torch.zeros(shape, device="meta", requires_grad=requires_grad)
    return capture(model, args=(x,), loss_fn=square_mean if loss else None)


def plan_with_unit_costs(graph: Graph, axes: Mapping[str, int], *, latency: float = 1.0, **options: Any) -> Plan:
    """Search with ``UnitCosts``."""
    costs = UnitCosts(dict(axes), latency)
    return search(graph, mesh=MeshShape.from_dict(axes), cost_model=costs, cluster_info={}, **options)


def counted(plan: Plan) -> dict[tuple[str, str], tuple[int, int]]:
    """(collective, phase) → (count, bytes), over all axes."""
    program_sizes: dict[tuple[str, str], tuple[int, int]] = {}
    for item in plan.collectives:
        count, num_bytes = program_sizes.get((item.collective, item.phase), (0, 0))
        program_sizes[item.collective, item.phase] = (count + item.count, num_bytes + item.num_bytes)
    return program_sizes
