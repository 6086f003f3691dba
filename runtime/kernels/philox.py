"""Random bits by counter: what an element draws depends on its position in the whole tensor, not on who holds it.

Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) turns a counter of four 32-bit
words under a key of two into four random words w0, w1, w2, w3. The layout is a specification: whatever draws must keep
to it, on any device.

    key      k0, k1   the seed's low and high half
    counter  c0       block mod 2^32
             c1       block div 2^32 (below 2^24) + 2^24 × lane
             c2       number of the draw (the random operators of a model are numbered in the order of its graph)
             c3       step: number of the training step, or 2^31 + number of the call outside of training

The element at (row, column) of a tensor of ``columns`` columns (its last dim; all others together are the rows, in
row-major order, both of the whole tensor)

    draws a word in        block row × ceil(columns / 4) + column div 4:   w[column mod 4],
    draws half a word in   block row × ceil(columns / 8) + column div 8:   w[column mod 8 div 2], its low 16 bits for
                           even columns, its high 16 bits for odd ones.

``lane`` numbers the words of one element where it needs several; halves are in lane 0, and lane 255 is for what a draw
needs once, in block 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from runtime.kernels.library import register

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF
_HALF = 0xFFFF
_LANE = 1 << 24
#: Lane of the one word that a draw needs for itself.
OWN_LANE = 255
#: Blocks that are computed at once, on a processor (its caches hold them) and on a GPU (64 MiB a tensor).
_PIECE, _PIECE_ON_GPU = 1 << 14, 1 << 23


def philox(counter: Sequence[Any], key: tuple[int, int]) -> tuple[Any, Any, Any, Any]:
    """The four words for a counter of integers, or of int64 tensors among them (of one shape)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = _next_factor(p1, c1, k0)
        c2 = _next_factor(p0, c3, k1)
        c1, c3 = _low(p1), _low(p0)
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1 & _WORD, c2, c3 & _WORD


def _next_factor(product: Any, word: Any, key: int) -> Any:
    result = product >> 32  # a shift of the sign too: masked below
    result ^= word
    result ^= key
    result &= _WORD
    return result


def _low(product: Any) -> Any:
    """The low word; of a tensor, with bits above it that the next mask removes."""
    return product & _WORD if isinstance(product, int) else product


def own_word(seed: int, draw: int, step: int) -> int:
    """The word that a draw needs once."""
    word: int = philox((0, OWN_LANE * _LANE, draw, step), (seed & _WORD, (seed >> 32) & _WORD))[0]
    return word


def _pieces(
    shape: Sequence[int], starts: Sequence[int], whole: Sequence[int], per_block: int, device: torch.device
) -> tuple[torch.Tensor, int]:
    """Block numbers [rows, blocks of a row] of a part of a tensor, and how many of the first row's are not the part's.

    Args:
        starts: index of the part's first element, by dim of the tensor of shape ``whole``.
    """
    rows = torch.zeros((1,) * max(len(shape) - 1, 0), dtype=torch.int64, device=device)
    stride = 1
    for dim in range(len(shape) - 2, -1, -1):
        index = torch.arange(starts[dim], starts[dim] + shape[dim], device=device) * stride
        rows = rows + index.reshape(-1, *(1,) * (len(shape) - 2 - dim))
        stride *= whole[dim]
    columns, start, width = (whole[-1], starts[-1], shape[-1]) if shape else (1, 0, 1)
    first, last = start // per_block, -(-(start + width) // per_block)
    blocks = rows.reshape(-1, 1) * -(-columns // per_block) + torch.arange(first, last, device=device)
    return blocks, start - first * per_block


def _words(
    blocks: torch.Tensor, num_blocks: int, lane: int, seed: int, draw: int, step: int
) -> Iterator[tuple[slice, tuple[torch.Tensor, ...]]]:
    """The words of some of the blocks of a tensor, a piece at a time."""
    piece = _PIECE if blocks.device.type == "cpu" else _PIECE_ON_GPU
    key = (seed & _WORD, (seed >> 32) & _WORD)
    is_short = num_blocks <= _WORD
    for start in range(0, len(blocks), piece):
        part = slice(start, start + piece)
        number = blocks[part]
        high = 0 if is_short else number >> 32
        yield part, philox((number if is_short else number & _WORD, high + lane * _LANE, draw, step), key)


def _keep_mask(
    like: torch.Tensor,
    starts: Sequence[int],
    whole: Sequence[int],
    threshold: int,
    seed: int,
    draw: int,
    step: int,
) -> torch.Tensor:
    blocks, skipped = _pieces(like.shape, starts, whole, 8, like.device)
    result = torch.empty((blocks.numel(), 8), dtype=torch.bool, device=like.device)
    for part, words in _words(blocks.flatten(), _num_blocks(whole, 8), 0, seed, draw, step):
        for place, word in enumerate(words):
            torch.ge(word & _HALF, threshold, out=result[part, 2 * place])
            torch.ge(word, threshold << 16, out=result[part, 2 * place + 1])
    return _cropped(result.reshape(len(blocks), 8 * blocks.shape[1]), skipped, like.shape)


def _random_words(
    like: torch.Tensor, starts: Sequence[int], whole: Sequence[int], lane: int, seed: int, draw: int, step: int
) -> torch.Tensor:
    blocks, skipped = _pieces(like.shape, starts, whole, 4, like.device)
    result = torch.empty((blocks.numel(), 4), dtype=torch.int64, device=like.device)
    for part, words in _words(blocks.flatten(), _num_blocks(whole, 4), lane, seed, draw, step):
        torch.stack(words, -1, out=result[part])
    return _cropped(result.reshape(len(blocks), 4 * blocks.shape[1]), skipped, like.shape)


def _num_blocks(whole: Sequence[int], per_block: int) -> int:
    return math.prod(whole[:-1]) * -(-(whole[-1] if whole else 1) // per_block)


def _cropped(rows: torch.Tensor, skipped: int, shape: Sequence[int]) -> torch.Tensor:
    """The part's columns of rows of whole blocks."""
    width = shape[-1] if shape else 1
    return rows[:, skipped : skipped + width].reshape(shape).contiguous()


#: ``keep_mask(like, starts, whole, threshold, seed, draw, step)``: whether half a word is at least ``threshold``.
keep_mask = register(
    "keep_mask(Tensor like, int[] starts, int[] whole, int threshold, int seed, int draw, int step) -> Tensor",
    aten=_keep_mask,
    triton=_keep_mask,
    shapes=lambda like, *_: like.new_empty(like.shape, dtype=torch.bool),
)
#: ``random_words(like, starts, whole, lane, seed, draw, step)``: a word of every element, as int64.
random_words = register(
    "random_words(Tensor like, int[] starts, int[] whole, int lane, int seed, int draw, int step) -> Tensor",
    aten=_random_words,
    triton=_random_words,
    shapes=lambda like, *_: like.new_empty(like.shape, dtype=torch.int64),
)
