"""What an emitted file imports: what it uses, and nothing else."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from passes.emit.source_layout import WIDTH

#: Line of a plain import, and the name that it gives.
_MODULES = (("math", "import math"),)
_PACKAGES = (
    ("spmd", "import spmd_types as spmd"),
    ("torch", "import torch"),
    ("F", "import torch.nn.functional as F"),
)
_TYPES = ("I", "P", "R", "S", "V")
_RUNTIME = ("kernels", "ops")
_LANGUAGE = ("tl", "triton")
_SCALAR_MATH = (
    "gelu", "gelu_slope", "gelu_tanh", "gelu_tanh_slope", "larger", "larger_share", "row_max", "row_max_share",
    "row_sum", "sigmoid", "sign", "silu", "silu_slope", "tanh",
)  # fmt: skip
_TILES = (
    "load", "rows_from", "share_of_rows", "store", "store_column_sums", "store_row_sums", "store_rows", "store_sum",
    "whole_tile",
)  # fmt: skip
#: Names that kernels import.
KERNEL_NAMES = frozenset((*_SCALAR_MATH, *_TILES, *_LANGUAGE))


def imports(body: str, reduced: Sequence[str]) -> str:
    """The imports of ``body``; gradients of dtypes ``reduced``, below float32, are reduced in those."""
    used = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}
    has_kernels = "triton" in used
    if reduced:
        used |= {"ops", "torch"}
    standard = [line for name, line in _MODULES if name in used]
    packages = [line for name, line in _PACKAGES if name in used and not (name == "spmd" and reduced)]
    packages += _import("spmd_types", _TYPES, used)
    ours = _import("runtime", _RUNTIME, used)
    if has_kernels:
        ours += _import("runtime.kernels.language", _LANGUAGE, used)
        ours += _import("runtime.kernels.scalar_math", _SCALAR_MATH, used)
        ours += _import("runtime.kernels.tiles", _TILES, used)
    ours.append("from runtime.programs.program import Block")
    said_once = []
    if reduced:
        dtypes = ", ".join(f"torch.{dtype}" for dtype in reduced)
        words = " or ".join(reduced)
        said_once = [f"spmd = ops.reducing_in({dtypes})  # gradients of what is {words} are reduced as {words}"]
    return "".join(f"{line}\n" for line in _sections(standard, packages, ours, said_once))


def _sections(*sections: Sequence[str]) -> list[str]:
    lines: list[str] = []
    for section in sections:
        lines += [*([""] if lines and section else []), *section]
    return lines


def _import(module: str, names: Sequence[str], used: set[str]) -> list[str]:
    """An import, its names one a line if they are too many for one."""
    used_names = [name for name in names if name in used]
    line = f"from {module} import {', '.join(used_names)}"
    if not used_names or len(line) <= WIDTH:
        return [line] if used_names else []
    return [f"from {module} import (", *(f"    {name}," for name in used_names), ")"]
