"""Rules found by running, kept on disk: JSON files in ``~/.cache/meshwright/rules`` that may be deleted at any time.

A file is named by a digest of what its rule depends on: the operator's schema, the call, the versions of torch, of this
package and of the probing. Only torch's own operators are kept: another operator's code may have changed under the same
name. A file that is no rule of its key is ignored and written again; a folder that cannot be written is no cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from cost_models.files import read_json, write_text
from passes.ir.graph import Node, Value, map_refs
from passes.rules.operator_call import schema_of
from passes.rules.rule import PROBED, Dims, ShardingRule

#: Counted up whenever a probe may give another rule than before.
PROBING_VERSION = 1
MAX_FILES = 4096
_FACTOR = re.compile(r"p\d{1,3}(_piece)?")


def cache_folder() -> Path:
    """Where rules are kept: below ``XDG_CACHE_HOME``, or ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "meshwright" / "rules"


def cached_rule(
    node: Node, values: Mapping[str, Value], find: Callable[[], ShardingRule | None]
) -> ShardingRule | None:
    """The rule of ``node`` from its file, or from ``find``, which is then written."""
    if node.op.partition(".")[0] != "aten":
        return find()
    key = _key(node, values)
    path = cache_folder() / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:40]}.json"
    with suppress(ValueError, KeyError, TypeError):
        return _read(path, key, node, values)
    rule = find()
    with suppress(ValueError, OSError):
        _write(path, {"key": key, "rule": None if rule is None else _as_data(rule)})
    return rule


def _key(node: Node, values: Mapping[str, Value]) -> list[str]:
    def shape(value: Value) -> str:
        return f"{value.dtype}{list(value.shape)}{' with a gradient' * value.requires_grad}"

    call = map_refs((node.args, dict(sorted(node.kwargs.items()))), lambda ref: shape(values[ref.name]))
    outputs = [shape(value) for value in node.outputs]
    versions = [torch.__version__, _package_version(), str(PROBING_VERSION)]
    return [str(schema_of(node.op)), repr(call), *outputs, *versions]


def _package_version() -> str:
    try:
        return metadata.version("meshwright")
    except metadata.PackageNotFoundError:
        return "source"


def _read(path: Path, key: list[str], node: Node, values: Mapping[str, Value]) -> ShardingRule | None:
    """The rule in a file.

    Raises:
        ValueError, KeyError, TypeError: if it is not there, or is no rule of this call.
    """
    content = read_json(path, what="cached rule")
    if content["key"] != key:
        raise ValueError("of another call")
    data = content["rule"]
    if data is None:
        return None
    inputs = tuple(_dims(dims, values[name].shape) for dims, name in zip(data["inputs"], node.inputs, strict=True))
    outputs = tuple(_dims(dims, value.shape) for dims, value in zip(data["outputs"], node.outputs, strict=True))
    sizes = {str(factor): int(size) for factor, size in data["sizes"].items()}
    terms = None if data["terms"] is None else (tuple(int(place) for place in data["terms"]),)
    return ShardingRule(inputs, outputs, sizes, terms=terms, passes_partial=False, source=PROBED)


def _dims(data: Any, shape: tuple[int, ...]) -> Dims:
    dims = tuple(tuple(map(str, factors)) for factors in data)
    if len(dims) != len(shape) or not all(_FACTOR.fullmatch(factor) for factors in dims for factor in factors):
        raise ValueError("not the dims of this tensor")
    return dims


def _as_data(rule: ShardingRule) -> dict[str, Any]:
    return {
        "inputs": rule.inputs,
        "outputs": rule.outputs,
        "sizes": dict(rule.sizes),
        "terms": None if rule.terms is None else rule.terms[0],
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [*path.parent.glob("*.json"), *path.parent.glob(".*.partial")]  # the latter of processes that were killed
    if len(files) >= MAX_FILES:
        for file in sorted(files, key=_age)[: MAX_FILES // 2]:
            file.unlink(missing_ok=True)
    write_text(path, json.dumps(content))


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another process removed it
        return 0.0
