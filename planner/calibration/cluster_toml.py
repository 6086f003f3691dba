"""A cluster as a TOML file that people can read and change."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from cost_models import Cluster

_BARE = re.compile(r"[A-Za-z0-9_-]+")


_HEAD = """# Measured by planner profile, each call alone; [profile.ranges] says over which sizes, and how far the calls
# were off that no curve was fitted to.

"""


def as_toml(cluster: Cluster) -> str:
    """The text of a cluster file; numbers have six digits."""
    data = cluster.to_dict()
    if cluster.num_devices == 1:
        del data["levels"]
        data["devices"] = [{"count": 1, **data.pop("device")}]
    return _HEAD + "\n".join(_table((), data)) + "\n"


def _table(path: tuple[str, ...], table: Mapping[str, Any]) -> Iterator[str]:
    """Lines of a table: its values first, then the tables inside of it."""
    for key, value in table.items():
        if not _is_table(value) and not _is_tables(key, value):
            yield f"{_key(key)} = {_value(value)}"
    for key, value in table.items():
        inner = (*path, key)
        if _is_table(value):
            yield f"\n[{'.'.join(map(_key, inner))}]"
            yield from _table(inner, value)
        elif _is_tables(key, value):
            for item in value:
                yield f"\n[[{'.'.join(map(_key, inner))}]]"
                yield from _table(inner, item)


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_tables(key: str, value: Any) -> bool:
    return key in ("levels", "devices") and isinstance(value, list)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else json.dumps(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return repr(float(f"{value:.6g}"))
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        inside = ", ".join(map(_value, value))
        if value and isinstance(value[0], Mapping):
            return "[\n" + "".join(f"    {_value(item)},\n" for item in value) + "]"
        return f"[{inside}]"
    return str(value)
