"""A random permutation that is computed where it is asked for, not stored.

A shuffled epoch over n samples needs a bijection on 0..n-1. ``torch.randperm`` would hold 8n bytes on every rank and
take O(n) to resume; this one takes O(1) of both. Up to ``LISTED`` samples the numbers are sorted by a random key.
Above that they go through a Feistel network (Luby and Rackoff, 1988) on the smallest even number of bits that holds n,
again and again until the result lies below n (cycle walking; Black and Rogaway, 2002): fewer than 4 times on average.
Everything is integer arithmetic defined here, so an order lasts whatever the versions of torch and numpy.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.uint64]

#: Sizes up to this are sorted by key: a Feistel network on a few bits reaches only some of the permutations.
LISTED = 1 << 16
_ROUNDS = 6
_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix(values: Integers) -> Integers:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014): a bijection on 64-bit integers that looks random."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def random_key(*numbers: int) -> int:
    """A 64-bit number that depends on all ``numbers`` and on their order."""
    key = 0
    for number in numbers:
        key = int(mix(np.array([(key + _GOLDEN + number) & _WORD], dtype=np.uint64))[0])
    return key


def keyed(values: Integers, key: int) -> Integers:
    """One random 64-bit number for each of ``values``."""
    return mix(mix(values + np.uint64(_GOLDEN)) + np.uint64(key))


class Permutation:
    """The order of ``size`` samples in one epoch.

    Args:
        size: how many samples there are.
        seed: any integer.
        epoch: each has an order of its own.
    """

    def __init__(self, size: int, *, seed: int, epoch: int) -> None:
        self.size = size
        self._keys = [random_key(seed, epoch, number) for number in range(_ROUNDS)]
        self._half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
        self._listed: NDArray[np.intp] | None = None
        if size <= LISTED:
            self._listed = np.argsort(keyed(np.arange(size, dtype=np.uint64), self._keys[0]), kind="stable")

    def __call__(self, start: int, stop: int) -> list[int]:
        """Samples at positions ``start`` to ``stop`` (not included)."""
        if self._listed is not None:
            return [int(index) for index in self._listed[start:stop]]
        indices = self._network(np.arange(start, stop, dtype=np.uint64))
        while len(outside := np.flatnonzero(indices >= self.size)):
            indices[outside] = self._network(indices[outside])
        return [int(index) for index in indices]

    def _network(self, values: Integers) -> Integers:
        mask = (np.uint64(1) << self._half) - np.uint64(1)
        left, right = values >> self._half, values & mask
        for key in self._keys:
            left, right = right, left ^ (keyed(right, key) & mask)
        return (left << self._half) | right
