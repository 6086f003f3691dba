"""Prices: closed forms of compute, collectives and memory, and which link an axis of a mesh uses."""

import itertools
import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models import Cluster, CostModel, LinkLevel, collective_seconds, state_bytes
from cost_models.dtypes import ITEM_SIZE, item_size
from cost_models.hardware import crossed_levels
from cost_models.memory import optimizer_bytes
from tests.patience import PATIENCE

CLOSED_FORMS = [
    ("all_reduce", lambda n, size: 1 + 2 * (n - 1) / n * size),
    ("all_gather", lambda n, size: 1 + (n - 1) / n * size),
    ("reduce_scatter", lambda n, size: 1 + (n - 1) / n * size),
    ("all_to_all", lambda n, size: 1 + (n - 1) / n * (size / n)),
    ("send_recv", lambda n, size: 1 + size),
]


@pytest.mark.parametrize("collective, expected", CLOSED_FORMS)
@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_collectives_equal_their_closed_forms(collective, expected, num_devices):
    model = CostModel(Cluster.uniform(num_devices), {"x": num_devices})
    num_bytes = 128 * 1024 * 4
    assert model.collective_seconds(collective, num_bytes=num_bytes, axis="x") == expected(num_devices, num_bytes)


def test_latency_and_bandwidth_enter_where_they_should():
    link = {"latency": 1e-5, "bandwidth": 1e9}
    assert collective_seconds("all_gather", num_bytes=1e9, group_size=4, **link) == pytest.approx(1e-5 + 0.75)
    assert collective_seconds("send_recv", num_bytes=2e9, group_size=2, **link) == pytest.approx(1e-5 + 2)


def test_one_device_communicates_nothing():
    model = CostModel(Cluster.uniform(4), {"dp": 4, "tp": 1})
    assert model.collective_seconds("all_reduce", num_bytes=1e9, axis="tp") == 0
    assert model.levels("tp") == ()


def test_uniform_cluster_computes_for_free():
    model = CostModel(Cluster.uniform(2), {"x": 2})
    assert model.compute_seconds(flops=1e30, num_bytes=1e30, dtype="bfloat16") == 0
    assert model.memory_bytes == math.inf


def test_compute_is_the_longest_of_arithmetic_traffic_and_launch():
    cluster = Cluster.uniform(1, flops=1e12, memory_bandwidth=1e9, launch_overhead=1e-6)
    model = CostModel(cluster, {"x": 1})
    assert model.compute_seconds(flops=1e12, num_bytes=1e6, dtype="float32") == 1.0
    assert model.compute_seconds(flops=1e6, num_bytes=1e9, dtype="float32") == 1.0
    assert model.compute_seconds(flops=1, num_bytes=1, dtype="float32") == 1e-6
    assert model.compute_seconds(flops=0, num_bytes=0, dtype="float32") == 0


def without_efficiency(name):
    """A preset whose devices and links reach their peaks."""
    data = Cluster.parse(name).to_dict()
    data["device"].pop("efficiency", None)
    for level in data["levels"]:
        level.pop("protocols", None)
    return Cluster.from_dict(data)


def test_dtype_decides_the_rate_and_tf32_must_be_allowed():
    cluster = without_efficiency("dgx-a100-80g")
    work = {"flops": 312e12, "num_bytes": 0}
    strict, tf32 = CostModel(cluster, {"tp": 8}), CostModel(cluster, {"tp": 8}, allow_tf32=True)
    assert strict.compute_seconds(**work, dtype="bfloat16") == 1
    assert strict.compute_seconds(**work, dtype="float32") == 16
    assert tf32.compute_seconds(**work, dtype="float32") == 2
    assert tf32.compute_seconds(**work, dtype="float64") == 16


@pytest.mark.parametrize(
    "dtype, rate", [("float8_e5m2", 275e12), ("float16", 45.8e12), ("int64", 45.8e12), ("complex128", 45.8e12)]
)
def test_dtypes_without_a_rate_take_the_nearest(dtype, rate):
    assert Cluster.parse("tpu-v4").device.peak_flops(dtype) == rate


@pytest.mark.parametrize(
    "cluster, axes, links",
    [
        ("dgx-h100:32", {"dp": 32, "tp": 8}, {"dp": ["network"], "tp": ["nvlink"]}),
        ("dgx-h100:32", {"tp": 8, "dp": 32}, {"tp": ["network"], "dp": ["nvlink", "network"]}),
        ("dgx-h100:4", {"dp": 8, "tp": 4}, {"dp": ["nvlink", "network"], "tp": ["nvlink"]}),
        ("dgx-h100:3", {"dp": 4, "tp": 6}, {"dp": ["nvlink", "network"], "tp": ["nvlink", "network"]}),
        ("dgx-h100", {"dp": 2, "cp": 2, "tp": 2}, {"dp": ["nvlink"], "cp": ["nvlink"], "tp": ["nvlink"]}),
        ("dgx-h100:2x4", {"dp": 2, "tp": 4}, {"dp": ["network"], "tp": ["nvlink"]}),
        ("cpu-local:4", {"dp": 2, "tp": 2}, {"dp": ["host"], "tp": ["host"]}),
    ],
)
def test_an_axis_uses_the_links_that_its_groups_cross(cluster, axes, links):
    model = CostModel(Cluster.parse(cluster), axes)
    assert {axis: [level.name for level in model.levels(axis)] for axis in axes} == links


