"""What a call of the gated delta rule computes, moves, launches and holds.

Multiples are counted, not measured in time, of ``passes.torch_compat.delta_rule_chunks`` as it calls operators one by
one; the tests count them again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from passes.torch_compat.delta_rule_sizes import CHUNKS

GATED_DELTA_RULE = "meshwright.gated_delta_rule.default"


class PerToken(NamedTuple):
    """Elements for each token and head: multiples of a chunk's tokens, the widths, and a state's share."""

    chunk: float
    keys: float
    values: float
    state: float


#: Elements that all but the scan reads and writes, forward and backward, by the dims of the decays.
_MOVED = {
    3: (PerToken(22.5, 38.0, 26.0, 3.0), PerToken(60.5, 147.0, 46.0, 13.0)),
    4: (PerToken(15.5, 167.0, 26.0, 3.0), PerToken(41.0, 562.0, 46.0, 13.0)),
}
#: The same of the scan, in so many kernels a chunk; backward it goes forward again first.
_SCANNED = PerToken(0.0, 2.0, 3.0, 5.0), PerToken(0.0, 4.0, 6.0, 13.0)
SCAN_KERNELS = 3, 7
#: Kernels outside the scan.
_KERNELS = {3: (60, 151), 4: (149, 374)}
#: Elements held at the peak.
_HELD = PerToken(3.0, 3.0, 3.5, 2.5), PerToken(6.0, 12.0, 6.0, 4.0)


@dataclass(frozen=True)
class DeltaRuleCall:
    """A call, or a device's part of one.

    Attributes:
        heads: of all samples.
        tokens: of a sample.
        keys, values: widths.
        decay_dims: 3 or 4.
    """

    heads: float
    tokens: int
    keys: int
    values: int
    decay_dims: int

    @staticmethod
    def of(key: tuple[int, ...], value: tuple[int, ...], log_decay: tuple[int, ...]) -> DeltaRuleCall:
        """The call with tensors of these shapes."""
        return DeltaRuleCall(key[0] * key[2], key[1], key[3], value[3], len(log_decay))

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return min(CHUNKS[self.decay_dims], max(1, self.tokens))

    @property
    def num_chunks(self) -> int:
        """Chunks of a sample."""
        return max(1, math.ceil(self.tokens / self.chunk))

    @property
    def flops(self) -> float:
        """Of its products forward; backward computes them again, and twice as many.

        With the chunk: pairs of a token as key and as query, the triangular solution (half of a product), the values
        that it reads. With the state: what is taken out of it, put in and read.
        """
        with_chunk = 2.0 * self.keys + 0.5 * (self.keys + self.values) + self.values
        with_state = 3.0 * self.keys * self.values
        return 2.0 * self.heads * self.tokens * (self.chunk * with_chunk + with_state)

    @property
    def moved(self) -> tuple[float, float]:
        """Elements read and written outside the scan, forward and backward."""
        forward, backward = _MOVED[self.decay_dims]
        return self._elements(forward), self._elements(backward)

    @property
    def scanned(self) -> tuple[float, float]:
        """Elements read and written by one kernel of the scan, forward and backward."""
        forward, backward = (
            self._elements(each) / (kernels * self.num_chunks) for each, kernels in zip(_SCANNED, SCAN_KERNELS)
        )
        return forward, backward

    @property
    def launches(self) -> tuple[int, int]:
        """Kernels, forward and backward."""
        forward, backward = (
            outside + each * self.num_chunks for outside, each in zip(_KERNELS[self.decay_dims], SCAN_KERNELS)
        )
        return forward, backward

    @property
    def held(self) -> tuple[float, float]:
        """Elements at the peak, forward and backward, beyond what it takes and gives."""
        return self._elements(_HELD[0]), self._elements(_HELD[1])

    def _elements(self, of_token: PerToken) -> float:
        sizes = (self.chunk, self.keys, self.values, self.keys * self.values / self.chunk)
        return self.heads * self.tokens * sum(each * size for each, size in zip(of_token, sizes))
