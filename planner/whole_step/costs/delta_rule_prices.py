"""Seconds of the gated delta rule, which runs as many kernels: products, passes over memory, and a scan over chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cost_models.dtypes import item_size
from passes.rules.delta_rule_costs import SCAN_KERNELS, DeltaRuleCall
from passes.rules.flops import BACKWARD_PRODUCTS, GATED_DELTA_RULE
from passes.rules.kinds import ELEMENTWISE, MATMUL

if TYPE_CHECKING:
    from planner.whole_step.costs.step_prices import StepPrices


def delta_rule_seconds(prices: StepPrices, call: DeltaRuleCall, dtype: str, *, live: bool) -> tuple[float, float]:
    """Forward and backward, one kernel after the other.

    The scan's are short: of a few heads each takes what the device needs to launch it, however the heads are cut.
    """
    products = prices.compute_seconds(flops=call.flops, num_bytes=0.0, dtype=dtype, kind=MATMUL)
    seconds = []
    for times, moved, scanned, kernels in zip(
        (1.0, BACKWARD_PRODUCTS[GATED_DELTA_RULE]), call.moved, call.scanned, SCAN_KERNELS
    ):
        passes, one = (
            prices.compute_seconds(flops=0.0, num_bytes=item_size(dtype) * each, dtype=dtype, kind=ELEMENTWISE)
            for each in (moved, scanned)
        )
        seconds.append(times * products + passes + kernels * call.num_chunks * one)
    return seconds[0], seconds[1] if live else 0.0
