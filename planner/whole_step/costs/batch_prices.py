"""Prices of one micro-batch, whose collectives over the data axis are scalars of the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.whole_step.costs.step_prices import DATA, EXPERT, SCALAR_BYTES, StepPrices


class BatchPrices:
    """A cost model for one micro-batch: scalars on ``dp`` cost a latency; anything larger there is not possible and
    costs infinite seconds, as micro-batches are computed one after the other.

    ``sample_latency`` is the latency of an all-reduce over the data-parallel group (0 if there is one device in it);
    ``mixes`` allows larger collectives on ``dp``, priced at ``sample_bandwidth`` (statistics of a whole batch).
    ``axes`` are the mesh's, in order: several take part in one collective only side by side.
    """

    def __init__(
        self,
        cost_model: StepPrices,
        *,
        sample_latency: float,
        sample_bandwidth: float,
        mixes: bool,
        axes: Sequence[str] = (),
    ) -> None:
        self.axes = "_".join(axes)
        self.inner = cost_model
        self.compute_seconds = cost_model.compute_seconds
        self.overlap_slowdown: float = getattr(cost_model, "overlap_slowdown", 0.0)
        self.host_seconds: float = cost_model.host_seconds
        self.sample_latency, self.sample_bandwidth, self.mixes = sample_latency, sample_bandwidth, mixes

    def collective_seconds(self, collective: str, *, num_bytes: float, axis: str) -> float:
        if EXPERT in axis.split("_") and axis != EXPERT:
            return math.inf  # the exchange of an axis of experts runs over that alone
        if "_" in axis and self.axes and axis not in self.axes:
            return math.inf
        if axis != DATA:
            return float(self.inner.collective_seconds(collective, num_bytes=num_bytes, axis=axis))
        if num_bytes <= SCALAR_BYTES:
            return self.sample_latency
        if not self.mixes:
            return math.inf
        if not self.sample_latency or math.isinf(self.sample_bandwidth):
            return 0.0
        return self.sample_latency + 2.0 * num_bytes / self.sample_bandwidth
