"""Clusters: presets, sizes, TOML files and what is wrong with them, mixed clusters, live meshes."""

import copy
import itertools
import json
import tomllib
from types import SimpleNamespace

import pytest

from cost_models import Cluster, CostModel, live
from cost_models.presets import load_preset, preset_names

PRESETS = (
    "8x-rtx3090", "8x-rtx4090", "8x1080ti", "a100-pcie-80g", "a10g", "aws-p3dn", "aws-p4d", "aws-p5", "cpu-local",
    "dgx-a100-40g", "dgx-a100-80g", "dgx-b200", "dgx-h100", "dgx-h200", "dgx-v100-16g", "dgx-v100-32g",
    "h100-96g-500w", "hgx-h200-4gpu", "hgx-h800", "l4", "t4", "tpu-v4", "tpu-v4-torus",
)  # fmt: skip

TWO_BOXES = """
name = "two-boxes"

[[devices]]
count = 4
name = "fast"
memory_bytes = 24e9
memory_bandwidth = 1e12
launch_overhead = 4e-6
[devices.flops]
float32 = 40e12
bfloat16 = 160e12

[[devices]]
count = 4
name = "slow"
memory_bytes = 16e9
memory_bandwidth = 2e12
launch_overhead = 5e-6
[devices.flops]
float32 = 50e12

[[levels]]
name = "pcie"
size = 4
latency = 1e-5
bandwidth = 12e9
[[levels.exceptions]]
group = 1
latency = 2e-5
bandwidth = 6e9

[[levels]]
name = "network"
size = 2
latency = 2e-5
bandwidth = 25e9
"""


def write(tmp_path, text):
    path = tmp_path / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_all_presets_are_there():
    assert preset_names() == PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_presets_load_and_survive_a_round_trip_through_json(name):
    cluster = Cluster.parse(name)
    assert cluster.name == name
    assert cluster.num_devices == {"tpu-v4": 4, "tpu-v4-torus": 64, "cpu-local": 1, "hgx-h200-4gpu": 4}.get(name, 8)
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster
    rates = cluster.device.flops
    assert rates.get("float64", 0) <= rates["float32"] <= rates.get("tfloat32", rates["float32"])


@pytest.mark.parametrize(
    "text, num_devices",
    [
        ("dgx-h100:32", 256),
        ("dgx-b200:1", 8),
        ("dgx-h100:2x4", 8),
        ("cpu-local:4", 4),
        ("tpu-v4:16", 64),
        ("tpu-v4-torus:8x4", 128),
    ],
)
def test_sizes_after_the_colon(text, num_devices):
    cluster = Cluster.parse(text)
    assert (cluster.num_devices, cluster.name) == (num_devices, text)
    assert sum(group.count for group in cluster.groups) == num_devices


def test_gpus_wired_to_each_other_have_the_links_between_those_in_use():
    """Four of them 18 links each, 6 to each other: two have a third of what each has."""
    whole, pair = Cluster.parse("hgx-h200-4gpu:2"), Cluster.parse("hgx-h200-4gpu:1x2")
    assert (whole.num_devices, pair.num_devices) == (8, 2)
    assert [len(cluster.levels[0].wires) for cluster in (whole, pair)] == [6, 1]
    seconds = [
        CostModel(cluster, {"dp": cluster.num_devices // 2, "tp": 2}).collective_seconds(
            "all_gather", num_bytes=1e9, axis="tp"
        )
        for cluster in (whole, pair)
    ]
    assert seconds[0] == seconds[1] >= 0.5e9 / 150e9


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "dgx-h10",
            r"unknown cluster 'dgx-h10', did you mean 'dgx-h100'\? known are 8x-rtx3090, 8x-rtx4090, 8x1080ti",
        ),
        ("abacus", r"unknown cluster 'abacus': known are 8x-rtx3090"),
        ("", "unknown cluster ''"),
        ("dgx-h100:", "cannot read cluster 'dgx-h100:': after the colon expected sizes"),
        ("dgx-h100:0", "expected sizes of at least 1"),
        ("dgx-h100:-1", "expected sizes of at least 1"),
        ("dgx-h100:many", "expected sizes of at least 1"),
        ("dgx-h100:2x4x8", r"at most 2 of them \(network x nvlink\)"),
        ("cpu-local:2x4", r"at most 1 of them \(host\), such as 'cpu-local:4'"),
        ("missing.toml", "cannot read cluster file 'missing.toml': No such file"),
    ],
)
def test_names_that_cannot_be_read(text, message):
    with pytest.raises(ValueError, match=message):
        Cluster.parse(text)


