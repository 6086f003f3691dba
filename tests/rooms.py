"""The rooms of the source (packages of the four layers), and which of them import which."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import networkx

ROOT = Path(__file__).parent.parent
#: Outermost first: each may import those behind it.
LAYERS = ("planner", "runtime", "passes", "cost_models")


def sources() -> Iterator[Path]:
    """Every module of the four layers but ``__main__``, which only calls the command."""
    for layer in LAYERS:
        yield from (path for path in sorted((ROOT / layer).rglob("*.py")) if path.name != "__main__.py")


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str:
    """The package of a layer that a module is in, or the layer itself."""
    parts = module.split(".")
    return ".".join(parts[:2]) if len(parts) > 1 and (ROOT / parts[0] / parts[1]).is_dir() else parts[0]


@dataclass(frozen=True)
class Contents:
    """What a file imports of ours at its top, and anywhere in it; names of the classes that it defines."""

    at_top: tuple[str, ...]
    anywhere: tuple[str, ...]
    classes: tuple[str, ...]


@functools.cache
def contents_of(path: Path) -> Contents:
    """Read once for all tests of a process."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    classes = tuple(node.name for node in nodes if isinstance(node, ast.ClassDef))
    return Contents(tuple(_imported(tree.body)), tuple(_imported(nodes)), classes)


def _imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from (name for name in names if name.split(".")[0] in LAYERS)


def rooms_and_imports() -> networkx.DiGraph:
    """An arrow for each room that imports another."""
    graph = networkx.DiGraph()
    for path in sources():
        room = room_of(module_of(path))
        graph.add_node(room)
        for name in contents_of(path).at_top:
            if room_of(name) != room:
                graph.add_edge(room, room_of(name))
    return graph
