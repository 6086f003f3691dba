"""The structure that the README promises: imports go down only, no circles, and a quick ``import planner``."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import networkx
import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("planner", "runtime", "passes", "cost_models")
FILES = [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path) for path in FILES}


@functools.cache
def imports(path: Path) -> set[str]:
    """Modules of ours that a file imports, inside functions too; those for annotations alone are left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in (
            getattr(node.test, "id", ""),
            getattr(node.test, "attr", ""),
        ):
            node.body = []
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            imported.update(name if name in MODULES else node.module for name in names)
    return {name for name in imported if name.split(".")[0] in LAYERS}


def test_imports_go_down_only() -> None:
    upward = [
        f"{module_name(path)} imports {name}"
        for path in FILES
        for name in imports(path)
        if LAYERS.index(name.split(".")[0]) < LAYERS.index(path.relative_to(ROOT).parts[0])
    ]
    assert upward == []


def test_files_import_in_no_circle() -> None:
    graph = networkx.DiGraph()
    for path in FILES:
        graph.add_edges_from((module_name(path), name) for name in imports(path) & MODULES)
    circles = [circle for circle in networkx.simple_cycles(graph) if len(circle) > 1]
    assert circles == []


@pytest.mark.parametrize("module", ["planner", "planner.cli"])
def test_import_does_not_load_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
