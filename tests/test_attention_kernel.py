"""The kernel model of fused attention: closed forms, and the two properties that the search relies on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models import Cluster, CostModel
from cost_models.attention_kernel import BLOCK, AttentionKernel

PLAIN = AttentionKernel(processors=8, ramp=0.0, rate=1.0, tail=0.0, stream=1.0, sharpness=1.0)
#: Sums of rounded numbers: more work may seem to take less time by as much.
ROUNDING = 1 + 1e-9


def seconds(kernel: AttentionKernel, count: int, rows: int, columns: int, *, causal: bool, width: int = 64) -> float:
    full = 4.0 * kernel.products * count * rows * columns * width
    return kernel.seconds(
        (count, rows, columns, width),
        flops=full / 2 if causal else full,
        num_bytes=2.0 * count * width * (2 * rows + 2 * columns),
        item_size=2,
        peak=1e12,
        bandwidth=1e15,
    )


def test_a_causal_call_skips_the_blocks_above_the_diagonal() -> None:
    full, causal = (seconds(PLAIN, 64, 16 * BLOCK, 16 * BLOCK, causal=each) for each in (False, True))
    assert full == pytest.approx(4 * 64 * (16 * BLOCK) ** 2 * 64 / 1e12, rel=1e-3)
    assert causal / full == pytest.approx(136 / 256, rel=1e-3)


def test_few_blocks_wait_for_the_longest() -> None:
    one, eight = (seconds(PLAIN, count, BLOCK, 32 * BLOCK, causal=False) for count in (1, 8))
    assert one == pytest.approx(eight, rel=1e-3)


def test_backward_does_its_products_and_rereads_what_causal_means() -> None:
    backward = replace(PLAIN, products=2.5)
    for causal in (False, True):
        forward = seconds(PLAIN, 64, 16 * BLOCK, 16 * BLOCK, causal=causal)
        again = seconds(backward, 64, 16 * BLOCK, 16 * BLOCK, causal=causal)
        assert again / forward == pytest.approx(2.5, rel=1e-3)


@settings(max_examples=60)
@given(st.integers(1, 256), st.integers(1, 9000), st.integers(2, 8), st.booleans())
def test_more_heads_take_no_less_and_a_part_no_less_than_its_share(
    count: int, length: int, parts: int, causal: bool
) -> None:
    kernel = replace(PLAIN, processors=108, ramp=6e-6, tail=0.5, sharpness=1.2)
    part, whole = (seconds(kernel, heads, length, length, causal=causal) for heads in (count, count * parts))
    assert part <= whole * ROUNDING
    assert whole <= parts * part * ROUNDING


def test_the_length_decides_and_not_the_operations() -> None:
    prices = CostModel(Cluster.parse("dgx-a100-80g"), {"x": 8})

    def rate(samples: int, length: int) -> float:
        shape = (samples * 16, length, length, 128)
        flops = 2.0 * samples * 16 * length**2 * 128
        moved = 8.0 * samples * 16 * length * 128
        return flops / prices.compute_seconds(
            flops=flops, num_bytes=moved, dtype="bfloat16", kind="attention", shape=shape
        )

    short, long = rate(1024, 512), rate(2, 16384)
    assert short / 312e12 == pytest.approx(0.23, abs=0.01)  # measured: 0.24 and 0.56
    assert long / 312e12 == pytest.approx(0.56, abs=0.01)
