"""Attention piece by piece is one call on a batch of pieces, where the pieces are equal and nothing else differs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from passes.ir.graph import Graph
from tests.capture_parity import assert_parity

PIECES, SIZE = 3, 4
SIZES = (SIZE,) * PIECES


class Pieces(nn.Module):
    """Projects tokens of several images, attends within each, and joins them again."""

    def __init__(self, attend: Callable[..., torch.Tensor], sizes: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(8, 24, dtype=torch.float64)
        self.attend, self.sizes = attend, sizes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.linear(x).reshape(len(x), 3, 2, 4).permute(1, 2, 0, 3).unsqueeze(1).unbind(0)
        return self.attend(*(each.split(list(self.sizes), dim=2) for each in heads)).square().mean()


def fused(q: tuple[torch.Tensor, ...], k: tuple[torch.Tensor, ...], v: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.cat([F.scaled_dot_product_attention(*each).transpose(1, 2) for each in zip(q, k, v)], dim=1)


def causal(q: tuple[torch.Tensor, ...], k: tuple[torch.Tensor, ...], v: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.cat([F.scaled_dot_product_attention(*each, is_causal=True) for each in zip(q, k, v)], dim=2)


def by_products(q: tuple[torch.Tensor, ...], k: tuple[torch.Tensor, ...], v: tuple[torch.Tensor, ...]) -> torch.Tensor:
    joined = []
    for query, key, value in zip(q, k, v):
        weights = torch.softmax(query @ key.transpose(2, 3) * 0.5, dim=-1)
        joined.append((weights @ value).transpose(1, 2).reshape(1, query.shape[2], 8))
    return torch.cat(joined, dim=1)


def as_a_batch(q: tuple[torch.Tensor, ...], k: tuple[torch.Tensor, ...], v: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.cat([(query * key).sigmoid() + value for query, key, value in zip(q, k, v)], dim=0)


def turned(q: tuple[torch.Tensor, ...], k: tuple[torch.Tensor, ...], v: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Every query meets the keys of another piece."""
    return fused(q, (*k[1:], k[0]), v)


def unequal(q: tuple[torch.Tensor, ...], k: tuple[torch.Tensor, ...], v: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Queries meet more keys in one piece than in another."""
    return fused(q, *(torch.cat(each, dim=2).split([3, 4, 5], dim=2) for each in (k, v)))


def scaled(q: tuple[torch.Tensor, ...], k: tuple[torch.Tensor, ...], v: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Every piece has a scale of its own."""
    pieces = enumerate(zip(q, k, v))
    return torch.cat([F.scaled_dot_product_attention(*each, scale=0.5 + place) for place, each in pieces], dim=2)


def over_pieces(q: tuple[torch.Tensor, ...], k: tuple[torch.Tensor, ...], v: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Attention to the dim that a batch would have in place of the one of size 1."""
    return torch.cat([torch.softmax(query, dim=0) * key + value for query, key, value in zip(q, k, v)], dim=2)


def count(graph: Graph, *names: str) -> int:
    return sum(node.op.split(".")[1] in names for node in graph.nodes)


@pytest.mark.parametrize(
    ("attend", "operator"),
    [
        (fused, "scaled_dot_product_attention"),
        (causal, "scaled_dot_product_attention"),
        (by_products, "softmax"),
        (as_a_batch, "sigmoid"),
    ],
)
def test_equal_pieces_are_one_call(attend: Callable[..., torch.Tensor], operator: str) -> None:
    graph = assert_parity(Pieces(attend, SIZES), args=(torch.randn(PIECES * SIZE, 8, dtype=torch.float64),))
    assert count(graph, operator) == 1 and not count(graph, "cat", "split_with_sizes")
    (call,) = (node for node in graph.nodes if node.op.split(".")[1] == operator)
    assert call.output.shape[0] == PIECES


@pytest.mark.parametrize(
    ("attend", "sizes", "operator"),
    [
        (fused, (3, 4, 5), "scaled_dot_product_attention"),
        (turned, SIZES, "scaled_dot_product_attention"),
        (unequal, SIZES, "scaled_dot_product_attention"),
        (scaled, SIZES, "scaled_dot_product_attention"),
        (over_pieces, SIZES, "softmax"),
    ],
)
def test_other_pieces_stay_apart(attend: Callable[..., torch.Tensor], sizes: tuple[int, ...], operator: str) -> None:
    graph = assert_parity(Pieces(attend, sizes), args=(torch.randn(sum(sizes), 8, dtype=torch.float64),))
    assert count(graph, operator) == len(sizes)
