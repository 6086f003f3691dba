"""The kernel model of matrix products: closed forms, the two properties that the search relies on, strict reading."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models import Cluster, CostModel
from cost_models.efficiency_format import parse_efficiency
from cost_models.matmul_kernel import MatmulKernel
from cost_models.presets import load_efficiency

PLAIN = MatmulKernel(
    processors=4, ramp=0.0, rate=1.0, side=0.0, depth=0.0, rounding=1.0, cache=1e9, stream=1.0, sharpness=1.0,
    split_ramp=1.0, split_bytes=0.0,
)  # fmt: skip
MEASURED = ("a100", "h100", "b200")
#: Sums of rounded numbers: more work may seem to take less time by as much.
ROUNDING = 1 + 1e-9
sizes = st.integers(1, 20_000)


def seconds(
    kernel: MatmulKernel,
    shape: tuple[int, int, int, int],
    *,
    num_bytes: float | None = None,
    peak: float = 1e12,
    bandwidth: float = 1e12,
) -> float:
    batch, m, n, k = shape
    moved = 2.0 * batch * (m * n + n * k + m * k) if num_bytes is None else num_bytes
    flops = 2.0 * batch * m * n * k
    return kernel.seconds(shape, flops=flops, num_bytes=moved, item_size=2, peak=peak, bandwidth=bandwidth)


def measured(name: str) -> MatmulKernel:
    kernel = parse_efficiency(load_efficiency(name), name)["matmul"].kernel
    assert isinstance(kernel, MatmulKernel)
    return kernel


def test_full_waves_of_full_tiles_run_at_the_rate() -> None:
    at_peak = 2 * 512 * 256 * 1000 / 1e12
    assert seconds(PLAIN, (1, 512, 256, 1000), num_bytes=0.0) == pytest.approx(at_peak, rel=1e-6)
    four, five = (seconds(PLAIN, (count, 256, 128, 1000), num_bytes=0.0) for count in (4, 5))
    assert 1.2 < five / four <= 2.0


def test_what_reads_more_than_it_computes_takes_the_memorys_time() -> None:
    slow = replace(PLAIN, stream=0.5)
    assert seconds(slow, (1, 1, 64, 64), num_bytes=1e9, peak=1e15) == pytest.approx(2e-3, rel=1e-3)


def test_a_long_sum_of_few_tiles_is_split() -> None:
    quick = replace(PLAIN, processors=32, split_ramp=1e-6)
    whole, split = (
        seconds(each, (1, 64, 64, 65536), num_bytes=0.0, bandwidth=1e15)
        for each in (replace(quick, split_ramp=1.0), quick)
    )
    at_peak = 2.0 * 64 * 64 * 65536 / 1e12
    assert split == pytest.approx(at_peak, rel=0.01)
    assert whole == pytest.approx(8 * at_peak, rel=0.01)  # four tiles of 64 by 16 on 32 processors


@pytest.mark.parametrize("name", MEASURED)
@settings(max_examples=60)
@given(st.integers(1, 64), sizes, sizes, sizes, st.integers(0, 3), st.integers(2, 8))
def test_more_work_takes_no_less_and_a_part_no_less_than_its_share(
    name: str, batch: int, m: int, n: int, k: int, dim: int, parts: int
) -> None:
    kernel, part = measured(name), (batch, m, n, k)
    whole = tuple(size * parts if place == dim else size for place, size in enumerate(part))
    of_part, of_whole = (seconds(kernel, each, peak=1e15, bandwidth=3e12) for each in (part, whole))
    assert of_part <= of_whole * ROUNDING
    assert of_whole <= parts * of_part * ROUNDING


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rate": 0.0}, "rate of a matmul kernel must be from 0.01 to 2, got 0"),
        ({"rounding": 2.0}, "rounding of a matmul kernel must be from 0 to 1"),
        ({"depth": "long"}, "kernel.depth must be a number, got 'long'"),
        ({"rates": 1.0}, "unknown field 'rates', did you mean 'rate'"),
        ({"ramp": None}, "kernel.ramp must be a number"),
    ],
)
def test_kernels_that_no_device_can_have(change: dict[str, Any], message: str) -> None:
    data = Cluster.uniform(1, flops=1e12, memory_bandwidth=1e9).to_dict()
    data["device"]["efficiency"] = {"matmul": {"kernel": {**asdict(PLAIN), **change}}}
    with pytest.raises(ValueError, match=message):
        Cluster.from_dict(data)


def test_a_clusters_file_keeps_the_kernel_and_prices_by_it() -> None:
    data = Cluster.uniform(1, flops=1e12, memory_bandwidth=1e12).to_dict()
    data["device"]["efficiency"] = {"matmul": {"kernel": asdict(PLAIN)}}
    cluster = Cluster.from_dict(Cluster.from_dict(data).to_dict())
    priced = CostModel(cluster, {"x": 1}).compute_seconds(
        flops=2.0 * 256 * 256 * 4096, num_bytes=0.0, dtype="bfloat16", kind="matmul", shape=(1, 256, 256, 4096)
    )
    assert priced == pytest.approx(seconds(PLAIN, (1, 256, 256, 4096), num_bytes=0.0))
