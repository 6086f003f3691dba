"""Networks of every kind: what they leave each group, against closed forms and against counting on all links."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from cost_models import Cluster, CostModel
from cost_models.bisection import bisection_bandwidth
from cost_models.cost_model import BestPlacedCostModel
from cost_models.link_loads import Flows, Routing
from cost_models.routes import route
from planner.cli import main

LINK, NVLINK, HOP, BASE = 50e9, 450e9, 1e-6, 5e-6
SIZE = 1e9


def cluster(*, node: int | None = None, link: list[dict[str, Any]] | None = None, **topology: Any) -> Cluster:
    """A network of the kind, of nodes of ``node`` devices on NVLink."""
    data = Cluster.uniform(1).to_dict()
    data["levels"] = [{"name": "nvlink", "size": node, "latency": BASE, "bandwidth": NVLINK}] if node else []
    if not node:
        del data["levels"]
    data |= {"topology": topology} | ({"link": link} if link else {})
    return Cluster.from_dict(data)


def torus(*dims: int, **fields: Any) -> Cluster:
    protocols = [{"name": "hop", "latency": BASE, "hop_latency": HOP}]
    return cluster(kind="torus", dims=list(dims), bandwidth=LINK, latency=BASE, protocols=protocols, **fields)


def tree(*sizes: int, ratio: float = 2.0, node: int = 8, kind: str = "fat-tree", **fields: Any) -> Cluster:
    return cluster(
        node=node, kind=kind, sizes=list(sizes), oversubscription=ratio, bandwidth=LINK, latency=BASE, **fields
    )


def links(*ends: tuple[Any, Any, float], devices: int) -> Cluster:
    wires = [{"a": a, "b": b, "bandwidth": bandwidth, "latency": BASE} for a, b, bandwidth in ends]
    return cluster(kind="links", devices=devices, link=wires)


def seconds(network: Cluster, collective: str, algorithm: str | None = None, **axes: int) -> float:
    """Of the first axis."""
    axis = next(iter(axes))
    outer = network.num_devices // math.prod(axes.values())
    model = CostModel(network, {"outer": outer, **axes})
    return model.collective_seconds(collective, num_bytes=SIZE, axis=axis, algorithm=algorithm)


def test_a_ring_of_a_torus_uses_both_directions_and_the_wrap_link() -> None:
    ring, line = torus(8, 8), torus(8, 8, wrap=False)
    sent = 14 / 8 * SIZE
    assert seconds(ring, "all_reduce", "ring", x=8) == pytest.approx(BASE + 14 * HOP + sent / (2 * LINK))
    assert seconds(ring, "all_reduce", "ring", y=8, x=8) == pytest.approx(BASE + 14 * HOP + sent / (2 * LINK))
    # without the wrap link the way back takes the other direction, over seven links
    assert seconds(line, "all_reduce", "ring", x=8) == pytest.approx(BASE + 6 * BASE + 14 * 7 * HOP + sent / LINK)


def test_half_of_a_dimension_is_a_line() -> None:
    half = CostModel(torus(8), {"b": 2, "a": 4})
    assert route(half.cluster.levels, stride=1, size=4)[0].bandwidth.ring == LINK
    # every other device: four groups' worth of two links each on the whole ring, both ways
    assert route(half.cluster.levels, stride=2, size=4)[0].bandwidth.ring == 2 * LINK / 2


def test_all_to_all_on_a_ring_is_bound_by_its_middle() -> None:
    pieces = 8 * 8 / 8  # n²/8 of them pass each link, for n even
    assert seconds(torus(8, 4), "all_to_all", x=8) == pytest.approx(BASE + pieces * SIZE / 8**2 / LINK)
    whole = 32 / 8 * 8 * SIZE / 32**2  # of 32 devices, 4 in every position of the ring of 8
    assert seconds(torus(8, 4), "all_to_all", x=32) == pytest.approx(BASE + whole / LINK)


def test_several_dimensions_of_a_torus_work_at_once() -> None:
    took = seconds(torus(4, 4, 4), "all_gather", "bucket", x=64)
    assert took == pytest.approx(3 * (BASE + 3 * HOP) + 63 / 64 * SIZE / (3 * 2 * LINK))
    assert seconds(torus(4, 4, 4), "all_gather", x=64) == took
    assert seconds(torus(4, 4, 4), "all_reduce", "bucket", x=64) == 2 * took


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "all_to_all", "send_recv"])
def test_an_oversubscribed_fat_tree_halves_what_crosses_leaves(collective: str) -> None:
    full, half = tree(4, 2, ratio=1.0), tree(4, 2)
    assert seconds(full, collective, dp=2, tp=32) < seconds(half, collective, dp=2, tp=32)
    byte_time = [(seconds(network, collective, dp=2, tp=32) - BASE) * LINK for network in (full, half)]
    assert byte_time[1] == pytest.approx(2 * byte_time[0])
    assert seconds(full, collective, dp=4, tp=8) == seconds(half, collective, dp=4, tp=8)  # stays on its leaf


def test_few_messages_over_a_leafs_uplink_are_bound_by_the_senders_link() -> None:
    assert seconds(tree(4, 2), "send_recv", pp=64) == pytest.approx(BASE + SIZE / LINK)
    assert seconds(tree(4, 2), "send_recv", pp=2, tp=32) == pytest.approx(BASE + 2 * SIZE / LINK)


def test_three_tiers_of_a_fat_tree() -> None:
    network = tree(2, 4, 2, ratio=[2.0, 3.0])  # type: ignore[arg-type]
    assert [level.group_size for level in network.levels] == [8, 16, 64, 128]
    assert route(network.levels, stride=64, size=2)[0].bandwidth.ring == pytest.approx(LINK / 6)


def test_groups_of_one_local_rank_stay_on_their_rail() -> None:
    rails = tree(16, 2, kind="rail", ratio=8.0)
    leaves = tree(4, 8, ratio=8.0)
    assert [level.name for level in CostModel(rails, {"pod": 2, "dp": 16, "tp": 8}).levels("dp")] == ["rail"]
    assert seconds(rails, "all_to_all", dp=16, tp=8) == pytest.approx(BASE + 15 / 16**2 * SIZE / LINK)
    assert seconds(leaves, "all_to_all", dp=16, tp=8) > 3 * seconds(rails, "all_to_all", dp=16, tp=8)
    graph = rails.graph()
    assert set(Routing(graph).loads({0: {8: 1.0}})) == {(0, "rail[0] rail 0"), ("rail[0] rail 0", 8)}


def test_another_rail_is_reached_over_nvlink() -> None:
    """Half of a message over the sender's neighbour on the other rail, half over the receiver's."""
    loads = Routing(tree(4, 2, kind="rail").graph()).loads({1: {8: 1.0}})
    assert loads[1, "nvlink[0]"] == loads[0, "rail[0] rail 0"] == loads["rail[0] rail 0", 8] == 0.5
    assert not any("spine" in str(node) for link in loads for node in link)


def test_the_slowest_link_on_the_ring_counts() -> None:
    square = [(0, 1, 4 * LINK), (1, 2, LINK), (2, 3, 4 * LINK), (3, 0, 4 * LINK)]
    assert seconds(links(*square, devices=4), "all_reduce", "ring", x=4) == pytest.approx(
        BASE + 6 / 4 * SIZE / (2 * LINK)
    )
    assert seconds(links(*square, devices=4), "send_recv", x=2) == pytest.approx(BASE + SIZE / (4 * LINK))
    assert CostModel(links(*square, devices=4), {"x": 4}).link("x") == (BASE, LINK)


def test_links_through_switches_are_shared() -> None:
    """Two boxes of two devices, each with a switch, and one slow link between the switches."""
    boxes = links((0, "a", LINK), (1, "a", LINK), (2, "b", LINK), (3, "b", LINK), ("a", "b", LINK / 4), devices=4)
    latency = 3 * BASE
    assert seconds(boxes, "send_recv", pp=2, tp=2) == pytest.approx(latency + 2 * SIZE / (LINK / 4))
    assert seconds(boxes, "all_gather", "ring", dp=4) == pytest.approx(latency + 3 / 4 * SIZE / (LINK / 4))
    assert seconds(boxes, "all_gather", "ring", tp=2) == pytest.approx(2 * BASE + 1 / 2 * SIZE / LINK)


def test_links_inside_of_nodes_on_a_network() -> None:
    data = links(*((a, (a + 1) % 4, LINK) for a in range(4)), devices=4).to_dict()
    data["levels"].append({"name": "network", "size": 3, "latency": BASE, "bandwidth": LINK / 4})
    both = Cluster.from_dict(data)
    assert route(both.levels, stride=1, size=4)[0].bandwidth.ring == 2 * LINK
    assert seconds(both, "all_gather", dp=3, tp=4) == pytest.approx(BASE + 2 / 3 * SIZE / (LINK / 4))


NETWORKS = {
    "switches": lambda: tree(3, kind="fat-tree", node=4),
    "shared cards": lambda: tree(4, node=4, shared_by=2),
    "fat tree": lambda: tree(2, 3, node=4, ratio=3.0),
    "rails": lambda: tree(3, node=4, kind="rail"),
    "rails and a spine": lambda: tree(2, 2, node=4, kind="rail"),
    "torus": lambda: torus(4, 3, 2),
    "no wrap": lambda: torus(4, 4, wrap=[True, False]),
    "links": lambda: links((0, 1, LINK), (1, 2, LINK / 2), (2, 3, LINK), (3, 0, LINK), (0, 2, LINK), devices=4),
}


def is_even(network: Cluster, *, stride: int, size: int) -> bool:
    """Whether all groups of every level hold equally many members; others are priced by a bound."""
    block = stride * size
    firsts = [first + offset for first in range(0, network.num_devices, block) for offset in range(stride)]
    shares = {
        (level.name, count)
        for level in network.levels
        for first in firsts
        for count in Counter(rank // level.group_size for rank in range(first, first + block, stride)).values()
    }
    return len(shares) == len(network.levels)


@pytest.mark.parametrize("name", NETWORKS)
def test_levels_up_to_symmetry_carry_what_the_whole_graph_carries(name: str) -> None:
    """For every axis and every level that it crosses: rings and messages, counted link by link on all devices."""
    network = NETWORKS[name]()
    routing, total = Routing(network.graph()), network.num_devices
    for stride, size in itertools.product(range(1, total + 1), range(2, total + 1)):
        if total % (stride * size) or not is_even(network, stride=stride, size=size):
            continue
        spans = route(network.levels, stride=stride, size=size)
        for span in spans:
            flows: defaultdict[int | str, defaultdict[int | str, float]] = defaultdict(lambda: defaultdict(float))
            step = stride * span.inside
            for rank in range(total):
                first = rank - rank // step % span.parts * step
                for turn in (1, -1):
                    flows[rank][first + (rank // step + turn) % span.parts * step] += 0.5
            assert span.bandwidth.ring == pytest.approx(routing.bandwidth(flows)), (stride, size)
        if len(spans) == 1:
            block = stride * size
            following: Flows = {rank: {rank - rank % block + (rank + stride) % block: 1.0} for rank in range(total)}
            assert spans[0].bandwidth.message == pytest.approx(routing.bandwidth(following)), (stride, size)


@pytest.mark.parametrize("name", ["fat tree", "rails", "torus", "links"])
def test_all_to_all_among_all_devices_is_what_the_whole_graph_carries(name: str) -> None:
    network = NETWORKS[name]()
    total = network.num_devices
    everyone: Flows = {rank: {other: 1.0 for other in range(total) if other != rank} for rank in range(total)}
    pieces_per_second = Routing(network.graph()).bandwidth(everyone)
    took = seconds(network, "all_to_all", x=total) - max(
        item.latency for span in route(network.levels, stride=1, size=total) for item in span.protocols
    )
    assert took == pytest.approx(SIZE / total**2 / pieces_per_second)


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_survive_a_round_trip_and_have_subsets(name: str) -> None:
    network = NETWORKS[name]()
    assert Cluster.from_dict(network.to_dict()) == network
    for size in (1, 2, network.levels[0].group_size):
        part = network.subset(size)
        assert Cluster.from_dict(part.to_dict()) == part
        assert CostModel(part, {"x": size}).collective_seconds("all_gather", num_bytes=SIZE, axis="x") >= 0


def test_a_part_of_a_ring_has_no_wrap_link_and_unused_devices_pass_messages_on() -> None:
    assert torus(8, 2).subset(4).levels[0].wiring == "line"
    around = links((0, 2, LINK), (2, 1, LINK), devices=3).subset(2)
    assert seconds(around, "send_recv", x=2) == pytest.approx(2 * BASE + SIZE / LINK)


def test_the_best_place_of_an_axis_is_not_always_among_neighbours() -> None:
    """Eight neighbours on a torus of 2 × 8 have half of the long dimension; every second device has its whole ring."""
    network = torus(2, 8)
    seconds_by_stride = {
        stride: CostModel(network, {"outer": 2 // stride, "x": 8, "inner": stride}).collective_seconds(
            "all_gather", num_bytes=SIZE, axis="x"
        )
        for stride in (1, 2)
    }
    best = BestPlacedCostModel(network, {"outer": 2, "x": 8})
    assert (
        best.collective_seconds("all_gather", num_bytes=SIZE, axis="x") == seconds_by_stride[2] < seconds_by_stride[1]
    )
    assert network.has_direct_links
    assert not Cluster.parse("dgx-h100:2").has_direct_links


def test_bisections() -> None:
    """A torus is cut at its longest dimension, on both ways around; a tree at half of its uplinks."""
    assert bisection_bandwidth(torus(4, 4, 8).levels) == 2 * 16 * LINK
    assert bisection_bandwidth(torus(4, 4, 8, wrap=False).levels) == 16 * LINK
    assert bisection_bandwidth(tree(4, 2).levels) == 32 * LINK / 2
    assert bisection_bandwidth(tree(4, 2, kind="rail", ratio=4.0).levels) == 32 * LINK / 4
    assert bisection_bandwidth(tree(4, node=8, shared_by=8).levels) == 2 * LINK
    assert bisection_bandwidth(Cluster.uniform(8, bandwidth=LINK).levels) == 4 * LINK
    assert math.isinf(bisection_bandwidth(Cluster.uniform(1).levels))


@pytest.mark.parametrize(
    "name, num_devices, axis", [("fat-tree", 256, "spine"), ("rails", 256, "rail"), ("cube-mesh", 8, "links")]
)
def test_examples_are_shown(name: str, num_devices: int, axis: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parent.parent / "examples" / "clusters" / f"{name}.toml"
    assert Cluster.from_toml(path).num_devices == num_devices
    assert main(["cluster", "show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{name}: {num_devices} × NVIDIA")
    assert f"\n  {axis} " in shown


def test_a_cluster_is_shown_with_the_bandwidth_of_each_axis(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "show", "dgx-v100-32g:4", "--mesh", "dp=4,tp=8"]) == 0
    assert (
        capsys.readouterr().out
        == """\
