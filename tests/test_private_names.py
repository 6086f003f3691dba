"""Private names of torch, spmd_types, triton and transformers: each is there, and each is used in one place alone."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from passes.torch_compat.private_names import PRIVATE_NAMES
from runtime.torch_compat.runtime_names import OPTIONAL_NAMES, RUNTIME_NAMES

LAYERS = ("planner", "runtime", "passes", "cost_models")
LIBRARIES = ("torch", "spmd_types", "triton", "transformers")
#: Not private, for all their underscore: what a named tuple has.
PUBLIC = {"_replace", "_fields", "_asdict", "_make", "_exit"}
#: Operators and their namespaces, which are data of a registry and no names of Python.
REGISTRIES = ("torch.ops", "aten", "_aten")
#: Objects to look at where a name is an attribute of those, not of their class.
EXAMPLES: dict[str, Callable[[], Any]] = {
    "torch._ops.OpOverload": lambda: torch.ops.aten.add.Tensor,
    "torch.nn.Module": torch.nn.Module,
    "torch.optim.Optimizer": lambda: torch.optim.SGD([torch.zeros(1)], lr=0.1),
}


def is_there(name: str) -> bool:
    """Whether a dotted name means something: modules first, then attributes."""
    thing: Any = importlib.import_module(name.partition(".")[0])
    parts = name.split(".")
    for place, part in enumerate(parts[1:], start=1):
        owner = ".".join(parts[:place])
        if owner in EXAMPLES:
            thing = EXAMPLES[owner]()
        if isinstance(thing, type) and any(part in getattr(kind, "__annotations__", {}) for kind in thing.__mro__):
            return True  # set when an object is made
        try:
            thing = getattr(thing, part) if hasattr(thing, part) else importlib.import_module(f"{owner}.{part}")
        except ImportError:
            return False
    return True


def test_each_private_name_is_there() -> None:
    names = {**PRIVATE_NAMES, **RUNTIME_NAMES}
    installed = [library for library in LIBRARIES if importlib.util.find_spec(library)]
    asked = [name for name in names if name.partition(".")[0] in installed]
    missing = [f"{name}: {names[name]}" for name in asked if not is_there(name)]
    assert not missing, f"not in the installed versions (torch {torch.__version__}): {missing}"
    assert not is_there("torch._ops.NoSuchOperator") and not is_there("torch.nn.Module._no_such_table")


@functools.cache
def trees() -> dict[Path, ast.Module]:
    root = Path(__file__).parent.parent
    return {path: ast.parse(path.read_text()) for layer in LAYERS for path in sorted((root / layer).rglob("*.py"))}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_" and name not in PUBLIC


@functools.cache
def nodes_of(tree: ast.Module) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


@functools.cache
def own_names(tree: ast.Module) -> frozenset[str]:
    """Private names that a file defines."""
    return frozenset(_defined(tree))


def _defined(tree: ast.Module) -> Iterator[str]:
    """Functions, classes, variables, attributes of ``self``."""
    for node in nodes_of(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            yield from [node.attr] if isinstance(node.ctx, ast.Store) else ()


def private_uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of every private name that is imported, read from something, or named in a string alone."""
    for node in nodes_of(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if ast.unparse(node.value).startswith(REGISTRIES):
                continue
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES:
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in last_parts():
            names = [node.value]
        yield from ((getattr(node, "lineno", 0), name) for name in names if is_private(name))


@functools.cache
def last_parts() -> frozenset[str]:
    """What the lists are about: the last part of each name."""
    return frozenset(name.rpartition(".")[2] for name in (*PRIVATE_NAMES, *RUNTIME_NAMES, *OPTIONAL_NAMES))


def is_compat(path: Path) -> bool:
    return path.parent.name == "torch_compat"


def test_private_names_are_used_in_their_packages_alone() -> None:
    ours = {name for path, tree in trees().items() if not is_compat(path) for name in own_names(tree)}
    uses = []
    for path, tree in trees().items():
        if is_compat(path):
            continue
        here = own_names(tree)
        for line, name in private_uses(tree):
            if name not in here and (name not in ours or name in last_parts()):
                uses.append(f"{path.parent.name}/{path.name}:{line}: {name}")
    assert not uses, f"belongs into torch_compat of passes or runtime, and into its list of names: {uses}"


def test_the_lists_name_all_that_the_packages_use() -> None:
    """And nothing that they do not use any more."""
    for layer, names in (("passes", PRIVATE_NAMES), ("runtime", {**RUNTIME_NAMES, **OPTIONAL_NAMES})):
        used = {
            name
            for path, tree in trees().items()
            if is_compat(path) and layer in path.parts and not path.name.endswith("_names.py")
            for name in {name for _, name in private_uses(tree)} - set(own_names(tree))
        }
        listed = {part for name in names for part in name.split(".") if is_private(part)}
        assert used - listed == set(), f"{layer}: say in its list what breaks without these"
        built = {f"_global_{kind}_hooks" for kind in ("forward", "forward_pre", "backward", "backward_pre")}
        assert listed - used - built - {"_raw_saved_*", "_C"} == set(), f"{layer}: not used any more"


def test_a_private_name_outside_of_its_package_is_seen() -> None:
    code = "from torch._ops import OpOverload\ndef f(module, x):\n    return module._parameters, x._version\n"
    names = [name for _, name in private_uses(ast.parse(code))]
    assert sorted(names) == ["_ops", "_parameters", "_version"]
    assert [name for _, name in private_uses(ast.parse("torch.ops.aten._softmax(x)"))] == []
    assert [name for _, name in private_uses(ast.parse("getattr(model, '_buffers')"))] == ["_buffers"]
