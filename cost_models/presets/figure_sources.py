"""What presets say of where their figures come from: the comment that each file begins with, and those at links."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources.abc import Traversable
from itertools import takewhile

from cost_models.presets import load_preset, preset_names
from cost_models.presets.preset_files import cluster_files, efficiency_files

#: The begin of a topic in a file's first comment; a level's name, and the source of its bandwidth.
_TOPIC = re.compile(r"([A-Z][a-z]+(?:[- ][a-z]+)?): (.*)")
_NAME, _BANDWIDTH = re.compile(r'name = "(.*)"'), re.compile(r"bandwidth = [^#]*# (.*)")


@cache
def figure_sources(preset: str) -> dict[str, str]:
    """Topic → its source, of a preset and of its efficiency curves; empty for what is no preset.

    Topics are the files' (``"Device"``, ``"Protocols"``, ``"Matmul"``, …), and ``"bandwidth of NAME"`` of each level.
    """
    if preset not in preset_names():
        return {}
    efficiency = load_preset(preset).get("device", {}).get("efficiency")
    curves = _lines(efficiency_files()[efficiency]) if isinstance(efficiency, str) else []
    lines = _lines(cluster_files()[preset])
    return {**_topics(curves), **_topics(lines), **dict(_links(lines))}


def _lines(file: Traversable) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()


def _topics(lines: Sequence[str]) -> dict[str, str]:
    topics: dict[str, str] = {}
    topic = ""
    for line in takewhile(lambda line: line.startswith("#"), lines):
        text = line.removeprefix("#").strip()
        start = _TOPIC.match(text)
        if start is not None:
            topic, topics[start[1]] = start[1], start[2]
        elif topic:
            topics[topic] += f" {text}"
    return topics


def _links(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    name = ""
    for line in lines:
        if (named := _NAME.match(line)) is not None:
            name = named[1]
        elif (stated := _BANDWIDTH.match(line)) is not None:
            yield f"bandwidth of {name}", stated[1]
