"""Attention with a mask, and with one that is trained, runs in kernels that are slower, and is priced as that."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from cost_models import Cluster, CostModel

BATCH, HEADS, LENGTH, WIDTH = 16, 12, 512, 64
FLOPS = 4 * BATCH * HEADS * LENGTH**2 * WIDTH


class Attention(nn.Module):
    def __init__(self, *, trained: bool) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH, device="meta", dtype=torch.bfloat16)
        bias = torch.empty(HEADS, LENGTH, LENGTH, device="meta", dtype=torch.bfloat16)
        self.bias = nn.Parameter(bias, requires_grad=trained)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(x).chunk(3, -1)
        mask = self.bias.expand(len(x), -1, -1, -1)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).float().square().mean()


def milliseconds(*, trained: bool, cluster: str) -> float:
    x = torch.empty(BATCH, HEADS, LENGTH, WIDTH, device="meta", dtype=torch.bfloat16)
    devices = Cluster.parse(cluster).subset(1)
    plan = planner.plan(Attention(trained=trained), devices, example_inputs={"x": x}, global_batch=BATCH)
    return plan.step.costs.simulated * 1e3


def test_a_trained_bias_takes_the_time_of_torchs_memory_efficient_kernel() -> None:
    """Measured on an H100: 0.157 ms forward and 0.452 backward, for 0.070 and 0.212 with a bias that is not trained."""
    difference = milliseconds(trained=True, cluster="dgx-h100") - milliseconds(trained=False, cluster="dgx-h100")
    of_gradient = 0.06  # the bias's, added up over samples
    assert difference == pytest.approx(0.157 + 0.452 - 0.070 - 0.212 + of_gradient, abs=0.06)


def seconds(cluster: str, kind: str) -> float:
    prices = CostModel(Cluster.parse(cluster).subset(1), {"dp": 1})
    return prices.compute_seconds(flops=FLOPS, num_bytes=0.0, dtype="bfloat16", kind=kind)


def test_a_device_without_figures_of_that_kernel_prices_it_as_attention() -> None:
    assert seconds("dgx-a100-80g", "biased_attention") == seconds("dgx-a100-80g", "attention")


@pytest.mark.parametrize(
    ("kind", "measured"),
    [
        ("attention", 0.041e-3),
        ("attention_backward", 0.059e-3),
        ("masked_attention", 0.070e-3),
        ("masked_attention_backward", 0.085e-3),
        ("biased_attention", 0.157e-3),
        ("biased_attention_backward", 0.181e-3),
    ],
)
def test_h100s_have_figures_of_each_kernel(kind: str, measured: float) -> None:
    """Measured, of as many operations: a backward call has 2.5 times as many as a forward one."""
    assert seconds("dgx-h100", kind) == pytest.approx(measured, rel=0.08)  # other lengths are in the curve, too
