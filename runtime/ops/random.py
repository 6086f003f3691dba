"""Random operators on sharded tensors: every element draws by its position in the whole tensor, whoever holds it.

Numbers depend on the seed, the training step, the number of the random operator in the model's graph, and the
element's position, by the counters of ``runtime.kernels.philox``; so they are the same under any plan, for any
micro-batch, where a region runs again, and after a resume. Steps are counted by whoever runs programs
(``begin_step``): all ranks set the same seed and run the same steps.

    uniform  in [0, 1): the upper bits of the word of lane 0, as many as the dtype has (float32: 24); float64: that word
             and the upper 21 bits of the word of lane 1
    normal   √(−2 ln u) · cos(2π v), u = (word of lane 0 + 1) / 2^32, v = word of lane 1 / 2^32
    integer  low + (word of lane 0 + 2^32 × lower 31 bits of the word of lane 1) mod (high − low)
    dropout  keeps an element whose half word is at least t: p · 2^16 rounded up if the draw's own word is below its
             fraction (times 2^32), else down, so that the probability is p exactly
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist

from passes.ir.types import part_of_dim
from runtime.kernels.philox import keep_mask, own_word, random_words
from runtime.ops.mesh_types import groups_of
from runtime.ops.microbatch import current_microbatch
from runtime.programs.program import Block
from runtime.torch_compat.spmd_internals import local_tensor_mode_of, mesh_of_thread, places_in_group

#: Added to the numbers of calls that are no training steps.
_CALLS = 1 << 31
#: Which mesh axis cuts which dim of a tensor, outermost first.
Shards = Mapping[str, int]


class _DrawState:
    """Base seed, training steps and other calls so far, and the step that draws now."""

    seed = 0
    steps = 0
    calls = 0
    current = 0


def seed(base: int) -> None:
    """Start the sequence of random draws anew; give every rank the same ``base``."""
    _DrawState.seed, _DrawState.steps, _DrawState.calls, _DrawState.current = base, 0, 0, 0


def begin_step(*, training: bool) -> None:
    """A training step, or another call, begins: what is drawn from here on is new."""
    if training:
        _DrawState.steps += 1
        _DrawState.current = _DrawState.steps
    else:
        _DrawState.calls += 1
        _DrawState.current = _CALLS + _DrawState.calls


def get_random_state() -> tuple[int, int, int, int]:
    """Seed, training steps, other calls, current step: what a checkpoint stores, what a recomputation goes back to."""
    return _DrawState.seed, _DrawState.steps, _DrawState.calls, _DrawState.current


def set_random_state(state: Sequence[int]) -> None:
    """Go back to a state that ``get_random_state`` gave (or, with two numbers, that an older checkpoint has)."""
    if len(state) == 2:
        state = (state[0], state[1], 0, state[1])
    _DrawState.seed, _DrawState.steps, _DrawState.calls, _DrawState.current = state


@dataclass(frozen=True)
class _Draw:
    """What a random operator draws from: seed, step, its number, and how its tensor is sharded."""

    seed: int
    step: int
    number: int
    shards: tuple[tuple[dist.ProcessGroup, int, int, int], ...]  # group, dim, micro-batches and which of them
    whole: Mapping[int, int]  # of dims that are cut unevenly: their whole length

    def words(self, like: torch.Tensor, starts: Sequence[int], whole: Sequence[int], lane: int) -> torch.Tensor:
        return random_words(like, starts, whole, lane, self.seed, self.number, self.step)


def _draw(number: int, of: Block | None, shards: Shards, whole: Mapping[int, int] | None = None) -> _Draw:
    microbatch = current_microbatch()

    def cut(axis: str) -> tuple[int, int]:
        return (microbatch.count, microbatch.index) if microbatch is not None and microbatch.axis == axis else (1, 0)

    groups = groups_of(tuple(shards))
    first = 0 if of is None else of.first_draw
    base = _DrawState.seed & ((1 << 64) - 1)
    return _Draw(
        base - (1 << 64) if base >> 63 else base,  # as torch's integers have it
        _DrawState.current,
        first + number,
        tuple((group, dim, *cut(axis)) for group, (axis, dim) in zip(groups, shards.items())),
        whole or {},
    )


#: Makes a tensor from this rank's part, the index of its first element, and the shape of the whole.
_Make = Callable[[torch.Tensor, Sequence[int], Sequence[int]], torch.Tensor]


def _on_shard(like: torch.Tensor, draw: _Draw, make: _Make) -> torch.Tensor:
    """``make`` for this rank's part of a tensor, or that of every rank of ``LocalTensorMode``."""
    like = like.detach()

    def made(tensor: torch.Tensor, coordinates: Sequence[int]) -> torch.Tensor:
        index, count = [0] * tensor.dim(), [1] * tensor.dim()
        for coordinate, (group, dim, num_microbatches, microbatch) in zip(coordinates, draw.shards):
            size = dist.get_world_size(group) * num_microbatches
            index[dim] = index[dim] * size + coordinate * num_microbatches + microbatch
            count[dim] *= size
        starts = [place * size for place, size in zip(index, tensor.shape)]
        whole = [size * parts for size, parts in zip(tensor.shape, count)]
        for dim, length in draw.whole.items():
            whole[dim], starts[dim] = length, part_of_dim(length, count[dim], index[dim])[0]
        return make(tensor, starts, whole)

    mode = local_tensor_mode_of(like)
    if mode is None:
        return made(like, [dist.get_rank(group) for group, *_ in draw.shards])
    places = [places_in_group(group) for group, *_ in draw.shards]
    result: torch.Tensor = mode.tensor_map(like, lambda rank, tensor: made(tensor, [place[rank] for place in places]))
    return result


