"""Bytes of parameters, gradients and optimizer state, whole and divided by ZeRO; rounding of the allocator."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.memory import StateBytes, reserved_bytes, state_bytes, zero_state_bytes


@pytest.mark.parametrize(("stage", "expected"), [(0, (2, 2, 12)), (1, (2, 2, 3)), (2, (2, 0.5, 3)), (3, (1, 1, 2))])
def test_zero_divides_what_its_stage_says(stage: int, expected: tuple[float, ...]):
    parts = zero_state_bytes(1000, "bfloat16", stage=stage, group_size=4)
    assert (parts.parameters, parts.gradients, parts.optimizer) == tuple(1000 * size for size in expected)


def test_the_papers_figures_for_7_5_billion_parameters_on_64_devices():
    """Table 1 of the ZeRO paper: 120, 31.4, 16.6 and 1.88 GB a device with 2 + 2 + 12 bytes a parameter."""
    whole, first, second, third = (
        zero_state_bytes(7_500_000_000, "bfloat16", stage=stage, group_size=64, gradient_dtype="bfloat16").total / 1e9
        for stage in range(4)
    )
    assert (whole, first, second) == pytest.approx((120, 31.4, 16.6), rel=0.01)
    # the paper keeps both the narrow parameter and its master copy: 16 bytes; one of them is enough: 14
    assert third == pytest.approx(1.88 * 14 / 16, rel=0.01)


@given(
    st.integers(1, 10**12),
    st.integers(1, 10**5),
    st.sampled_from(("float32", "bfloat16", "float64", "float16")),
    st.sampled_from(("adamw", "sgd", "sgd_momentum", "none")),
)
def test_a_higher_stage_never_holds_more_state(elements: int, group: int, dtype: str, optimizer: str):
    totals = [
        zero_state_bytes(
            elements, dtype, stage=stage, group_size=group, gradient_dtype="float32", optimizer=optimizer
        ).total
        for stage in range(4)
    ]
    assert totals == sorted(totals, reverse=True)


@given(st.integers(1, 10**9), st.sampled_from(("float32", "bfloat16")))
def test_stage_0_is_the_plain_state(elements: int, dtype: str):
    assert zero_state_bytes(elements, dtype, stage=0, group_size=8) == state_bytes(elements, dtype)


@given(st.integers(1, 10**9), st.integers(1, 4096))
def test_shards_are_padded_to_equal_size(elements: int, group: int):
    parts = zero_state_bytes(elements, "float32", stage=3, group_size=group)
    shard = -(-elements // group)
    assert parts == StateBytes(4 * shard, 4 * shard, 8 * shard)
    assert shard * group >= elements > (shard - 1) * group


def test_wide_gradients_of_narrow_parameters():
    parts = zero_state_bytes(10, "bfloat16", stage=0, group_size=1, gradient_dtype="float32")
    assert parts == StateBytes(20, 40, 120)


def test_what_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="unknown ZeRO stage 4: expected 0, 1, 2 or 3"):
        zero_state_bytes(10, "float32", stage=4, group_size=2)
    with pytest.raises(ValueError, match="group_size must be at least 1, got 0"):
        zero_state_bytes(10, "float32", stage=1, group_size=0)


def test_reserved_memory_is_a_few_percent_over_the_peak():
    assert reserved_bytes(100 * 2**20) == 104 * 2**20