def test_the_slowest_link_sets_the_price():
    model = CostModel(without_efficiency("dgx-h100:32"), {"dp": 32, "tp": 8})
    assert model.link("tp") == (6.6e-6, 450e9)
    assert model.link("dp") == (6.6e-6, 50e9)
    assert model.collective_seconds("all_reduce", num_bytes=1e9, axis="tp") == 6.6e-6 + 1.75 * 1e9 / 450e9
    assert model.collective_seconds("all_gather", num_bytes=1e9, axis="dp") == 6.6e-6 + 31 / 32 * 1e9 / 50e9


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


@st.composite
def level_sizes_and_mesh(draw):
    """Two ways to cut the same devices: link levels (innermost first), and mesh axes (outermost first)."""
    num_devices = draw(st.sampled_from([1, 6, 8, 12, 24, 36, 60]))
    cuts = []
    for _ in range(2):
        rest, sizes = num_devices, []
        for _ in range(2):
            sizes.append(draw(st.sampled_from(divisors(rest))))
            rest //= sizes[-1]
        cuts.append([*sizes, rest])
    return cuts


@settings(max_examples=200, deadline=None)
@given(level_sizes_and_mesh())
def test_crossed_levels_are_those_of_every_pair_of_ranks(cuts):
    sizes, axes = cuts
    levels = [LinkLevel(str(index), math.prod(sizes[: index + 1]), 0.0, 1.0) for index in range(3)]
    num_devices = math.prod(axes)
    for position, size in enumerate(axes):
        stride = math.prod(axes[position + 1 :])
        pairs = (
            (first, second)
            for first, second in itertools.combinations(range(num_devices), 2)
            if first // (stride * size) == second // (stride * size) and first % stride == second % stride
        )
        used = {
            next(level.name for level in levels if first // level.group_size == second // level.group_size)
            for first, second in pairs
        }
        assert {level.name for level in crossed_levels(levels, stride=stride, size=size)} == used


@pytest.mark.parametrize(
    "axes, message",
    [
        ({"dp": 2, "tp": 2}, "mesh dp=2,tp=2 has 4 devices but cluster 'dgx-h100' has 8"),
        ({"dp": 0, "tp": 8}, "'dp' must have an integer size of at least 1, got 0"),
        ({"dp": 4.0, "tp": 2}, "'dp' must have an integer size"),
        ({}, "has 1 device but"),
    ],
)
def test_meshes_that_do_not_fit(axes, message):
    with pytest.raises(ValueError, match=message):
        CostModel(Cluster.parse("dgx-h100"), axes)


def test_unknown_axis_and_collective():
    model = CostModel(Cluster.uniform(2), {"tp": 2})
    with pytest.raises(ValueError, match="unknown mesh axis 'dp': the mesh has tp"):
        model.collective_seconds("all_reduce", num_bytes=1, axis="dp")
    with pytest.raises(ValueError, match="unknown collective 'allreduce': expected one of all_reduce"):
        model.collective_seconds("allreduce", num_bytes=1, axis="tp")


@pytest.mark.parametrize(
    "dtype, expected",
    [("float32", (4, 4, 8)), ("bfloat16", (2, 2, 12)), ("float16", (2, 2, 12)), ("float64", (8, 8, 16))],
)
def test_adamw_training_state(dtype, expected):
    state = state_bytes(1000, dtype)
    assert (state.parameters, state.gradients, state.optimizer) == tuple(1000 * size for size in expected)
    assert state.total == 1000 * sum(expected)


def test_frozen_parameters_and_other_optimizers():
    frozen = state_bytes(10, "bfloat16", trainable=False)
    assert (frozen.parameters, frozen.gradients, frozen.optimizer) == (20, 0, 0)
    assert optimizer_bytes(10, "float32", optimizer="sgd_momentum") == 40
    with pytest.raises(ValueError, match="unknown optimizer 'lion'"):
        optimizer_bytes(10, "float32", optimizer="lion")


def test_item_sizes_are_torchs():
    torch = pytest.importorskip("torch")
    for dtype, size in ITEM_SIZE.items():
        if hasattr(torch, dtype):
            assert getattr(torch, dtype).itemsize == size
    with pytest.raises(ValueError, match="unknown dtype 'float31'"):
        item_size("float31")


def test_importing_is_light_and_looks_at_nothing_above():
    code = (
        "import sys, cost_models;"
        "print(sorted({name.split('.')[0] for name in sys.modules}"
        " & {'torch', 'networkx', 'passes', 'runtime', 'planner'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert done.stdout.strip() == "[]"
