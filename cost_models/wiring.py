"""Reads how a level's links run, and refuses what cannot be built."""

from __future__ import annotations

from collections.abc import Sequence

from cost_models.fields import (
    Table,
    check_keys,
    get_field,
    get_number,
    get_seconds,
    get_tables,
    get_text,
    shown,
    suggest,
)
from cost_models.hardware import WIRINGS, LinkLevel, Wire

#: Parts that a ring, a line or a list of links may join: every pair of them is routed.
MAX_PARTS = 512
_LINK_KEYS = ("a", "b", "bandwidth", "latency")


def get_wiring(table: Table, where: str) -> str:
    """A level's ``wiring``, ``"switch"`` if it has none.

    Raises:
        ValueError: if there is no such wiring, or it does not go with the level's other fields.
    """
    wiring = get_text(table, "wiring", where) if "wiring" in table else "switch"
    if wiring not in WIRINGS:
        hint = suggest(wiring, WIRINGS) or f": expected one of {', '.join(WIRINGS)}"
        raise ValueError(f"{where}.wiring has an unknown value {shown(wiring)}{hint}")
    if "links" in table and wiring != "links":
        raise ValueError(f"{where} lists links, but its wiring is {wiring!r}: drop them, or set wiring = 'links'")
    if wiring not in ("switch", "rail") and table.get("shared_by", 1) != 1:
        raise ValueError(f"{where}.shared_by goes with links to a switch: drop it from a level of wiring {wiring!r}")
    if wiring == "links" and table.get("exceptions"):
        raise ValueError(f"{where}.exceptions: in a level of links each link says its own figures; drop the exceptions")
    return wiring


def parse_wires(table: Table, where: str) -> tuple[Wire, ...]:
    """The links of a level of wiring ``"links"``; what a link does not say is the level's.

    Raises:
        ValueError: if a field is missing, unknown or malformed, or two nodes are linked twice.
    """
    wires: dict[frozenset[int | str], Wire] = {}
    for index, link in enumerate(get_tables(table, "links", where)):
        here = f"{where}.links[{index}]"
        check_keys(link, _LINK_KEYS, here)
        a, b = (_get_node(link, end, here) for end in ("a", "b"))
        if a == b:
            raise ValueError(f"{here} links {shown(a)} to itself: name two nodes")
        if frozenset((a, b)) in wires:
            raise ValueError(f"{here}: {shown(a)} and {shown(b)} are linked twice: write one link of all the bandwidth")
        fields: Table = {**{key: table[key] for key in ("bandwidth", "latency") if key in table}, **link}
        wires[frozenset((a, b))] = Wire(
            a, b, get_number(fields, "bandwidth", here), get_seconds(fields, "latency", here)
        )
    return tuple(wires.values())


def check_wiring(levels: Sequence[LinkLevel]) -> None:
    """Check that levels can be built on each other and that no part of a direct one is out of reach.

    Raises:
        ValueError: naming the level, what is wrong with it and what to do.
    """
    inner = 1
    for index, level in enumerate(levels):
        where, parts = f"levels[{index}] ({level.name})", level.group_size // inner
        inner = level.group_size
        if level.wiring == "uplink" and (index == 0 or levels[index - 1].is_direct):
            raise ValueError(
                f"{where}: wiring 'uplink' starts at the switches of the level inside, which has none: wire that one"
                " as 'switch' or 'rail', or this one as 'switch'"
            )
        if level.is_direct and parts > MAX_PARTS:
            raise ValueError(
                f"{where} links {parts:,} parts without switches: at most {MAX_PARTS} can be routed; cut it into "
                "several dimensions, or wire it as 'switch'"
            )
        if level.wiring == "links":
            _check_links(level, parts, where)


def _check_links(level: LinkLevel, parts: int, where: str) -> None:
    """Check that the links join all parts, and no others."""
    import networkx  # imported here: it takes longer than everything else in this package

    for node in (node for wire in level.wires for node in (wire.a, wire.b)):
        if isinstance(node, int) and node >= parts:
            raise ValueError(f"{where}: a link names part {node}, but its parts are 0 to {parts - 1}: change its size")
    graph = networkx.Graph((wire.a, wire.b) for wire in level.wires)
    graph.add_nodes_from(range(parts))
    reached = networkx.node_connected_component(graph, 0)
    apart = sorted((node for node in graph if node not in reached), key=str)
    if apart:
        names = ", ".join(shown(node) for node in apart[:5]) + ", …" * (len(apart) > 5)
        raise ValueError(f"{where}: no links lead from part 0 to {names}: add a link that joins them")


def _get_node(link: Table, end: str, where: str) -> int | str:
    node = get_field(link, end, where)
    if isinstance(node, bool) or not isinstance(node, (int, str)) or (isinstance(node, int) and node < 0):
        raise ValueError(f"{where}.{end} must be the number of a device or the name of a switch, got {shown(node)}")
    return node if isinstance(node, int) else get_text(link, end, where)
