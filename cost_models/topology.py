"""``[topology]`` of a cluster file: a network by its kind, written out as the levels that it consists of.

::

    [topology]
    kind = "torus"                 # rings of devices, one for each dimension
    dims = [4, 4, 8]               # the first joins neighbouring ranks
    wrap = true                    # optional: whether the ends of a dimension are linked; or one for each
    bandwidth = 50e9               # bytes/s of one link, one direction
    latency = 1e-6                 # seconds of one link

    [topology]
    kind = "fat-tree"              # devices on leaf switches, these on spine switches, …
    sizes = [4, 8]                 # groups of the [[levels]] inside (nodes) on a leaf, leaves on a spine, …
    oversubscription = 2           # optional: what enters a switch from below over what leaves it; or one for each tier
    bandwidth = 50e9               # of one link to a leaf
    latency = [5e-6, 6e-6]         # of a message by tiers crossed; one number: the same for all
    shared_by = 1                  # optional: devices that share a link to the leaf

    [topology]
    kind = "rail"                  # device i of every node on switch i, these on spine switches
    sizes = [32, 4]                # nodes on a rail, groups of so many nodes; a second size is optional
    oversubscription = 2           # the rest as for "fat-tree"
    bandwidth = 50e9
    latency = 5e-6

    [topology]
    kind = "links"                 # a small network, link by link
    devices = 4                    # numbered from 0; texts are switches
    [[link]]
    a = 0
    b = "left"
    bandwidth = 25e9
    latency = 2e-6

A topology lies outside of the ``[[levels]]`` of the same file (a node's NVLink; a torus and ``links`` may do without).
``kind = "levels"`` adds nothing to them. ``protocols`` are those of a level, see ``cost_models.cluster_format``.
A fat tree's or rail's switch has one uplink of all the bandwidth that leaves it: traffic is taken to be spread evenly
over the cables that it consists of.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from cost_models.fields import (
    Table,
    as_table,
    check_keys,
    get_count,
    get_field,
    get_number,
    get_seconds,
    get_tables,
    get_text,
    shown,
    suggest,
)

#: Names of a torus' dimensions, of a fat tree's tiers, and of a rail network's.
_DIMENSIONS = ("x", "y", "z", "w", "v", "u")
_TIERS = ("leaf", "spine", "core")
_RAILS = ("rail", "spine")


def expand_topology(table: Table) -> Table:
    """A cluster's table with ``levels`` in the place of ``topology`` and ``link``; the same table if it has neither.

    Raises:
        ValueError: naming the field that is missing, unknown or malformed, and what was expected.
    """
    if "topology" not in table:
        if "link" in table:
            raise ValueError("[[link]] needs a [topology] of kind = 'links', with the number of devices")
        return table
    topology = as_table(table["topology"], "topology")
    kind = get_text(topology, "kind", "topology")
    if kind not in _KINDS:
        hint = suggest(kind, _KINDS) or f": expected one of {', '.join(_KINDS)}"
        raise ValueError(f"topology.kind has an unknown value {shown(kind)}{hint}")
    if "link" in table and kind != "links":
        raise ValueError(
            f"[[link]] goes with [topology] kind = 'links', not {kind!r}: drop the links or change the kind"
        )
    keys, outer = _KINDS[kind]
    check_keys(topology, ("kind", *keys), "topology")
    inside = list(get_tables(table, "levels", "the cluster")) if "levels" in table else []
    if not inside and kind in ("levels", "fat-tree", "rail"):
        raise ValueError(
            f"[topology] kind = {kind!r} joins the groups of [[levels]], which are missing: add one level for what is"
            " in a node (size = 1 for nodes of one device)"
        )
    sizes = [get_count(level, "size", f"levels[{index}]") for index, level in enumerate(inside)]
    rest = {key: value for key, value in table.items() if key not in ("topology", "link", "levels")}
    return {**rest, "levels": [*inside, *outer(topology, table, math.prod(sizes))]}


def _torus(topology: Table, table: Table, inner: int) -> list[dict[str, Any]]:
    dims = _get_counts(topology, "dims")
    if len(dims) > len(_DIMENSIONS):
        raise ValueError(f"topology.dims has {len(dims)} dimensions: at most {len(_DIMENSIONS)} have names")
    wraps = topology.get("wrap", True)
    wraps = [wraps] * len(dims) if isinstance(wraps, bool) else wraps
    if not isinstance(wraps, list) or len(wraps) != len(dims) or not all(isinstance(wrap, bool) for wrap in wraps):
        raise ValueError(
            f"topology.wrap must be true, false, or one of them for each of {len(dims)} dims, got {shown(wraps)}"
        )
    return [
        {"name": name, "size": size, "wiring": "ring" if wrap else "line", **_link_figures(topology)}
        for name, size, wrap in zip(_DIMENSIONS, dims, wraps)
    ]


def _fat_tree(topology: Table, table: Table, inner: int) -> list[dict[str, Any]]:
    return _tiers(topology, inner, names=_TIERS, leaf={})


def _rail(topology: Table, table: Table, inner: int) -> list[dict[str, Any]]:
    return _tiers(topology, inner, names=_RAILS, leaf={"wiring": "rail"})


def _tiers(topology: Table, inner: int, *, names: tuple[str, ...], leaf: dict[str, Any]) -> list[dict[str, Any]]:
    """A level of links to switches, and one of uplinks for each further tier."""
    sizes = _get_counts(topology, "sizes")
    if len(sizes) > len(names):
        raise ValueError(f"topology.sizes has {len(sizes)} tiers: at most {len(names)} ({', '.join(names)})")
    ratios = _per_tier(topology, "oversubscription", len(sizes) - 1, get_number, default=1.0)
    latencies = _per_tier(topology, "latency", len(sizes), get_seconds)
    shared_by = min(get_count(topology, "shared_by", "topology") if "shared_by" in topology else 1, inner)
    bandwidth = get_number(topology, "bandwidth", "topology")
    common = {key: topology[key] for key in ("protocols",) if key in topology}
    levels: list[dict[str, Any]] = [
        {"name": names[0], "size": sizes[0], "bandwidth": bandwidth, "latency": latencies[0], "shared_by": shared_by,
         **leaf, **common},
    ]  # fmt: skip
    links_below = sizes[0] * (1 if leaf else math.ceil(inner / shared_by))
    for name, size, latency, ratio in zip(names[1:], sizes[1:], latencies[1:], ratios):
        bandwidth *= links_below / ratio
        levels.append(
            {"name": name, "size": size, "bandwidth": bandwidth, "latency": latency, "wiring": "uplink", **common}
        )
        links_below = size
    return levels


def _links(topology: Table, table: Table, inner: int) -> list[dict[str, Any]]:
    links = get_tables(table, "link", "the cluster")
    for index, link in enumerate(links):
        for key in ("bandwidth", "latency"):
            get_field(link, key, f"link[{index}]")
    figures = {key: links[0][key] for key in ("bandwidth", "latency")}  # every link says its own
    count = get_count(topology, "devices", "topology")
    return [{"name": "links", "size": count, "wiring": "links", "links": links, **figures}]


def _levels(topology: Table, table: Table, inner: int) -> list[dict[str, Any]]:
    return []


#: Kind → fields beside ``kind``, and what writes its levels from the topology, the file and the devices inside.
_KINDS: dict[str, tuple[tuple[str, ...], Callable[[Table, Table, int], list[dict[str, Any]]]]] = {
    "levels": ((), _levels),
    "fat-tree": (("sizes", "oversubscription", "bandwidth", "latency", "shared_by", "protocols"), _fat_tree),
    "rail": (("sizes", "oversubscription", "bandwidth", "latency", "shared_by", "protocols"), _rail),
    "torus": (("dims", "wrap", "bandwidth", "latency", "protocols"), _torus),
    "links": (("devices",), _links),
}


def _link_figures(topology: Table) -> dict[str, Any]:
    return {
        "bandwidth": get_number(topology, "bandwidth", "topology"),
        "latency": get_seconds(topology, "latency", "topology"),
        **{key: topology[key] for key in ("protocols",) if key in topology},
    }


def _get_counts(topology: Table, key: str) -> list[int]:
    """A list of at least one count."""
    values = get_field(topology, key, "topology")
    if not isinstance(values, list) or not values:
        raise ValueError(f"topology.{key} must be a list of integers of at least 1, got {shown(values)}")
    return [get_count({f"{key}[{index}]": value}, f"{key}[{index}]", "topology") for index, value in enumerate(values)]


def _per_tier(
    topology: Table, key: str, count: int, get: Callable[[Table, str, str], float], *, default: float | None = None
) -> list[float]:
    """``count`` numbers: a list of them, or one for all."""
    value = topology.get(key, default) if default is not None else get_field(topology, key, "topology")
    if not isinstance(value, list):
        return [get({key: value}, key, "topology")] * count
    if len(value) != count:
        raise ValueError(
            f"topology.{key} must be one number, or {count} (one for each tier it is of), got {len(value)}"
        )
    return [get({f"{key}[{index}]": item}, f"{key}[{index}]", "topology") for index, item in enumerate(value)]