def test_toml_file_of_a_mixed_cluster(tmp_path):
    cluster = Cluster.parse(str(write(tmp_path, TWO_BOXES)))
    assert (cluster.num_devices, [group.count for group in cluster.groups]) == (8, [4, 4])
    assert [level.group_size for level in cluster.levels] == [4, 8]
    assert Cluster.from_dict(cluster.to_dict()) == cluster

    device = cluster.device
    assert device.name == "fast + slow"
    assert (device.memory_bytes, device.memory_bandwidth, device.launch_overhead) == (16e9, 1e12, 5e-6)
    assert (device.peak_flops("float32"), device.peak_flops("bfloat16")) == (40e12, 50e12)


def test_the_slowest_group_of_a_level_counts(tmp_path):
    model = CostModel(Cluster.from_toml(write(tmp_path, TWO_BOXES)), {"dp": 2, "tp": 4})
    assert model.link("tp") == (2e-5, 6e9)
    assert model.link("dp") == (2e-5, 25e9)


def test_graph_of_a_mixed_cluster(tmp_path):
    networkx = pytest.importorskip("networkx")
    graph = Cluster.from_toml(write(tmp_path, TWO_BOXES)).graph()
    assert graph.number_of_nodes() == 8 + 2 + 1
    assert graph.number_of_edges() == 2 * (8 + 8)  # every device has a link to its box and a network card
    assert [graph.nodes[rank]["device"].name for rank in (0, 3, 4)] == ["fast", "fast", "slow"]

    def slowest(source, target):
        path = networkx.shortest_path(graph, source, target, weight="weight")
        return min(graph.edges[edge]["bandwidth"] for edge in itertools.pairwise(path))

    assert (slowest(0, 1), slowest(4, 5), slowest(0, 4)) == (12e9, 6e9, 25e9)


def test_graph_agrees_with_the_link_of_an_axis():
    networkx = pytest.importorskip("networkx")
    cluster = Cluster.parse("dgx-h100:4")
    graph = cluster.graph()
    path = networkx.shortest_path(graph, 0, 8, weight="weight")
    slowest = min(graph.edges[edge]["bandwidth"] for edge in itertools.pairwise(path))
    assert slowest == CostModel(cluster, {"dp": 4, "tp": 8}).link("dp")[1]


def changed(path, value):
    """The H100 preset with the field at ``path`` set, or dropped if ``value`` is None."""
    data = copy.deepcopy(load_preset("dgx-h100"))
    table = data
    for key in path[:-1]:
        table = table[key]
    if value is None:
        del table[path[-1]]
    else:
        table[path[-1]] = value
    return data