dgx-v100-32g:4: 32 × NVIDIA V100 SXM2 32GB (31.76 GiB); bisection 100 GB/s

Levels of links, innermost first
  level    joins      wiring  a link     latency  shared by
  ---------------------------------------------------------
  nvlink   8 devices  switch  150 GB/s   6.6 µs   1
  network  4 nvlink   switch  12.5 GB/s  6.6 µs   2

GB/s that each member of a group sends while all groups work, outermost first
  axis  size  level    ring  tree  all-to-all  to the next  latency
  -----------------------------------------------------------------
  dp    4     network  6.25  6.25  6.25        6.25         6.6 µs
  tp    8     nvlink   150   150   150         150          6.6 µs
"""
    )
    assert main(["cluster", "show", "dgx-v100-32g:4", "--mesh", "dp=4,tp=4"]) == 2
    assert "the mesh dp=4,tp=4 has 16 devices" in capsys.readouterr().err


@pytest.mark.parametrize("cluster", ["8x1080ti:32", "a10g:32", "dgx-h100:4096", "cpu-local:1", "tpu-v4-torus:8x8x8"])
def test_a_cluster_is_shown_within_eighty_columns(cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "show", cluster]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert " 1 devices" not in shown


def test_sixteen_thousand_devices_are_priced_without_their_graph() -> None:
    for name in ("tpu-v4-torus:16x32x32", "dgx-h100:2048"):
        large = Cluster.parse(name)
        assert large.num_devices == 16384
        for size in (2**power for power in range(1, 15)):
            model = CostModel(large, {"outer": 16384 // size, "inner": size})
            assert model.collective_seconds("all_reduce", num_bytes=SIZE, axis="inner") > 0


@pytest.mark.parametrize(
    "topology, message",
    [
        ({"kind": "tours"}, "topology.kind has an unknown value 'tours', did you mean 'torus'"),
        ({"kind": "torus"}, "topology needs 'dims'"),
        ({"kind": "torus", "dims": [4, 0], "bandwidth": 1.0, "latency": 0}, r"topology.dims\[1\] must be an integer"),
        ({"kind": "torus", "dims": 4, "bandwidth": 1.0, "latency": 0}, "topology.dims must be a list of integers"),
        ({"kind": "torus", "dims": [4], "wrap": [True, False]}, "topology.wrap must be true, false, or one of them"),
        ({"kind": "torus", "dims": [2] * 7}, "at most 6 have names"),
        ({"kind": "torus", "dims": [600], "bandwidth": 1.0, "latency": 0}, "at most 512 can be routed; cut it"),
        (
            {"kind": "torus", "dims": [4], "sizes": [4]},
            "unknown field 'sizes': expected one of kind, dims",
        ),
        ({"kind": "fat-tree", "sizes": [2], "bandwidth": 1.0, "latency": 0}, r"\[\[levels\]\], which are missing"),
        ({"kind": "links", "devices": 2}, "the cluster needs 'link'"),
    ],
)
def test_malformed_topologies(topology: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cluster(**topology)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"oversubscription": [1.0, 2.0]}, "topology.oversubscription must be one number, or 1"),
        ({"oversubscription": -1}, "topology.oversubscription must be a number above 0, got -1"),
        ({"latency": [1.0]}, r"topology.latency must be one number, or 2"),
        ({"sizes": [1, 1, 1, 1]}, r"has 4 tiers: at most 3 \(leaf, spine, core\)"),
        ({"shared_by": 0}, "topology.shared_by must be an integer of at least 1, got 0"),
    ],
)
def test_malformed_fat_trees(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cluster(node=2, **{"kind": "fat-tree", "sizes": [2, 2], "bandwidth": LINK, "latency": BASE, **fields})


@pytest.mark.parametrize(
    "ends, message",
    [
        ([(0, 1, LINK), (2, 3, LINK)], "no links lead from part 0 to 2, 3: add a link that joins them"),
        ([(0, 1, LINK), (1, 2, LINK)], "no links lead from part 0 to 3"),
        ([(0, 1, LINK), (1, "s", LINK), ("t", "u", LINK), (2, "s", LINK), (3, "s", LINK)], "to 't', 'u'"),
        ([(0, 1, LINK), (1, 0, LINK)], r"links\[1\]: 1 and 0 are linked twice"),
        ([(0, 0, LINK)], "links 0 to itself"),
        ([(0, 4, LINK)], "a link names part 4, but its parts are 0 to 3"),
        ([(0, -1, LINK)], "must be the number of a device or the name of a switch, got -1"),
        ([(0, 1, 0.0)], "bandwidth must be a number above 0, got 0"),
    ],
)
def test_malformed_links(ends: list[tuple[Any, Any, float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        links(*ends, devices=4)


@pytest.mark.parametrize(
    "level, message",
    [
        ({"wiring": "rings"}, r"levels\[0\].wiring has an unknown value 'rings', did you mean 'ring'"),
        ({"wiring": "ring", "shared_by": 2}, "shared_by goes with links to a switch"),
        ({"wiring": "uplink"}, "starts at the switches of the level inside, which has none"),
        ({"links": [{"a": 0, "b": 1}]}, "lists links, but its wiring is 'switch'"),
        ({"wiring": "links"}, "needs 'links'"),
        (
            {"wiring": "links", "links": [{"a": 0, "b": 1}], "exceptions": [{"group": 0}]},
            "each link says its own figures",
        ),
    ],
)
def test_malformed_wiring(level: dict[str, Any], message: str) -> None:
    data = Cluster.uniform(2).to_dict()
    del data["levels"][0]["shared_by"]
    data["levels"][0] |= level
    with pytest.raises(ValueError, match=message):
        Cluster.from_dict(data)
