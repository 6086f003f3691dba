"""What random operators draw on one device, written with numpy from the specification in ``runtime.kernels.philox``."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch

Array = Any
WORD = np.uint64(0xFFFFFFFF)


def philox(block: Array, lane: int, draw: int, step: int, seed: int) -> list[Array]:
    """Four words for every block."""
    block = np.asarray(block, dtype=np.uint64)
    shift = np.uint64(32)
    c = [block & WORD, (block >> shift) + np.uint64(lane << 24)]
    c += [np.full_like(block, draw), np.full_like(block, step)]
    k = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
    for _ in range(10):
        first, second = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (second >> shift) ^ c[1] ^ np.uint64(k[0]),
            second & WORD,
            (first >> shift) ^ c[3] ^ np.uint64(k[1]),
            first & WORD,
        ]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def _blocks(shape: Sequence[int], per_block: int) -> tuple[Array, Array]:
    """Block and place in it of every element."""
    columns = shape[-1] if len(shape) else 1
    rows = np.arange(math.prod(shape[:-1])).reshape(-1, 1)
    column = np.arange(columns).reshape(1, -1)
    blocks = rows * -(-columns // per_block) + column // per_block
    return blocks.reshape(shape), np.broadcast_to(column % per_block, blocks.shape).reshape(shape)


def words(shape: Sequence[int], *, lane: int = 0, draw: int, step: int, seed: int) -> Array:
    """A word for every element of a tensor."""
    blocks, places = _blocks(shape, 4)
    return np.choose(places, philox(blocks, lane, draw, step, seed))


def keeps(shape: Sequence[int], p: float, *, draw: int, step: int, seed: int) -> torch.Tensor:
    """Which elements of a tensor dropout keeps."""
    blocks, places = _blocks(shape, 8)
    word = np.choose(places // 2, philox(blocks, 0, draw, step, seed))
    half = np.where(places % 2 == 0, word & np.uint64(0xFFFF), word >> np.uint64(16))
    own = int(philox(0, 255, draw, step, seed)[0])
    scaled = p * 65536
    threshold = math.floor(scaled) + (own < (scaled - math.floor(scaled)) * 2**32)
    return torch.from_numpy(np.asarray(half >= threshold))


@contextlib.contextmanager
def dropping_as_on_one_device(*, step: int, seed: int) -> Iterator[None]:
    """A model in here drops what the specification says, its calls numbered in order."""
    numbers = itertools.count()

    def dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if not training or not p:
            return x
        return x * keeps(x.shape, p, draw=next(numbers), step=step, seed=seed) / (1 - p)

    def attention(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        assert not enable_gqa
        scores = query @ key.mT * (scale or query.shape[-1] ** -0.5)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        return dropout(scores.softmax(-1), dropout_p) @ value

    functional = torch.nn.functional
    with (
        mock.patch.object(functional, "dropout", dropout),
        mock.patch.object(functional, "scaled_dot_product_attention", attention),
    ):
        yield
