"""Efficiency curves and tilings: what they give, the two properties that the search relies on, strict reading."""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cost_models import Cluster, CostModel
from cost_models.efficiency import KIND_STAND_IN, Curve, Tiling
from cost_models.presets import efficiency_names, load_preset, preset_names

PRESETS = preset_names()
#: Sums of rounded quotients: more work may seem to take less time by as much.
ROUNDING = 1 + 1e-9


def model(cluster: str) -> CostModel:
    whole = Cluster.parse(cluster)
    return CostModel(whole, {"x": whole.num_devices})


def test_a_curve_is_linear_in_the_logarithm_and_constant_outside() -> None:
    curve = Curve(((1e3, 0.2), (1e5, 0.6), (1e6, 0.7)))
    assert [curve(size) for size in (1.0, 1e3, 1e4, 1e5, 1e6, 1e9)] == pytest.approx([0.2, 0.2, 0.4, 0.6, 0.7, 0.7])


@pytest.mark.parametrize(
    "points, message",
    [
        ((), "needs at least one point"),
        (((0.0, 0.5),), "size above 0"),
        (((1.0, 1.5),), r"efficiency in \(0, 1\]"),
        (((1.0, 0.5), (1.0, 0.6)), "sizes must ascend"),
        (((1.0, 0.5), (10.0, 0.4)), "must not fall with size"),
        (((1.0, 0.1), (2.0, 0.9)), "rises too fast"),
    ],
)
def test_curves_that_no_device_can_have(points: tuple[tuple[float, float], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Curve(points)


def test_tiles_that_overhang_and_waves_that_are_not_full_cost_as_much_as_full_ones() -> None:
    tiling = Tiling(processors=4, shapes=((128, 128, 1.0),))
    assert tiling.overhead((1, 256, 256, 64)) == 1.0
    assert tiling.overhead((1, 257, 256, 64)) == pytest.approx(8 * 128 * 128 / (257 * 256))
    assert tiling.overhead((1, 128, 128, 64)) == 4.0
    assert tiling.overhead((4, 128, 128, 64)) == 1.0


def test_the_best_tile_is_taken_and_depth_costs_its_filling() -> None:
    both = Tiling(processors=4, shapes=((128, 128, 1.0), (64, 64, 0.5)), depth_overhead=16)
    assert both.overhead((1, 128, 128, 64)) == pytest.approx(2.0 * 80 / 64)
    assert both.overhead((1, 256, 256, 64)) == pytest.approx(1.0 * 80 / 64)
    tall = Tiling(processors=1, shapes=((64, 256, 1.0),))
    assert tall.overhead((1, 256, 64, 8)) == 1.0


def test_time_of_a_matmul_is_its_closed_form() -> None:
    data = Cluster.uniform(1, flops=1e12, memory_bandwidth=1e9).to_dict()
    data["device"]["efficiency"] = {
        "matmul": {"flops": 0.5, "bytes": 0.25, "tiles": {"processors": 2, "shapes": [[16, 16, 1.0]]}}
    }
    prices = CostModel(Cluster.from_dict(data), {"x": 1})
    work = 2.0 * 32 * 16 * 8
    assert prices.compute_seconds(flops=work, num_bytes=0, dtype="float32") == pytest.approx(work / 0.5e12)
    assert prices.compute_seconds(
        flops=work / 2, num_bytes=0, dtype="float32", kind="matmul", shape=(1, 16, 16, 8)
    ) == pytest.approx(work / 0.5e12)
    assert prices.compute_seconds(flops=1, num_bytes=1e9, dtype="float32", kind="matmul") == 4.0
    assert prices.compute_seconds(flops=0, num_bytes=1e9, dtype="float32") == 1.0


def with_rows(**shares: Any) -> Cluster:
    data = Cluster.uniform(1, flops=1e12).to_dict()
    data["device"]["efficiency"] = {"matmul": shares}
    return Cluster.from_dict(data)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("row_step", "seconds"), [(1, 4.0), (2, 2.0), (4, 2.0), (8, 1.0)])
def test_rows_that_no_wide_load_divides_run_at_a_share_of_the_rate(dtype: str, row_step: int, seconds: float) -> None:
    cluster = with_rows(odd_rows=0.25, narrow_rows=0.5)
    prices = CostModel(Cluster.from_dict(cluster.to_dict()), {"x": 1})
    priced = prices.compute_seconds(flops=1e12, num_bytes=0, dtype=dtype, kind="matmul", row_step=row_step)
    assert priced == seconds


def test_rows_of_wider_elements_run_at_the_whole_rate() -> None:
    prices = CostModel(with_rows(odd_rows=0.25, narrow_rows=0.5), {"x": 1})
    assert prices.compute_seconds(flops=1e12, num_bytes=0, dtype="float32", kind="matmul", row_step=1) == 1.0


@pytest.mark.parametrize(("row_step", "seconds"), [(1, 4.0), (2, 4.0), (4, 1.0), (8, 1.0)])
def test_rows_of_float32_that_run_as_tf32_start_where_16_bytes_do(row_step: int, seconds: float) -> None:
    cluster = with_rows(narrow_tf32_rows=0.25)
    prices = CostModel(Cluster.from_dict(cluster.to_dict()), {"x": 1}, allow_tf32=True)
    priced = prices.compute_seconds(flops=1e12, num_bytes=0, dtype="float32", kind="matmul", row_step=row_step)
    assert priced == seconds


@pytest.mark.parametrize("name", ["odd_rows", "narrow_rows", "narrow_tf32_rows"])
@pytest.mark.parametrize("share", [0, 1.5, True, "half"])
def test_slow_rows_are_a_share(name: str, share: Any) -> None:
    with pytest.raises(ValueError, match=rf"efficiency\.matmul\.{name} must be a share above 0 and at most 1, got"):
        with_rows(**{name: share})


def head_seconds(preset: str, vocabulary: int) -> float:
    """Of GPT-2's head, 8 samples of 1,024: its three products."""
    prices = model(preset)
    shapes = [(1, 8192, vocabulary, 768), (1, 8192, 768, vocabulary), (1, vocabulary, 768, 8192)]
    num_bytes = 2 * (8192 * (vocabulary + 768) + vocabulary * 768)
    return sum(
        prices.compute_seconds(
            flops=2.0 * math.prod(shape), num_bytes=num_bytes, dtype="bfloat16", kind="matmul", shape=shape,
            row_step=math.gcd(vocabulary, 8),
        )
        for shape in shapes
    )  # fmt: skip


def test_an_odd_vocabulary_costs_what_was_measured_on_a100() -> None:
    """1.07 µs a token over 50,304 (its source: the preset)."""
    more = head_seconds("dgx-a100-80g", 50_257) - head_seconds("dgx-a100-80g", 50_304)
    assert more / 8192 == pytest.approx(1.07e-6, rel=0.05)


@pytest.mark.parametrize(("vocabulary", "times"), [(50_257, 6.14), (50_258, 2.93), (50_260, 2.98), (50_264, 1.07)])
def test_a_vocabulary_costs_as_many_times_50_304_as_on_h100(vocabulary: int, times: float) -> None:
    """benchmarks/results/gpu.md, "Products with odd rows"; 10%: one share stands for rows of 4 and of 8 bytes."""
    slower = head_seconds("dgx-h100", vocabulary) / head_seconds("dgx-h100", 50_304)
    assert slower == pytest.approx(times, rel=0.1)


def test_kinds_take_the_curves_of_their_stand_ins() -> None:
    data = Cluster.uniform(1, flops=1e12, memory_bandwidth=1e9).to_dict()
    data["device"]["efficiency"] = {"attention": {"flops": 0.5}, "elementwise": {"bytes": 0.25}}
    prices = CostModel(Cluster.from_dict(data), {"x": 1})
    seconds = {
        kind: prices.compute_seconds(flops=1e12, num_bytes=1e9, dtype="float32", kind=kind) for kind in KIND_STAND_IN
    }
    assert seconds.pop("matmul") == seconds.pop("convolution") == 1.0
    attention = [kind for kind in seconds if "attention" in kind]
    assert len(attention) == 6 and {seconds.pop(kind) for kind in attention} == {2.0}
    assert set(seconds.values()) == {4.0}


def test_unknown_kind() -> None:
    with pytest.raises(ValueError, match="unknown kind of work 'gemm': expected one of matmul"):
        model("dgx-h100").compute_seconds(flops=1, num_bytes=1, dtype="float32", kind="gemm")


def test_of_a_mixed_cluster_the_slowest_device_decides() -> None:
    data = Cluster.uniform(2, flops=1e12).to_dict()
    device = data.pop("device")
    tuned = {**device, "name": "tuned", "flops": {"float32": 1.5e12}, "efficiency": {"matmul": {"flops": 0.5}}}
    data["devices"] = [{"count": 1, **device}, {"count": 1, **tuned}]
    prices = CostModel(Cluster.from_dict(data), {"x": 2})
    assert prices.compute_seconds(flops=1.5e12, num_bytes=0, dtype="float32") == 2.0


@pytest.mark.parametrize("name", PRESETS)
def test_presets_never_reach_more_than_their_peak_and_come_close_on_large_work(name: str) -> None:
    prices = model(name)
    peak, bandwidth = prices.device.peak_flops("float32"), prices.device.memory_bandwidth
    large = prices.compute_seconds(flops=2.0 * 8192**3, num_bytes=0, dtype="float32", shape=(1, 8192, 8192, 8192))
    assert 0.3 <= 2.0 * 8192**3 / peak / large <= 1.0
    assert 0.7 <= 1e9 / bandwidth / prices.compute_seconds(flops=0, num_bytes=1e9, dtype="float32") <= 1.0


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "cpu-local"])
def test_small_and_narrow_matmuls_are_less_efficient(name: str) -> None:
    prices = model(name)

    def rate(m: int, n: int, k: int) -> float:
        work = 2.0 * m * n * k
        return work / prices.compute_seconds(flops=work, num_bytes=0, dtype="bfloat16", shape=(1, m, n, k))

    assert rate(256, 256, 256) < rate(2048, 2048, 2048) < rate(8192, 8192, 8192)
    assert rate(8192, 8, 8192) < rate(8192, 1024, 8192)


