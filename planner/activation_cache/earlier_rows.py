"""Rows of the boundary that a cache had before, of which those of a deeper one are made.

What lies between the two boundaries is frozen, and neither draws random numbers nor mixes samples, as the whole of the
frozen layers has been checked for. So a sample's row behind the later one is a function of its row behind the earlier
one, and of what later layers read of the sample itself (masks, positions).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from planner.activation_cache.prefix_checks import CachedPrefix
from runtime.calls.frozen_prefix import OUTPUT
from runtime.module.parallel_module import ParallelModule


@dataclass(frozen=True)
class KeptBoundary:
    """What rows of a ring are: the outputs of module ``after``, each of ``shape``."""

    after: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def to_state(self) -> list[Any]:
        """As plain data."""
        return [self.after, list(self.shape), str(self.dtype).removeprefix("torch.")]

    @staticmethod
    def of_state(state: Any) -> KeptBoundary:
        after, shape, dtype = state
        return KeptBoundary(after, tuple(shape), getattr(torch, dtype))


@dataclass(frozen=True)
class EarlierRows:
    """Rows of an earlier boundary that are read for samples of a batch.

    Attributes:
        after: the boundary.
        keys: of the rows that deeper ones take the place of.
        rows: of each sample: its row there, or what is kept of it behind the deeper boundary already, which stands for
            any input of as many numbers.
        are_deeper: for each sample, whether it is the latter.
    """

    after: str
    keys: list[bytes]
    rows: torch.Tensor
    are_deeper: list[bool]


def leads_to(
    parallel: ParallelModule,
    earlier: CachedPrefix,
    earlier_after: str,
    deeper: CachedPrefix,
    deeper_after: str,
    example: Mapping[str, Any],
) -> bool:
    """Whether rows of a boundary give those of another, in their place; all ranks must ask.

    Args:
        example: a call with a global batch, without data.
    """
    if (earlier.shape, earlier.dtype) != (deeper.shape, deeper.dtype) or not earlier.states <= deeper.states:
        return False
    output = torch.empty(earlier.shape, dtype=getattr(torch, earlier.dtype), device="meta")
    graph = parallel.prefix_graph(deeper_after, example, (earlier_after, output))
    return any(path[0] == OUTPUT for path in graph.input_paths)