def dropout(
    x: torch.Tensor,
    p: float,
    *,
    draw: int = 0,
    of: Block | None = None,
    shards: Shards | None = None,
    whole: Mapping[int, int] | None = None,
) -> torch.Tensor:
    """Zero each element with probability ``p`` and scale the others by 1 / (1 - p).

    Args:
        draw: number of the operator among those of ``of`` (None: of the model).
        shards: which mesh axis cuts which dim of ``x``, outermost first; on the others its copies are masked alike.
        whole: length of the dims that are cut unevenly, on all ranks together.
    """
    result: torch.Tensor = _Dropout.apply(x, p, _draw(draw, of, shards or {}, whole))
    return result


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, p: float, draw: _Draw) -> torch.Tensor:
        whole, fraction = divmod(p * (1 << 16), 1.0)
        threshold = int(whole) + (own_word(draw.seed, draw.number, draw.step) < fraction * 2**32)

        def mask(tensor: torch.Tensor, starts: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
            return keep_mask(tensor, starts, shape, threshold, draw.seed, draw.number, draw.step)

        keep = _on_shard(x, draw, mask)
        ctx.save_for_backward(keep)
        ctx.scale = 1.0 / (1.0 - p) if p < 1.0 else 0.0
        return _masked(x, keep, ctx.scale)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        (keep,) = ctx.saved_tensors
        return _masked(grad, keep, ctx.scale), None, None


def _masked(x: torch.Tensor, keep: torch.Tensor, scale: float) -> torch.Tensor:
    """``x · keep · scale``; a product with truth values takes a processor three times as long."""
    return torch.where(keep, x, 0.0).mul_(scale)


def rand_like(
    x: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    draw: int = 0,
    of: Block | None = None,
    shards: Shards | None = None,
) -> torch.Tensor:
    """Uniform numbers in [0, 1) shaped as ``x``; the rest as in ``dropout``."""
    return _drawn(x, _draw(draw, of, shards or {}), _uniform, dtype)


def randn_like(
    x: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    draw: int = 0,
    of: Block | None = None,
    shards: Shards | None = None,
) -> torch.Tensor:
    """Normal numbers shaped as ``x``; the rest as in ``dropout``."""
    return _drawn(x, _draw(draw, of, shards or {}), _normal, dtype)


def randint_like(
    x: torch.Tensor,
    low: int,
    high: int,
    *,
    dtype: torch.dtype | None = None,
    draw: int = 0,
    of: Block | None = None,
    shards: Shards | None = None,
) -> torch.Tensor:
    """Whole numbers from ``low`` up to ``high`` - 1 shaped as ``x``; the rest as in ``dropout``."""
    return _drawn(x, _draw(draw, of, shards or {}), partial(_integers, low, high), dtype)


def bernoulli(x: torch.Tensor, *, draw: int = 0, of: Block | None = None, shards: Shards | None = None) -> torch.Tensor:
    """1 with the probabilities in ``x``, else 0; the rest as in ``dropout``."""
    return _drawn(x, _draw(draw, of, shards or {}), _chances)


def rand(
    size: Sequence[int], *, dtype: torch.dtype, draw: int = 0, of: Block | None = None, shards: Shards | None = None
) -> torch.Tensor:
    """Uniform numbers in [0, 1) for this rank's part, of ``size``, of a tensor; the rest as in ``dropout``."""
    return rand_like(_unfilled(size, dtype), draw=draw, of=of, shards=shards)


def randn(
    size: Sequence[int], *, dtype: torch.dtype, draw: int = 0, of: Block | None = None, shards: Shards | None = None
) -> torch.Tensor:
    """Normal numbers for this rank's part, of ``size``, of a tensor; the rest as in ``dropout``."""
    return randn_like(_unfilled(size, dtype), draw=draw, of=of, shards=shards)


def randint(
    size: Sequence[int],
    low: int,
    high: int,
    *,
    dtype: torch.dtype,
    draw: int = 0,
    of: Block | None = None,
    shards: Shards | None = None,
) -> torch.Tensor:
    """Whole numbers from ``low`` up to ``high`` - 1 for this rank's part, of ``size``; the rest as in ``dropout``."""
    return randint_like(_unfilled(size, dtype), low, high, draw=draw, of=of, shards=shards)


def _unfilled(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the device on which the program makes tensors; for the type checker, R on every axis."""
    tensor = torch.empty(tuple(size), dtype=dtype)
    mesh = mesh_of_thread()
    if tensor.is_meta and mesh is not None:
        spmd.assert_type(tensor, dict.fromkeys(mesh.names, spmd.R))
    return tensor


_Words = Callable[[int], torch.Tensor]
#: Makes numbers shaped as a tensor, of a dtype, from the words of lanes.
_Distribution = Callable[[torch.Tensor, torch.dtype, _Words], torch.Tensor]


def _drawn(
    like: torch.Tensor, draw: _Draw, distribution: _Distribution, dtype: torch.dtype | None = None
) -> torch.Tensor:
    result: torch.Tensor = _Random.apply(like, draw, distribution, dtype or like.dtype)
    return result


class _Random(torch.autograd.Function):
    """Numbers drawn for ``x``, which gets no gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, draw: _Draw, distribution: _Distribution, dtype: torch.dtype
    ) -> torch.Tensor:
        def make(tensor: torch.Tensor, starts: Sequence[int], whole: Sequence[int]) -> torch.Tensor:
            return distribution(tensor, dtype, lambda lane: draw.words(tensor, starts, whole, lane))

        numbers = _on_shard(x, draw, make)
        ctx.mark_non_differentiable(numbers)
        return numbers

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, ...]:  # type: ignore[override]
        return None, None, None, None


