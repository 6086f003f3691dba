"""The pattern pass: spellings of rotary embeddings that match."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fuse_graphs import fused, fused_rows, operators
from torch import nn

from passes.capture import capture
from passes.fuse import fuse


def half_turned(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def chunk_turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def neighbours_turned(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def pairs_turned(x: torch.Tensor) -> torch.Tensor:
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((-odd, even), dim=-1).flatten(-2)


@pytest.mark.parametrize("turned", [half_turned, chunk_turned, neighbours_turned, pairs_turned])
@pytest.mark.parametrize("width", [8, 4])
def test_rotary(turned: Callable[[torch.Tensor], torch.Tensor], width: int) -> None:
    """Of all of the tensor, and of a part of it."""

    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        part, rest = x[..., :width], x[..., width:]
        rotated = part * cos + turned(part) * sin
        return torch.cat((rotated, rest), -1) if width < 8 else rotated

    result = fused(rotate, (2, 3, 5, 8), (5, width), (5, width))
    assert fused_rows(result) == {"rotary": 1}
    assert operators(result.graph) == ["meshwright.rotary.default"]
    rotary = next(node for node in result.graph.nodes if node.op.startswith("meshwright."))
    assert rotary.args[3] is (turned in (neighbours_turned, pairs_turned))


def halves(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.chunk(2, dim=-1)


def neighbours(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x[..., ::2], x[..., 1::2]


def pairs(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.unflatten(-1, (-1, 2)).unbind(-1)


def side_by_side(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.cat((first, second), dim=-1)


def alternating(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.stack((first, second), dim=-1).flatten(-2)


@pytest.mark.parametrize("width", [8, 4])
@pytest.mark.parametrize("turns_back", [False, True])
@pytest.mark.parametrize(
    ("taken", "joined"),
    [(halves, side_by_side), (neighbours, alternating), (pairs, alternating), (neighbours, side_by_side)],
)
def test_rotary_of_two_sides(
    taken: Callable[..., tuple[torch.Tensor, ...]], joined: Callable[..., torch.Tensor], turns_back: bool, width: int
) -> None:
    """With one cosine and one sine for each pair; neighbours may come out as halves."""

    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        part, rest = x[..., :width], x[..., width:]
        first, second = taken(part)
        if turns_back:
            rotated = joined(first * cos + second * sin, second * cos - first * sin)
        else:
            rotated = joined(first * cos - second * sin, first * sin + second * cos)
        return torch.cat((rotated, rest), -1) if width < 8 else rotated

    result = fused(rotate, (2, 3, 5, 8), (5, width // 2), (5, width // 2))
    assert fused_rows(result) == {"rotary": 1}
    assert not {"aten.add.Tensor", "aten.sub.Tensor", "aten.stack.default"} & set(operators(result.graph))


def test_rotary_of_two_halves_and_the_rest_joined_at_once() -> None:
    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        first, second, rest = x[..., :2], x[..., 2:4], x[..., 4:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)

    assert fused_rows(fused(rotate, (2, 3, 8), (3, 2), (3, 2))) == {"rotary": 1}


def test_rotary_by_complex_numbers() -> None:
    """The product of complex numbers, as Llama was published."""

    def rotate(x: torch.Tensor, angle: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        turns = torch.polar(torch.ones_like(angle), angle)
        numbers = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(numbers * turns[:, None]).flatten(-2).type_as(x)

    result = fused(rotate, (2, 5, 3, 8), (5, 4))
    assert fused_rows(result) == {"rotary": 1}
    rotary = next(node for node in result.graph.nodes if node.op.startswith("meshwright."))
    assert rotary.args[3] is True and "aten.view_as_complex.default" not in operators(result.graph)


@pytest.mark.parametrize("shape", [(2, 5, 24), (3, 2048, 4096)])
def test_rotary_of_heads_and_pairs_taken_apart_at_once(shape: tuple[int, ...]) -> None:
    """Two reshapes after one another are one."""

    class Rotary(nn.Module):
        def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            first, second = pairs(x.unflatten(-1, (-1, 8)))
            cos, sin = cos[:, None], sin[:, None]
            return alternating(first * cos - second * sin, first * sin + second * cos).sum()

    tensors = [torch.empty(size, device="meta", requires_grad=True) for size in (shape, (shape[1], 4), (shape[1], 4))]
    result = fuse(capture(Rotary(), args=tuple(tensors)))
    assert fused_rows(result) == {"rotary": 1} and not result.near_misses
    rotary = next(node for node in result.graph.nodes if node.op.startswith("meshwright."))
    assert rotary.output.shape == (*shape[:2], shape[2] // 8, 8)


def test_a_norm_behind_complex_angles_keeps_what_it_reads() -> None:
    """Llama 4 norms what it has rotated: two patterns that meet in a value that one of them casts."""

    def rotate_and_norm(x: torch.Tensor, angle: torch.Tensor, weight: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)[:, None]).flatten(3).type_as(x)
        wide = turned.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).type_as(x) * weight

    result = fused(rotate_and_norm, (2, 3, 5, 8), (3, 4), dtype=torch.bfloat16)
    assert fused_rows(result) == {"rotary": 1, "rms_norm": 1}
    names = {value.name for value in result.graph.inputs} | {state.value.name for state in result.graph.states}
    for node in result.graph.nodes:
        assert names.issuperset(node.inputs)
        names.update(value.name for value in node.outputs)
