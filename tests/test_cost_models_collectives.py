"""Collectives over levels of links: each algorithm's closed form, who shares a link, messages between neighbours."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models import Cluster, CostModel
from cost_models.collectives import ALGORITHMS, SENT_SHARE
from cost_models.presets import preset_names
from cost_models.routes import route

#: Of a protocol: seconds that it takes at least, seconds for each step.
BASE, INNER_HOP, OUTER_HOP = 1e-5, 1e-6, 4e-6
INNER, OUTER = 400e9, 50e9
SIZE = 1e9


def two_levels(per_node: int, nodes: int, *, shared_by: int = 1, **outer: Any) -> Cluster:
    """``nodes`` of ``per_node`` devices, each device with a network card unless it is shared."""
    data = Cluster.uniform(per_node).to_dict()
    protocol = {"name": "simple", "latency": BASE}
    inside = {"name": "inside", "size": per_node, "latency": BASE, "bandwidth": INNER}
    network = {"name": "network", "size": nodes, "latency": BASE, "bandwidth": OUTER, "shared_by": shared_by, **outer}
    data["levels"] = [
        {**inside, "protocols": [{**protocol, "hop_latency": INNER_HOP}]},
        {"protocols": [{**protocol, "hop_latency": OUTER_HOP}], **network},
    ]
    return Cluster.from_dict(data)


def seconds(cluster: Cluster, axes: dict[str, int], axis: str, collective: str, algorithm: str | None = None) -> float:
    return CostModel(cluster, axes).collective_seconds(collective, num_bytes=SIZE, axis=axis, algorithm=algorithm)


def test_ring_inside_a_node() -> None:
    cluster = two_levels(8, 4)
    assert seconds(cluster, {"dp": 4, "tp": 8}, "tp", "all_gather", "ring") == pytest.approx(
        BASE + 7 * INNER_HOP + 7 / 8 * SIZE / INNER
    )
    assert seconds(cluster, {"dp": 4, "tp": 8}, "tp", "all_reduce", "ring") == pytest.approx(
        BASE + 14 * INNER_HOP + 14 / 8 * SIZE / INNER
    )


def test_ring_over_nodes_uses_every_card_of_the_group_and_few_slow_steps() -> None:
    cluster = two_levels(4, 4)
    assert seconds(cluster, {"dp": 16}, "dp", "reduce_scatter", "ring") == pytest.approx(
        BASE + 12 * INNER_HOP + 3 * OUTER_HOP + 15 / 16 * SIZE / (4 * OUTER)
    )


def test_a_group_that_strides_over_nodes_has_one_card() -> None:
    cluster = two_levels(4, 4)
    assert seconds(cluster, {"dp": 4, "tp": 4}, "dp", "all_gather") == pytest.approx(
        BASE + 3 * OUTER_HOP + 3 / 4 * SIZE / OUTER
    )


def test_tree_takes_few_steps_and_sends_two_tensors() -> None:
    cluster = two_levels(4, 8)
    assert seconds(cluster, {"dp": 32}, "dp", "all_reduce", "tree") == pytest.approx(
        BASE + 2 * (2 * INNER_HOP + 3 * OUTER_HOP) + 2 * SIZE / (4 * OUTER)
    )


def test_hierarchical_sends_a_share_of_the_bytes_over_each_card() -> None:
    cluster = two_levels(8, 4)
    inside = BASE + 7 * INNER_HOP + 7 / 8 * SIZE / INNER
    between = BASE + 3 * OUTER_HOP + 3 / 4 * (SIZE / 8) / OUTER
    for collective in ("all_gather", "reduce_scatter"):
        assert seconds(cluster, {"dp": 32}, "dp", collective, "hierarchical") == pytest.approx(inside + between)
    reduce_between = BASE + 6 * OUTER_HOP + 6 / 4 * (SIZE / 8) / OUTER
    assert seconds(cluster, {"dp": 32}, "dp", "all_reduce", "hierarchical") == pytest.approx(
        2 * inside + reduce_between
    )


def test_hierarchical_has_fewer_steps_than_a_ring_over_many_nodes() -> None:
    model = CostModel(two_levels(8, 64), {"dp": 512})
    small = {
        name: model.collective_seconds("all_gather", num_bytes=1e5, axis="dp", algorithm=name)
        for name in ("ring", "hierarchical")
    }
    assert small["hierarchical"] < small["ring"]
    assert model.collective_seconds("all_gather", num_bytes=1e5, axis="dp") == small["hierarchical"]


def test_all_to_all_is_bound_by_what_leaves_a_node() -> None:
    cluster = two_levels(4, 4)
    leaving = 12 * SIZE / 16 / 16
    assert seconds(cluster, {"dp": 16}, "dp", "all_to_all") == pytest.approx(BASE + leaving / OUTER)


def test_the_fastest_algorithm_and_protocol_is_taken() -> None:
    protocols = [
        {"name": "simple", "latency": BASE, "hop_latency": OUTER_HOP},
        {"name": "low", "latency": 1e-6, "bandwidth_efficiency": 0.25},
    ]
    data = two_levels(1, 16, protocols=protocols).to_dict()
    data["levels"][0]["protocols"].append({"name": "low", "latency": 1e-6, "bandwidth_efficiency": 0.25})
    model = CostModel(Cluster.from_dict(data), {"dp": 16})
    assert model.collective_seconds("all_gather", num_bytes=100, axis="dp") == pytest.approx(
        1e-6 + 15 / 16 * 100 / (0.25 * OUTER)
    )
    assert model.collective_seconds("all_gather", num_bytes=SIZE, axis="dp") == pytest.approx(
        BASE + 15 * OUTER_HOP + 15 / 16 * SIZE / OUTER
    )
    alone = CostModel(two_levels(1, 64), {"dp": 64})
    ring, tree = (
        alone.collective_seconds("all_reduce", num_bytes=1e4, axis="dp", algorithm=name) for name in ("ring", "tree")
    )
    assert alone.collective_seconds("all_reduce", num_bytes=1e4, axis="dp") == tree < ring


@pytest.mark.parametrize("algorithm", ["ring", "tree", "hierarchical"])
def test_software_that_has_one_algorithm_uses_it(algorithm: str) -> None:
    """Over two levels by that one; on one level what it is there: a hierarchical all-reduce is a ring."""
    cluster = two_levels(4, 8)
    data = cluster.to_dict()
    for level in data["levels"]:
        (protocol,) = level["protocols"]
        others = {**protocol, "collectives": [each for each in ALGORITHMS if each != "all_reduce"]}
        level["protocols"] = [{**protocol, "collectives": ["all_reduce"], "algorithms": [algorithm]}, others]
    restricted = Cluster.from_dict(data)
    assert Cluster.from_dict(restricted.to_dict()) == restricted
    assert seconds(restricted, {"dp": 32}, "dp", "all_reduce") == seconds(
        cluster, {"dp": 32}, "dp", "all_reduce", algorithm
    )
    inside = {"dp": 8, "tp": 4}
    assert seconds(restricted, inside, "tp", "all_reduce") == seconds(
        cluster, inside, "tp", "all_reduce", "ring" if algorithm == "hierarchical" else algorithm
    )
    assert seconds(restricted, {"dp": 32}, "dp", "all_gather") == seconds(cluster, {"dp": 32}, "dp", "all_gather")


def test_bandwidth_is_reached_by_size() -> None:
    cluster = two_levels(
        1, 2, protocols=[{"name": "simple", "latency": 0, "bandwidth_efficiency": [[1e3, 0.5], [1e9, 1.0]]}]
    )
    model = CostModel(cluster, {"dp": 2})
    assert model.collective_seconds("all_gather", num_bytes=1e3, axis="dp") == pytest.approx(0.5e3 / (0.5 * OUTER))
    assert model.collective_seconds("all_gather", num_bytes=1e9, axis="dp") == pytest.approx(0.5e9 / OUTER)


@pytest.mark.parametrize(
    "axes, axis, cards",
    [
        ({"dp": 4, "tp": 8}, "dp", 1 / 8),  # eight groups at once over one card
        ({"dp": 32}, "dp", 1.0),  # one group, its ring leaves the node once
        ({"dp": 8, "tp": 4}, "dp", 2 / 8),  # four groups of two members in each node
    ],
)
def test_groups_share_the_card_of_a_host(axes: dict[str, int], axis: str, cards: float) -> None:
    shared = two_levels(8, 4, shared_by=8)
    size = axes[axis]
    nodes_steps = 3 * OUTER_HOP + (size - 4) * INNER_HOP
    assert seconds(shared, axes, axis, "all_gather", "ring") == pytest.approx(
        BASE + nodes_steps + (size - 1) / size * SIZE / (cards * OUTER)
    )


def test_a_card_is_shared_by_no_more_devices_than_the_node_has() -> None:
    shared, own = two_levels(2, 4, shared_by=8), two_levels(2, 4, shared_by=2)
    for axes in ({"dp": 4, "tp": 2}, {"dp": 8}):
        assert seconds(shared, axes, "dp", "all_gather") == seconds(own, axes, "dp", "all_gather")


@pytest.mark.parametrize(
    "axes, shared_by, bandwidth",
    [
        ({"pp": 4, "tp": 8}, 1, OUTER),  # every device of a node sends over its own card
        ({"pp": 4, "tp": 8}, 8, OUTER / 8),  # over the one card
        ({"pp": 32}, 8, OUTER),  # one device of a node sends out of it
        ({"pp": 16, "tp": 2}, 8, OUTER / 2),
        ({"dp": 4, "pp": 4, "tp": 2}, 8, INNER),  # no stage leaves the node
    ],
)
def test_messages_between_neighbours(axes: dict[str, int], shared_by: int, bandwidth: float) -> None:
    model = CostModel(two_levels(8, 4, shared_by=shared_by), axes)
    assert model.p2p_seconds(num_bytes=SIZE, axis="pp") == pytest.approx(BASE + SIZE / bandwidth)
    assert model.p2p_seconds(num_bytes=SIZE, axis="pp") == seconds(model.cluster, axes, "pp", "send_recv")


def test_a_slow_group_of_a_level_slows_its_collectives() -> None:
    slow = two_levels(2, 2, exceptions=[{"group": 0, "latency": BASE + 1e-3, "bandwidth": OUTER / 2}])
    assert seconds(slow, {"dp": 2, "tp": 2}, "dp", "all_gather") == pytest.approx(
        BASE + 1e-3 + OUTER_HOP + 1 / 2 * SIZE / (OUTER / 2)
    )


def test_a_level_may_consist_of_exceptions() -> None:
    every = [{"group": group, "latency": 0.0, "bandwidth": 2 * INNER + group} for group in range(2)]
    data = two_levels(2, 2).to_dict()
    data["levels"][0]["exceptions"] = every
    assert CostModel(Cluster.from_dict(data), {"dp": 2, "tp": 2}).link("tp") == (0.0, 2 * INNER)


def test_three_levels() -> None:
    data = two_levels(4, 2).to_dict()
    spine = {"name": "spine", "size": 4, "latency": BASE, "bandwidth": OUTER / 2}
    data["levels"].append({**spine, "protocols": [{"name": "simple", "latency": BASE, "hop_latency": 1e-5}]})
    cluster = Cluster.from_dict(data)
    assert [(span.parts, span.inside) for span in route(cluster.levels, stride=1, size=32)] == [(4, 1), (2, 4), (4, 8)]
    assert [(span.parts, span.inside) for span in route(cluster.levels, stride=2, size=16)] == [(2, 1), (2, 2), (4, 4)]
    assert [(span.parts, span.inside) for span in route(cluster.levels, stride=8, size=4)] == [(4, 1)]
    assert seconds(cluster, {"dp": 32}, "dp", "all_gather", "ring") == pytest.approx(
        BASE + 24 * INNER_HOP + 4 * OUTER_HOP + 3 * 1e-5 + 31 / 32 * SIZE / (4 * OUTER)
    )


def test_groups_that_nodes_cut_unevenly_meet_at_the_outer_level() -> None:
    cluster = two_levels(8, 3)
    assert seconds(cluster, {"dp": 4, "tp": 6}, "tp", "all_gather") == pytest.approx(
        BASE + 5 * OUTER_HOP + 5 / 6 * SIZE / OUTER
    )


def test_algorithms_that_cannot_do_a_collective() -> None:
    model = CostModel(Cluster.parse("dgx-h100"), {"tp": 8})
    with pytest.raises(ValueError, match="no algorithm 'tree' for all_gather: expected one of ring, hierarchical"):
        model.collective_seconds("all_gather", num_bytes=1, axis="tp", algorithm="tree")
    with pytest.raises(ValueError, match="unknown mesh axis 'pp'"):
        model.p2p_seconds(num_bytes=1, axis="pp")


@pytest.mark.parametrize("algorithm", ["ring", "tree", "hierarchical"])
def test_one_level_of_plain_links_is_the_alpha_beta_model(algorithm: str) -> None:
    model = CostModel(Cluster.uniform(8, latency=2.0, bandwidth=4.0), {"x": 8})
    sent = {"ring": 14 / 8, "hierarchical": 14 / 8, "tree": 2.0}[algorithm]
    assert model.collective_seconds("all_reduce", num_bytes=64.0, axis="x", algorithm=algorithm) == 2 + sent * 16


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from([name for name in preset_names() if name != "cpu-local"]),
    st.sampled_from(list(ALGORITHMS)),
    st.sampled_from([(1, 8), (2, 4), (8, 1), (4, 8), (16, 2), (32, 1)]),
    st.sampled_from(["outer", "inner"]),
    st.floats(1, 1e11),
    st.floats(1, 64),
)
def test_more_bytes_never_take_less_time_and_parts_at_least_their_share(
    name: str, collective: str, mesh: tuple[int, int], axis: str, num_bytes: float, factor: float
) -> None:
    per_node, num_devices = Cluster.parse(name).num_devices, mesh[0] * mesh[1]
    cluster = Cluster.parse(name if per_node > num_devices else f"{name}:{num_devices // per_node}").subset(num_devices)
    model = CostModel(cluster, dict(zip(("outer", "inner"), mesh)))
    part, whole = (
        model.collective_seconds(collective, num_bytes=size, axis=axis) for size in (num_bytes, factor * num_bytes)
    )
    assert part <= whole * (1 + 1e-9)
    assert whole <= factor * part * (1 + 1e-9)


@pytest.mark.parametrize(
    "name, collective, ranks, bus_bandwidth",
    [
        ("dgx-v100-32g", "all_reduce", 8, 130e9),
        # Measured by NVIDIA's aiconfigurator, 2026, tensors of 512 MiB: few ranks reach less than a node's.
        ("dgx-a100-80g", "all_reduce", 8, 222e9),
        ("dgx-a100-80g", "all_gather", 2, 150e9),
        ("dgx-h100", "all_reduce", 8, 445e9),
        ("dgx-h100", "all_reduce", 4, 350e9),
        ("dgx-h100", "all_gather", 4, 318e9),
        ("dgx-h100", "reduce_scatter", 2, 249e9),
        ("dgx-b200", "all_gather", 8, 617e9),
    ],
)
def test_large_collectives_in_a_node_reach_the_bus_bandwidth_that_the_presets_cite(
    name: str, collective: str, ranks: int, bus_bandwidth: float
) -> None:
    """Bus bandwidth as nccl-tests defines it: the bytes that each rank sends, over the time."""
    num_bytes = 512 * 2**20
    took = CostModel(Cluster.parse(name), {"dp": 8 // ranks, "tp": ranks}).collective_seconds(
        collective, num_bytes=num_bytes, axis="tp"
    )
    assert SENT_SHARE[collective](ranks) * num_bytes / took == pytest.approx(bus_bandwidth, rel=0.1)


def test_own_bytes_and_ramps_prolong_a_collective_inside_its_level() -> None:
    data = two_levels(8, 4).to_dict()
    simple = data["levels"][0]["protocols"][0]
    data["levels"][0]["protocols"] = [{**simple, "own_bandwidth": 2 * INNER, "ramp": 1e-3}]
    cluster, moving = Cluster.from_dict(data), 7 / 8 * SIZE / INNER + SIZE / 8 / (2 * INNER)
    assert seconds(cluster, {"dp": 4, "tp": 8}, "tp", "all_gather", "ring") == pytest.approx(
        BASE + 7 * INNER_HOP + moving + 1e-3 * moving**0.5
    )
    # Between nodes the network is slower, and own bytes are dealt with meanwhile.
    assert seconds(cluster, {"dp": 4, "tp": 8}, "dp", "all_gather", "ring") == pytest.approx(
        BASE + 3 * OUTER_HOP + 3 / 4 * SIZE / OUTER
    )


def test_switches_that_add_up_are_used_by_groups_that_are_large_enough() -> None:
    data = two_levels(8, 4).to_dict()
    simple = data["levels"][0]["protocols"][0]
    adding = {"name": "nvls", "collectives": ["all_reduce"], "latency": BASE, "in_network": True, "least_group": 8}
    data["levels"][0]["protocols"] = [simple, adding]
    cluster = Cluster.from_dict(data)
    assert seconds(cluster, {"dp": 4, "tp": 8}, "tp", "all_reduce") == pytest.approx(BASE + SIZE / INNER)
    assert seconds(cluster, {"dp": 8, "tp": 4}, "tp", "all_reduce") == pytest.approx(
        BASE + 6 * INNER_HOP + 6 / 4 * SIZE / INNER
    )


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("shared_by", 0, r"levels\[1\].shared_by must be an integer of at least 1, got 0"),
        ("protocols", [], r"levels\[1\]: 'protocols' must be a list of at least one table"),
        ("protocols", [{"name": "a"}], r"levels\[1\].protocols\[0\] needs 'latency'"),
        ("protocols", [{"name": "a", "latency": 0}] * 2, r"protocols\[1\].name: protocol 'a' is named twice"),
        ("protocols", [{"name": "a", "latency": 0, "hops": 1}], r"protocols\[0\] has an unknown field 'hops'"),
        ("protocols", [{"name": "a", "latency": 0, "bandwidth_efficiency": 2}], r"protocols\[0\].bandwidth_efficiency"),
        (
            "protocols",
            [{"name": "a", "latency": 0, "collectives": ["gather"]}],
            r"collectives must be a list of all_reduce",
        ),
        (
            "protocols",
            [{"name": "a", "latency": 0, "algorithms": ["rings"]}],
            r"algorithms must be a list of ring, tree",
        ),
        (
            "protocols",
            [{"name": "a", "latency": 0, "algorithms": ["ring"]}],
            r"protocols\[0\].algorithms must name one that can do all_to_all over any links \(pairwise\)",
        ),
        ("protocols", [{"name": "a", "latency": 0, "least_group": 8}], r"none is for all_reduce of any group"),
        ("protocols", [{"name": "a", "latency": 0, "in_network": 1}], r"in_network must be true or false"),
    ],
)
def test_malformed_levels(field: str, value: Any, message: str) -> None:
    data = two_levels(2, 2).to_dict()
    data["levels"][1][field] = value
    with pytest.raises(ValueError, match=message):
        Cluster.from_dict(data)


@pytest.mark.parametrize("num_devices, sizes", [(1, [1, 1]), (4, [4, 4]), (3, [3, 3]), (8, [8, 8]), (24, [8, 24])])
def test_subsets(num_devices: int, sizes: list[int]) -> None:
    subset = Cluster.parse("dgx-h100:4").subset(num_devices)
    assert subset.num_devices == num_devices
    assert [level.group_size for level in subset.levels] == sizes
    assert subset.device == Cluster.parse("dgx-h100").device
    assert Cluster.from_dict(subset.to_dict()) == subset


@pytest.mark.parametrize("num_devices, message", [(12, "would cut a group of 8"), (0, "cannot take 0"), (33, "has 32")])
def test_subsets_that_cannot_be_taken(num_devices: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cluster.parse("dgx-h100:4").subset(num_devices)


def test_subsets_and_memory_of_a_mixed_cluster() -> None:
    data = two_levels(2, 2).to_dict()
    device = data.pop("device")
    small = {**device, "name": "small", "memory_bytes": 8e9, "reserved_bytes": 1e9}
    data["devices"] = [{"count": 2, **device, "memory_bytes": 16e9}, {"count": 2, **small}]
    data["levels"][0]["exceptions"] = [{"group": 1, "latency": BASE, "bandwidth": INNER / 2}]
    cluster = Cluster.from_dict(data)
    assert [cluster.memory_of(rank) for rank in range(4)] == [16e9, 16e9, 7e9, 7e9]
    assert CostModel(cluster, {"x": 4}).memory_bytes == 7e9
    with pytest.raises(ValueError, match="has ranks 0 to 3, got 4"):
        cluster.memory_of(4)
    first = cluster.subset(2)
    assert [group.device.name for group in first.groups] == ["uniform"]
    assert first.levels[0].exceptions == ()
    assert CostModel(first, {"x": 2}).memory_bytes == 16e9
