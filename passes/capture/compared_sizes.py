"""Numbers that the lines of a model compare sizes with, as its source has them.

``if len(rows) == 7`` and ``if rows.shape[0] > self.most`` are asked of Python's own numbers, which no trace sees. Where
a mask picks rows, how many there are is therefore tried around each number that running functions, and those of the
same file that they call, compare a size with.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch

#: Attributes and functions that give sizes.
_SIZES = frozenset({"len", "shape", "size", "numel", "nelement", "count_nonzero"})
#: Functions that choose between a size and a number.
_CHOICES = frozenset({"min", "max"})
_ARITHMETIC: Mapping[type[ast.operator], Any] = {
    ast.Add: int.__add__, ast.Sub: int.__sub__, ast.Mult: int.__mul__,
}  # fmt: skip


def compared_sizes(frames: Iterable[FrameType]) -> set[int]:
    """The whole numbers that sizes are compared with in ``frames``; those that can be looked up from there."""
    numbers = set[int]()
    for frame in frames:
        statements = list(_statements_of(frame))
        sizes = _SIZES | {name for each in statements for name in _named_sizes(each)}
        for each in statements:
            operands = _operands(each)
            if any(_mentions(operand, sizes) for operand in operands):
                numbers |= {number for operand in operands if (number := _number(operand, frame)) is not None}
    return numbers


def _statements_of(frame: FrameType) -> Iterator[ast.expr | ast.stmt]:
    """Those of the function that runs in ``frame``, and of functions of its file that it names."""
    code = frame.f_code
    statements, functions = _source(code.co_filename)
    own = [line for *_, line in code.co_lines() if line]
    ranges = [
        (min(own, default=0), max(own, default=0)),
        *(lines for name in code.co_names for lines in functions.get(name, ())),
    ]
    for each in statements:
        if any(first <= each.lineno <= last for first, last in ranges):
            yield each


@functools.lru_cache(maxsize=64)
def _source(filename: str) -> tuple[tuple[ast.expr | ast.stmt, ...], Mapping[str, Sequence[tuple[int, int]]]]:
    """The comparisons, calls and assignments in a file, and the lines of its functions by name; none without source."""
    try:
        nodes = list(ast.walk(ast.parse("".join(linecache.getlines(filename)))))
    except (SyntaxError, ValueError):  # ValueError: null bytes
        return (), {}
    functions: dict[str, list[tuple[int, int]]] = {}
    for each in nodes:
        if isinstance(each, ast.FunctionDef):
            functions.setdefault(each.name, []).append((each.lineno, each.end_lineno or each.lineno))
    return tuple(each for each in nodes if isinstance(each, (ast.Compare, ast.Call, ast.Assign))), functions


def _named_sizes(statement: ast.expr | ast.stmt) -> Iterator[str]:
    """The names that an assignment gives to sizes."""
    if isinstance(statement, ast.Assign) and _mentions(statement.value, _SIZES):
        for target in statement.targets:
            yield from (each.id for each in ast.walk(target) if isinstance(each, ast.Name))


def _operands(statement: ast.expr | ast.stmt) -> list[ast.expr]:
    """What is compared with each other."""
    if isinstance(statement, ast.Compare):
        return [statement.left, *statement.comparators]
    if isinstance(statement, ast.Call) and isinstance(statement.func, ast.Name) and statement.func.id in _CHOICES:
        return statement.args
    return []


def _mentions(expression: ast.expr, names: Iterable[str]) -> bool:
    mentioned = {each.id for each in ast.walk(expression) if isinstance(each, ast.Name)}
    mentioned |= {each.attr for each in ast.walk(expression) if isinstance(each, ast.Attribute)}
    return not mentioned.isdisjoint(names)


def _number(expression: ast.expr, frame: FrameType) -> int | None:
    """The whole number that an expression has in ``frame``, None if that takes more than looking it up."""
    if isinstance(expression, ast.BinOp):
        operator = _ARITHMETIC.get(type(expression.op))
        left, right = (_number(each, frame) for each in (expression.left, expression.right))
        return None if operator is None or left is None or right is None else int(operator(left, right))
    if isinstance(expression, ast.UnaryOp) and isinstance(expression.op, ast.USub):
        number = _number(expression.operand, frame)
        return None if number is None else -number
    if (size := _size(expression, frame)) is not None:
        return size
    value = _looked_up(expression, frame)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _size(expression: ast.expr, frame: FrameType) -> int | None:
    """``len(x)``, ``x.shape[0]``, ``x.size(0)`` and ``x.numel()`` of a tensor that ``frame`` has; None of all else."""
    match expression:
        case ast.Call(func=ast.Name(id="len"), args=[owner]):
            place: ast.expr = ast.Constant(0)
        case ast.Subscript(value=ast.Attribute(value=owner, attr="shape"), slice=place):
            pass
        case ast.Call(func=ast.Attribute(value=owner, attr="size"), args=[place]):
            pass
        case ast.Call(func=ast.Attribute(value=owner, attr="numel"), args=[]):
            tensor = _looked_up(owner, frame)
            return tensor.numel() if isinstance(tensor, torch.Tensor) else None
        case _:
            return None
    tensor, dim = _looked_up(owner, frame), _number(place, frame)
    if not isinstance(tensor, torch.Tensor) or dim is None or not -tensor.dim() <= dim < tensor.dim():
        return None
    return int(tensor.shape[dim])


def _looked_up(expression: ast.expr, frame: FrameType) -> Any:
    """What a name, an attribute or a constant stands for, without running any code of the model."""
    if isinstance(expression, ast.Constant):
        return expression.value
    if isinstance(expression, ast.Name):
        return frame.f_locals.get(expression.id, frame.f_globals.get(expression.id))
    if isinstance(expression, ast.Attribute):
        return inspect.getattr_static(_looked_up(expression.value, frame), expression.attr, None)
    return None