@pytest.mark.parametrize(
    "path, value, message",
    [
        (("name",), None, "the cluster needs 'name'"),
        (("name",), 7, "the cluster.name must be a text, got 7"),
        (("device",), None, r"either one \[device\] table or several \[\[devices\]\]"),
        (("devices",), [], r"either one \[device\] table or several \[\[devices\]\]"),
        (("device",), 3, "device must be a table, got 3"),
        (("device", "memory"), 80e9, r"device has an unknown field 'memory', did you mean 'memory_bytes'\?"),
        (("device", "count"), 8, "device has an unknown field 'count': expected one of name, flops"),
        (("device", "memory_bytes"), None, "device needs 'memory_bytes'"),
        (("device", "memory_bytes"), 0, "device.memory_bytes must be a number above 0, got 0"),
        (("device", "memory_bandwidth"), "fast", "device.memory_bandwidth must be a number above 0, got 'fast'"),
        (("device", "memory_bandwidth"), float("nan"), "must be a number above 0, got nan"),
        (("device", "launch_overhead"), -1e-6, "device.launch_overhead must be a finite number of seconds"),
        (("device", "flops"), 1e12, "device.flops must be a table"),
        (("device", "flops", "float32"), None, "device.flops needs 'float32'"),
        (("device", "flops", "bf16"), 1e12, "device.flops has an unknown field 'bf16'"),
        (("device", "flops", "float16"), True, "device.flops.float16 must be a number above 0, got True"),
        (("levels",), None, "the cluster needs 'levels'"),
        (("levels",), [], "'levels' must be a list of at least one table"),
        (("levels",), {"name": "x"}, "'levels' must be a list of at least one table"),
        (("levels", 0), "nvlink", r"levels\[0\] must be a table, got 'nvlink'"),
        (("levels", 0, "size"), 2.5, r"levels\[0\].size must be an integer of at least 1, got 2.5"),
        (("levels", 0, "size"), None, r"levels\[0\] needs 'size'"),
        (("levels", 1, "latency"), float("inf"), r"levels\[1\].latency must be a finite number of seconds"),
        (("levels", 1, "bandwidth"), -1, r"levels\[1\].bandwidth must be a number above 0"),
        (("levels", 1, "name"), "nvlink", r"the names of \[\[levels\]\] must differ, got nvlink, nvlink"),
        (("levels", 1, "exceptions"), [{"group": 1, "latency": 0, "bandwidth": 1}], "integer from 0 to 0, got 1"),
        (("levels", 0, "exceptions"), [{"group": 0, "latency": 0}], r"levels\[0\].exceptions\[0\] needs 'bandwidth'"),
        (("levels", 0, "exceptions"), [{"group": 0, "latency": 0, "bandwidth": 1}] * 2, "group 0 is named twice"),
        (("nodes",), 4, "the cluster has an unknown field 'nodes'"),
    ],
)
def test_malformed_fields(path, value, message):
    with pytest.raises(ValueError, match=message):
        Cluster.from_dict(changed(path, value))


def test_counts_of_devices_must_add_up():
    data = tomllib.loads(TWO_BOXES)
    data["devices"][1]["count"] = 5
    with pytest.raises(ValueError, match=r"add up to 9, but the levels join 8 devices"):
        Cluster.from_dict(data)


def test_broken_toml_names_the_file(tmp_path):
    with pytest.raises(ValueError, match=r"cluster file '.*cluster.toml': .*line 1"):
        Cluster.from_toml(write(tmp_path, "name = \n"))
    with pytest.raises(ValueError, match=r"cluster file '.*cluster.toml': the cluster needs 'levels'"):
        Cluster.from_toml(write(tmp_path, 'name = "x"'))


def test_the_documented_format_is_read(tmp_path):
    from cost_models import cluster_format

    example = cluster_format.__doc__.split("::\n")[1].split("\nRanks are")[0]
    cluster = Cluster.from_toml(write(tmp_path, "\n".join(line.strip() for line in example.splitlines())))
    assert (cluster.name, cluster.num_devices) == ("two-boxes", 8)


def test_uniform_round_trip():
    cluster = Cluster.uniform(4, launch_overhead=1e-6)
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster


def fake_mesh(device_type, size):
    return SimpleNamespace(device_type=device_type, size=lambda: size)


def test_cpu_mesh_is_cpu_local():
    cluster = Cluster.from_device_mesh(fake_mesh("cpu", 4))
    assert cluster == Cluster.parse("cpu-local:4")


def test_a_real_cpu_mesh():
    torch = pytest.importorskip("torch")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        assert Cluster.from_device_mesh(mesh) == Cluster.parse("cpu-local:8")
    finally:
        torch.distributed.destroy_process_group()


def test_unknown_device_type():
    with pytest.raises(ValueError, match="no figures for device type 'xpu'"):
        Cluster.from_device_mesh(fake_mesh("xpu", 4))