sizes = st.integers(1, 20_000)
shapes = st.tuples(st.integers(1, 64), sizes, sizes, sizes)


def matmul_seconds(prices: CostModel, shape: tuple[int, int, int, int]) -> float:
    batch, m, n, k = shape
    num_bytes = 2 * batch * (m * k + k * n + m * n)
    return prices.compute_seconds(
        flops=2.0 * batch * m * n * k, num_bytes=num_bytes, dtype="bfloat16", kind="matmul", shape=shape
    )


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(PRESETS), shapes, st.integers(0, 3), st.integers(1, 5000))
def test_a_larger_matmul_never_takes_less_time(name: str, shape: Any, dim: int, more: int) -> None:
    larger = (*shape[:dim], shape[dim] + more, *shape[dim + 1 :])
    prices = model(name)
    assert matmul_seconds(prices, shape) <= matmul_seconds(prices, larger) * ROUNDING


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(PRESETS), shapes, st.integers(0, 3), st.integers(2, 16))
def test_a_part_of_a_matmul_never_takes_less_than_its_share(name: str, part: Any, dim: int, pieces: int) -> None:
    whole = (*part[:dim], part[dim] * pieces, *part[dim + 1 :])
    prices = model(name)
    assert matmul_seconds(prices, whole) <= pieces * matmul_seconds(prices, part) * ROUNDING


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(PRESETS),
    st.sampled_from(list(KIND_STAND_IN)),
    st.floats(0, 1e15),
    st.floats(0, 1e11),
    st.floats(1, 64),
)
def test_other_work_is_monotone_and_parts_take_at_least_their_share(
    name: str, kind: str, flops: float, num_bytes: float, factor: float
) -> None:
    prices = model(name)

    def seconds(times: float) -> float:
        return prices.compute_seconds(flops=flops * times, num_bytes=num_bytes * times, dtype="float32", kind=kind)

    assert seconds(1) <= seconds(factor) * ROUNDING
    assert seconds(factor) <= factor * seconds(1) * ROUNDING


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(1, 1e12), st.floats(0.01, 1)), min_size=1, max_size=5),
    st.floats(0.1, 1e13),
    st.floats(1, 100),
)
def test_every_curve_that_is_accepted_has_both_properties(
    points: list[tuple[float, float]], size: float, factor: float
) -> None:
    ordered = zip(sorted(x for x, _ in points), sorted(y for _, y in points))
    try:
        curve = Curve(tuple(ordered))
    except ValueError:
        assume(False)
    assert size / curve(size) <= factor * size / curve(factor * size) * ROUNDING
    assert curve(size) <= curve(factor * size) * ROUNDING


