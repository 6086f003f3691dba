"""Which lengths batches are padded to: the fewest that waste at most a stated share of the tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

#: Different lengths (after rounding up) that are grouped exactly; beyond, round them up with ``multiple_of``.
_MAX_DISTINCT = 8192


def length_buckets(
    lengths: Mapping[int, int] | Iterable[int],
    *,
    waste: float = 0.05,
    max_buckets: int | None = None,
    multiple_of: int = 1,
) -> tuple[int, ...]:
    """The fewest lengths to pad to such that filling is at most a share ``waste`` of the tokens there are.

    With distinct lengths l_1 < … < l_n (rounded up to ``multiple_of``), how often they come c_1 … c_n, and tokens
    T = Σ c_i · (length before rounding), buckets b_1 < … < b_k with b_k ≥ l_n waste

        W(b) = Σ_i c_i · (min {b_j : b_j ≥ l_i} − length before rounding) / T.

    Moving a bucket down to the longest length in it lowers W, so buckets are among the l_i, and

        w(0, 0) = 0,   w(k, j) = min_{i < j} w(k−1, i) + Σ_{i < m ≤ j} c_m · (l_j − l_m)

    is the least filling of the first j lengths in k buckets: grouping on a line by dynamic programming (R. Bellman, "A
    note on cluster analysis and dynamic programming", Mathematical Biosciences 18, 1973), O(n²) for each k. The answer
    has the least k with W ≤ waste, and the least W among those.

    Args:
        lengths: of the batches (a batch is padded to one bucket, so to that of its longest sample): how often each
            comes, or one by one.
        waste: filling over tokens; 0.05 makes a batch 5% longer on average, weighed by tokens.
        max_buckets: an upper bound on how many programs there are.
        multiple_of: every bucket is a multiple of it: what the mesh divides the length by, or what a device likes.

    Raises:
        ValueError: without lengths, for numbers out of range, and if ``max_buckets`` waste more (it says how much).
    """
    counts = Counter(dict(lengths)) if isinstance(lengths, Mapping) else Counter(map(int, lengths))
    counts = Counter({length: count for length, count in counts.items() if count})
    if not counts or min(counts) < 1 or min(counts.values()) < 0:
        raise ValueError("length_buckets needs lengths of at least 1, and how often each comes: got none, or others")
    if not waste >= 0 or multiple_of < 1 or (max_buckets is not None and max_buckets < 1):
        raise ValueError(
            f"waste={waste}, max_buckets={max_buckets}, multiple_of={multiple_of}: waste is a share of the tokens from "
            "0 on, the others are whole numbers from 1 on"
        )
    tokens = sum(length * count for length, count in counts.items())
    rounded: Counter[int] = Counter()
    for length, count in counts.items():
        rounded[-(-length // multiple_of) * multiple_of] += count
    if len(rounded) > _MAX_DISTINCT:
        raise ValueError(
            f"{len(rounded)} different lengths are more than {_MAX_DISTINCT}: round them up with a larger multiple_of"
        )
    sizes = sorted(rounded)
    unavoidable = sum(length * count for length, count in rounded.items()) - tokens
    most = len(sizes) if max_buckets is None else min(max_buckets, len(sizes))
    filling, buckets = _grouped(sizes, [rounded[size] for size in sizes], waste * tokens - unavoidable, most)
    if filling + unavoidable > waste * tokens:
        asked = f"at most {most} buckets" if most < len(sizes) else f"multiples of {multiple_of}"
        raise ValueError(
            f"{asked} fill {(filling + unavoidable) / tokens:.1%} of the tokens at least, more than waste={waste:.1%}: "
            "allow more waste or more buckets, a smaller multiple_of, or batches of samples of like lengths"
        )
    return buckets


def padding_share(lengths: Mapping[int, int] | Iterable[int], buckets: Sequence[int]) -> float:
    """Filling over tokens, W(b), of batches of these lengths in these buckets.

    Raises:
        ValueError: for a length that is longer than all buckets.
    """
    counts = Counter(dict(lengths)) if isinstance(lengths, Mapping) else Counter(map(int, lengths))
    padded = sum(count * bucket_of(length, buckets) for length, count in counts.items())
    return padded / sum(length * count for length, count in counts.items()) - 1.0


def bucket_of(length: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that ``length`` fits in.

    Raises:
        ValueError: if it fits in none.
    """
    bucket = min((size for size in buckets if size >= length), default=None)
    if bucket is None:
        raise ValueError(
            f"a length of {length} is longer than the largest bucket, {max(buckets)}: cut samples to that, or give a "
            "larger bucket"
        )
    return bucket


def _grouped(sizes: Sequence[int], counts: Sequence[int], allowed: float, most: int) -> tuple[int, tuple[int, ...]]:
    """The least filling in the fewest buckets that fill at most ``allowed``, else in ``most``; and those buckets."""
    lengths = np.array(sizes, dtype=np.int64)
    samples = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    tokens = np.concatenate([[0], np.cumsum(lengths * np.array(counts, dtype=np.int64))])
    least = np.full(len(sizes) + 1, np.iinfo(np.int64).max // 4)
    least[0] = 0
    firsts: list[list[int]] = []
    for _ in range(most):
        row, first = least.copy(), [0] * (len(sizes) + 1)
        for end in range(1, len(sizes) + 1):
            # Lengths i … end − 1 in one bucket of the longest of them.
            filling = least[:end] + lengths[end - 1] * (samples[end] - samples[:end]) - (tokens[end] - tokens[:end])
            first[end] = int(filling.argmin())
            row[end] = filling[first[end]]
        row[0] = np.iinfo(np.int64).max // 4
        least = row
        firsts.append(first)
        if least[-1] <= allowed:
            break
    buckets, end = [], len(sizes)
    for first in reversed(firsts):
        buckets.append(sizes[end - 1])
        end = first[end]
    return int(least[-1]), tuple(reversed(buckets))
