"""Random operators on sharded tensors: one draw where a tensor is whole, independent draws where it is sharded.

Numbers come from a generator of their own for each call, seeded with the base seed, the number of the call and the
shard's place on the axes that shard the tensor. Ranks that hold the same data so draw the same numbers whatever else
they do, as long as all ranks set the same seed and make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
from spmd_types._local import _build_rank_to_group_local, _get_local_tensor_mode
from torch._subclasses.fake_tensor import FakeTensor

from runtime.ops.types import groups_of

_MASK = (1 << 63) - 1


class _State:
    """Base seed, and how many calls have drawn from it."""

    base = 0
    calls = 0


def seed(base: int) -> None:
    """Start the sequence of random draws anew; give every rank the same ``base``."""
    _State.base, _State.calls = base, 0


def get_random_state() -> tuple[int, int]:
    """Base seed and number of calls so far: what a checkpoint stores, what a recomputation goes back to."""
    return _State.base, _State.calls


def set_random_state(state: tuple[int, int]) -> None:
    """Go back to a state that ``get_random_state`` gave."""
    _State.base, _State.calls = state


def _next_seed() -> int:
    _State.calls += 1
    return _mixed(_mixed(_State.base) + _State.calls)


def _mixed(number: int) -> int:
    """SplitMix64's finaliser: neighbouring numbers give unrelated seeds."""
    number = (number + 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & ((1 << 64) - 1)
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & ((1 << 64) - 1)
    return (number ^ (number >> 31)) & _MASK


def _draw(
    like: torch.Tensor,
    number: int,
    groups: tuple[dist.ProcessGroup, ...],
    function: Callable[[torch.Tensor, torch.Generator], torch.Tensor],
) -> torch.Tensor:
    """``function(like, generator)`` with this shard's generator, on every rank of ``LocalTensorMode`` if it is on."""
    if like.is_meta or isinstance(like, FakeTensor):
        return function(like, None)  # type: ignore[arg-type]

    def on_shard(shard: int, tensor: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator(device=tensor.device)
        generator.manual_seed(_mixed(number + shard))
        return function(tensor, generator)

    mode = _get_local_tensor_mode(like)
    if mode is None:
        return on_shard(_place([dist.get_rank(group) for group in groups], groups), like)
    places = [_build_rank_to_group_local(group) for group in groups]
    return mode.tensor_map(
        like, lambda rank, tensor: on_shard(_place([place[rank] for place in places], groups), tensor)
    )


def _place(coordinates: Sequence[int], groups: Sequence[dist.ProcessGroup]) -> int:
    """Number of a shard from its coordinates on the axes, outermost first."""
    place = 0
    for coordinate, group in zip(coordinates, groups):
        place = place * dist.get_world_size(group) + coordinate
    return place


def dropout(x: torch.Tensor, p: float, *, axes: Sequence[str] = ()) -> torch.Tensor:
    """Zero each element with probability ``p`` and scale the others by 1 / (1 - p).

    ``axes`` are the mesh axes that shard ``x``; on the others its copies are masked alike.
    """
    return _Dropout.apply(x, p, _next_seed(), groups_of(axes))


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, p: float, number: int, groups: tuple[dist.ProcessGroup, ...]
    ) -> torch.Tensor:
        kept = _draw(x, number, groups, lambda like, generator: _uniform(like, generator) >= p)
        ctx.save_for_backward(kept)
        ctx.scale = 1.0 / (1.0 - p) if p < 1.0 else 0.0
        return x * kept * ctx.scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        (kept,) = ctx.saved_tensors
        return grad * kept * ctx.scale, None, None, None


def rand_like(x: torch.Tensor, *, axes: Sequence[str] = ()) -> torch.Tensor:
    """Uniform numbers in [0, 1) shaped as ``x``; ``axes`` as in ``dropout``."""
    return _Random.apply(x, _next_seed(), groups_of(axes), _uniform)


def randn_like(x: torch.Tensor, *, axes: Sequence[str] = ()) -> torch.Tensor:
    """Normal numbers shaped as ``x``; ``axes`` as in ``dropout``."""
    return _Random.apply(x, _next_seed(), groups_of(axes), _normal)


def bernoulli(x: torch.Tensor, *, axes: Sequence[str] = ()) -> torch.Tensor:
    """1 with the probabilities in ``x``, else 0; ``axes`` as in ``dropout``."""
    return _Random.apply(x, _next_seed(), groups_of(axes), _chances)


class _Random(torch.autograd.Function):
    """Numbers drawn for ``x``, which gets no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        number: int,
        groups: tuple[dist.ProcessGroup, ...],
        function: Callable[[torch.Tensor, torch.Generator], torch.Tensor],
    ) -> torch.Tensor:
        drawn = _draw(x, number, groups, function)
        ctx.mark_non_differentiable(drawn)
        return drawn

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, ...]:  # type: ignore[override]
        return None, None, None, None


def _uniform(like: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    return torch.rand(like.shape, generator=generator, dtype=_drawn_dtype(like), device=like.device)


def _normal(like: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)


def _chances(like: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    return (_uniform(like, generator) < like).to(like.dtype)


def _drawn_dtype(like: torch.Tensor) -> torch.dtype:
    """float32 where ``like`` is narrower: a uniform half has too few values to compare with a probability."""
    return like.dtype if like.dtype == torch.float64 else torch.float32


spmd.register_local_autograd_function(_Dropout)
spmd.register_local_autograd_function(_Random)