@pytest.mark.parametrize(
    "name, gibibytes, preset",
    [
        ("NVIDIA A100-SXM4-40GB", 39.4, "dgx-a100-40g"),
        ("NVIDIA A100-SXM4-80GB", 79.1, "dgx-a100-80g"),
        ("NVIDIA H100 80GB HBM3", 79.1, "dgx-h100"),
        ("NVIDIA H200", 139.8, "dgx-h200"),
        ("NVIDIA H800", 79.1, "hgx-h800"),
        ("NVIDIA B200", 178.4, "dgx-b200"),
        ("NVIDIA GeForce GTX 1080 Ti", 10.9, "8x1080ti"),
        ("NVIDIA H200 NVL", 139.8, None),
        ("NVIDIA H100 PCIe", 79.1, None),
        ("NVIDIA GeForce RTX 4090", 23.6, "8x-rtx4090"),
        ("Tesla V100-SXM2-16GB", 15.8, "dgx-v100-16g"),
        ("Tesla V100-SXM2-32GB", 31.7, "dgx-v100-32g"),
        ("NVIDIA L4", 22.2, "l4"),
        ("NVIDIA L40S", 44.4, None),
        ("NVIDIA A100-SXM4-64GB", 63.4, None),
    ],
)
def test_gpus_are_matched_by_name_and_memory(name, gibibytes, preset):
    assert live.match_preset(name, gibibytes * 2**30) == preset


def gpu_properties(name, **changes):
    figures = {
        "name": name, "major": 8, "minor": 0, "multi_processor_count": 108, "clock_rate": 1_410_000,
        "memory_clock_rate": 1_215_000, "memory_bus_width": 5120, "total_memory": int(39.4 * 2**30),
    }  # fmt: skip
    return SimpleNamespace(**{**figures, **changes})


@pytest.mark.parametrize(
    "size, local_world_size, expected",
    [
        (8, "8", "dgx-a100-40g:1x8"),
        (16, "8", "dgx-a100-40g:2x8"),
        (2, "8", "dgx-a100-40g:1x2"),
        (8, "2", "dgx-a100-40g:4x2"),
    ],
)
def test_gpu_mesh_on_hosts(monkeypatch, size, local_world_size, expected):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu_properties("NVIDIA A100-SXM4-40GB"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local_world_size)
    monkeypatch.setattr(live, "memory_of_host", lambda: 1e15)
    assert Cluster.from_device_mesh(fake_mesh("cuda", size)) == Cluster.parse(expected)


@pytest.mark.parametrize(("precision", "rate"), [("highest", "float32"), ("high", "tfloat32"), ("medium", "tfloat32")])
def test_float32_is_as_fast_as_this_process_multiplies_it(monkeypatch, precision, rate):
    torch = pytest.importorskip("torch")
    h100 = gpu_properties("NVIDIA H100 80GB HBM3", total_memory=int(79.1 * 2**30))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: h100)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        live_rate = Cluster.from_device_mesh(fake_mesh("cuda", 1)).device.peak_flops("float32")
    finally:
        torch.set_float32_matmul_precision(before)
    assert live_rate == Cluster.parse("dgx-h100").device.flops[rate]


def test_a_machine_with_less_memory_than_its_preset_offloads_into_what_it_has(monkeypatch):
    torch = pytest.importorskip("torch")
    h200 = gpu_properties("NVIDIA H200", total_memory=int(139.8 * 2**30))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: h200)
    monkeypatch.setattr(live, "memory_of_host", lambda: 128e9)
    assert Cluster.from_device_mesh(fake_mesh("cuda", 1)).host.memory_bytes == 128e9


def test_a_gpu_without_preset_is_estimated_from_its_properties():
    estimated = Cluster.from_dict(live.estimate(gpu_properties("A100 of another make"))).device
    preset_device = Cluster.parse("dgx-a100-40g").device
    for dtype in ("float32", "tfloat32", "bfloat16"):
        assert estimated.peak_flops(dtype) == pytest.approx(preset_device.peak_flops(dtype), rel=0.01)
    assert estimated.memory_bandwidth == pytest.approx(preset_device.memory_bandwidth, rel=0.01)
    assert estimated.usable_bytes < estimated.memory_bytes
    assert estimated.efficiency["matmul"].tiling.processors == 108
    with pytest.raises(ValueError, match="no figures for GPU 'Exotic'"):
        live.estimate(gpu_properties("Exotic", major=42))
