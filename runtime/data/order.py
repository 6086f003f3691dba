"""Which samples every data-parallel group reads in every step: arithmetic only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from runtime.data.permutation import Permutation, keyed, random_key

#: What becomes of the samples that do not fill the last batch of an epoch.
Last = Literal["pad", "short", "whole", "drop"]

#: Sets the numbers that seed samples apart from those that order them.
_SAMPLES = 1


@dataclass(frozen=True)
class SampleRange:
    """One data group's part of one global batch.

    ``indices`` are places in the dataset (in a stream: rows of the global batch), of which the first ``num_real`` are
    samples and the others repeats that fill the batch. ``num_samples`` counts the samples of the whole global batch.
    ``seeds`` has one number for each index. ``padded_epoch``: the epoch ends with a batch that is filled up.
    ``lengths``: what fields of the global batch are padded to, by pattern of names; None where the batch itself tells.
    """

    indices: tuple[int, ...]
    num_real: int
    num_samples: int
    padded_epoch: bool
    seeds: tuple[int, ...] = ()
    lengths: Mapping[str, int] | None = None


@dataclass(frozen=True)
class Order:
    """Global batches of ``batch_size`` samples, cut into ``num_groups`` contiguous parts, of which we read ``group``.

    Global batch i of an epoch is the same samples in the same order for every number of groups.

    Raises:
        ValueError: if the parts of a batch cannot be equal.
    """

    batch_size: int
    group: int = 0
    num_groups: int = 1
    last: Last = "pad"

    def __post_init__(self) -> None:
        if not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise ValueError(f"batch_size must be a positive whole number of samples, got {self.batch_size!r}")
        if self.last not in get_args(Last):
            raise ValueError(f"last must be one of {', '.join(get_args(Last))}, got {self.last!r}")
        if not 0 <= self.group < self.num_groups:
            raise ValueError(f"the data group must be in 0..{self.num_groups - 1}, got {self.group}")
        if self.batch_size % self.num_groups:
            raise ValueError(
                f"batch_size={self.batch_size} samples cannot be shared equally by {self.num_groups} data-parallel "
                f"groups: choose a multiple of {self.num_groups} (batch_size is the global batch)"
            )

    def num_batches(self, num_samples: int) -> int:
        """Batches that ``num_samples`` samples make."""
        full, rest = divmod(num_samples, self.batch_size)
        return full + (1 if rest and self.last != "drop" else 0)

    def num_dropped(self, num_samples: int) -> int:
        """The number of samples that no batch contains."""
        return num_samples % self.batch_size if self.last == "drop" else 0

    def is_read_whole(self, num_samples: int) -> bool:
        """Whether every group reads all of a global batch that has ``num_samples`` samples."""
        return self.last == "whole" and num_samples < self.batch_size

    def part(self, num_samples: int) -> SampleRange:
        """Our part of a global batch that has ``num_samples`` samples; ``indices`` are its rows.

        Raises:
            ValueError: if a short batch cannot be shared equally.
        """
        if self.is_read_whole(num_samples):
            return SampleRange(tuple(range(num_samples)), num_samples, num_samples, padded_epoch=False)
        size = num_samples if self.last == "short" else self.batch_size
        if size % self.num_groups:
            raise ValueError(
                f"last='short' leaves a last batch of {size} samples, which {self.num_groups} data-parallel groups "
                "cannot share equally: choose last='whole', last='pad' or last='drop'"
            )
        share = size // self.num_groups
        first = self.group * share
        rows = tuple(row % num_samples for row in range(first, first + share))
        num_real = min(max(num_samples - first, 0), share)
        return SampleRange(rows, num_real, num_samples, padded_epoch=num_samples < size)


@dataclass
class Sampler:
    """Parts of the global batches of one epoch over a dataset of known length, from sample ``start`` on.

    Each iteration reads ``epoch`` and ``start`` anew. Any start costs the same: nothing before it is enumerated.
    ``lengths_of`` tells what the global batch of these samples is padded to.
    """

    order: Order
    num_samples: int
    shuffle: bool
    seed: int
    epoch: int = 0
    start: int = 0
    lengths_of: Callable[[Sequence[int]], Mapping[str, int]] | None = None

    def __iter__(self) -> Iterator[SampleRange]:
        permutation = Permutation(self.num_samples, seed=self.seed, epoch=self.epoch) if self.shuffle else None
        key = random_key(self.seed, self.epoch, _SAMPLES)
        padded = self.order.last == "pad" and (self.num_samples - self.start) % self.order.batch_size != 0
        for number in range(len(self)):
            first = self.start + number * self.order.batch_size
            stop = min(first + self.order.batch_size, self.num_samples)
            part = self.order.part(stop - first)
            indices = self._indices(permutation, first, part)
            seeds = tuple(int(seed) for seed in keyed(np.array(indices, dtype=np.uint64), key))
            lengths = None
            if self.lengths_of is not None:
                every = range(first, stop) if permutation is None else permutation(first, stop)
                lengths = self.lengths_of([int(index) for index in every])
            yield replace(part, indices=indices, seeds=seeds, padded_epoch=padded, lengths=lengths)

    def _indices(self, permutation: Permutation | None, first: int, part: SampleRange) -> tuple[int, ...]:
        if permutation is None:
            return tuple(first + row for row in part.indices)
        low = min(part.indices)
        permuted = permutation(first + low, first + max(part.indices) + 1)
        return tuple(permuted[row - low] for row in part.indices)

    def __len__(self) -> int:
        return self.order.num_batches(max(0, self.num_samples - self.start))