def _uniform(like: torch.Tensor, dtype: torch.dtype, words: _Words) -> torch.Tensor:
    eps = torch.finfo(dtype).eps
    if dtype == torch.float64:
        return ((words(0) << 21) + (words(1) >> 11)).to(torch.float64) * (0.5 * eps)
    return ((words(0) >> (31 + round(math.log2(eps)))).to(torch.float32) * (0.5 * eps)).to(dtype)


def _normal(like: torch.Tensor, dtype: torch.dtype, words: _Words) -> torch.Tensor:
    radius = torch.sqrt(-2.0 * torch.log((words(0) + 1).to(torch.float64) * 2.0**-32))
    return (radius * torch.cos(words(1).to(torch.float64) * (2.0 * math.pi * 2.0**-32))).to(dtype)


def _integers(low: int, high: int, like: torch.Tensor, dtype: torch.dtype, words: _Words) -> torch.Tensor:
    number = words(0) + ((words(1) & ((1 << 31) - 1)) << 32)
    return (low + number % (high - low)).to(dtype)


def _chances(like: torch.Tensor, dtype: torch.dtype, words: _Words) -> torch.Tensor:
    return (words(0).to(torch.float64) * 2.0**-32 < like).to(dtype)


spmd.register_local_autograd_function(_Dropout)
spmd.register_local_autograd_function(_Random)