def with_efficiency(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A preset with efficiency tables spelt out, and one field of them set."""
    data = copy.deepcopy(load_preset("dgx-v100-16g"))
    data["device"]["efficiency"] = Cluster.parse("dgx-v100-16g").to_dict()["device"]["efficiency"]
    table: Any = data["device"]["efficiency"]
    for key in path[:-1]:
        table = table[key]
    table[path[-1]] = value
    return data


@pytest.mark.parametrize(
    "path, value, message",
    [
        (("matmuls",), {}, "device.efficiency has an unknown field 'matmuls', did you mean 'matmul'"),
        (("norm",), 0.8, "device.efficiency.norm must be a table, got 0.8"),
        (("norm", "byte"), 0.8, "device.efficiency.norm has an unknown field 'byte', did you mean 'bytes'"),
        (("norm", "tiles"), {}, "device.efficiency.norm has an unknown field 'tiles'"),
        (("norm", "bytes"), "most", r"norm.bytes must be a number or a list of \[size, efficiency\], got 'most'"),
        (("norm", "bytes"), [], "norm.bytes must be a number or a list"),
        (("norm", "bytes"), [[1e6, 0.5, 3]], "norm.bytes must be a number or a list"),
        (("norm", "bytes"), [[1e6, True]], "norm.bytes must be a number or a list"),
        (("norm", "bytes"), 1.2, r"norm.bytes: a point needs .* efficiency in \(0, 1\]"),
        (("norm", "bytes"), [[1e6, 0.5], [1e7, 0.4]], "norm.bytes: efficiency must not fall with size"),
        (("matmul", "flops"), [[1e6, 0.1], [1.1e6, 0.9]], "matmul.flops: efficiency rises too fast"),
        (("matmul", "tiles", "processors"), 0, "tiles.processors must be an integer of at least 1"),
        (("matmul", "tiles", "shapes"), [], r"tiles.shapes must be a list of \[rows, columns, share of the rate\]"),
        (("matmul", "tiles", "shapes"), [[128, 128, 0.0]], "tiles.shapes must be a list"),
        (("matmul", "tiles", "shapes"), [[128, 1.5, 1.0]], "tiles.shapes must be a list"),
        (("matmul", "tiles", "depth_overhead"), -1, "tiles.depth_overhead must be a number above 0"),
        (("matmul", "tiles", "waves"), 1, "tiles has an unknown field 'waves'"),
    ],
)
def test_malformed_efficiency(path: tuple[Any, ...], value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cluster.from_dict(with_efficiency(path, value))


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("reserved_bytes", 1e12, "device.reserved_bytes must be a number from 0 to less than 8.49e"),
        ("overlap_slowdown", 1, "device.overlap_slowdown must be a number from 0 to less than 1, got 1"),
        ("efficiency", "h10", "device.efficiency: no set of curves 'h10', did you mean 'h100'"),
        ("efficiency", "abacus", "device.efficiency: no set of curves 'abacus': known are a100"),
    ],
)
def test_malformed_device_fields(field: str, value: Any, message: str) -> None:
    data = copy.deepcopy(load_preset("dgx-h100"))
    data["device"][field] = value
    with pytest.raises(ValueError, match=message):
        Cluster.from_dict(data)


def test_every_set_of_curves_is_used_and_memory_can_be_had() -> None:
    used = {load_preset(name)["device"].get("efficiency") for name in PRESETS}
    assert used - {None} == set(efficiency_names())
    for name in PRESETS:
        device = Cluster.parse(name).device
        assert 0 < device.usable_bytes <= device.memory_bytes < math.inf


def test_larger_peaks_of_a_family_take_less_time() -> None:
    work = {"flops": 1e14, "num_bytes": 1e9, "dtype": "float16"}
    families = ["t4", "dgx-v100-32g", "dgx-a100-80g", "h100-96g-500w", "dgx-h100", "dgx-b200"]
    seconds = [model(name).compute_seconds(**work) for name in families]
    assert all(slow > fast for slow, fast in pairwise(seconds))
