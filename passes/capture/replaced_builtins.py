"""``int(tensor)`` and ``float(tensor)`` of numbers that no trace knows: they have to give numbers of Python.

Where a line of the model asks for one, the model is traced again with another ``int`` or ``float`` in that file's
global names, which gives what ``.item()`` does.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import linecache
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from passes.capture.another_trace import NeedsAnotherTrace
from passes.capture.ordered_sets import AsBase
from passes.capture.tracing_errors import innermost_frame_of_model, is_of_the_model
from passes.torch_compat.index_numbers import IndexNumber


def with_builtin(name: str, refusal: Exception) -> Exception:
    """``refusal``, which asks for another trace if the line that is running now can have another builtin."""
    namespace = _namespace_with(name)
    return refusal if namespace is None else NeedsAnotherTrace(refusal, lambda: _replaced(namespace, name))


class _Int(int, metaclass=AsBase):
    """``int``, which gives of a tensor what ``.item()`` does."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype in INTEGERS:
            return args[0].item()
        return args[0] if args and type(args[0]) is IndexNumber else builtins.int(*args, **kwargs)


class _Float(float, metaclass=AsBase):
    """``float``, likewise."""

    def __new__(cls, *args: Any) -> Any:
        is_tensor = bool(args) and isinstance(args[0], torch.Tensor) and args[0].is_floating_point()
        return args[0].item() if is_tensor else builtins.float(*args)


INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)
_REPLACEMENTS = {"int": _Int, "float": _Float}


@contextlib.contextmanager
def _replaced(namespace: dict[str, Any], name: str) -> Iterator[None]:
    namespace[name] = _REPLACEMENTS[name]
    try:
        yield
    finally:
        namespace.pop(name, None)


def _namespace_with(name: str) -> dict[str, Any] | None:
    """The global names of the line that is running now, if their builtin can be replaced unseen."""
    frame = innermost_frame_of_model()
    if frame is None or not is_of_the_model(frame.f_code.co_filename):
        return None
    names, path = frame.f_globals, frame.f_code.co_filename
    if name in names or names.get("__file__") != path:
        return None
    return names if _only_calls(name, linecache.getlines(path)) else None


def _only_calls(builtin: str, lines: Sequence[str]) -> bool:
    """Whether a file uses a builtin as a function, in ``isinstance`` and in annotations alone."""
    allowed: set[int] = set()
    names: list[ast.Name] = []
    for node in ast.walk(ast.parse("".join(lines))):
        kinds: list[ast.AST | None] = []
        if isinstance(node, ast.Name) and node.id == builtin:
            names.append(node)
        elif isinstance(node, ast.Call):
            allowed.add(id(node.func))
            is_check = isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass")
            kinds = list(node.args[1:2]) if is_check else []
        elif isinstance(node, (ast.arg, ast.AnnAssign)):
            kinds = [node.annotation]
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            kinds = [node.returns]
        allowed.update(id(part) for kind in kinds if kind is not None for part in ast.walk(kind))
    return all(id(name) in allowed for name in names)
