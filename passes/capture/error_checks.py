"""Flags that a model asks for only to raise an error: ``if not ok.all(): raise``, ``assert x.isfinite().all()``.

Where such a flag depends on weights, no answer can be a constant of the program. It is traced with the answer that
raises nothing, and the program checks at every call that the flag still gives this answer.
"""

from __future__ import annotations

import ast
import dis
import functools
import linecache
from collections.abc import Iterator
from types import FrameType

#: Instructions that ask for the truth of an operand itself, and not of something that a function makes of it.
_ASKING = ("POP_JUMP", "JUMP_IF", "UNARY_NOT", "TO_BOOL")


def harmless_answer(frame: FrameType) -> bool | None:
    """The answer to the flag that ``frame`` asks for now with which it raises nothing; None if it may do other things.

    Only an answer that decides: with the other one, the statement raises.
    """
    position = _asked(frame)
    statements = _statements(frame.f_code.co_filename)
    if position is None:
        return None
    for statement in statements:
        answer = not isinstance(statement, ast.If)
        for operand, wish in _decisive(statement.test, answer):
            if _span(operand) == position:
                return wish
    return None


def _asked(frame: FrameType) -> tuple[int, ...] | None:
    """The place of the expression whose truth is asked for now: line, last line, column, last column."""
    offset = frame.f_lasti
    if not dis.opname[frame.f_code.co_code[offset]].startswith(_ASKING):
        return None
    # The jump stands where the whole statement does; the instruction before it computes the operand.
    positions = list(frame.f_code.co_positions())[offset // 2 - 1]
    return tuple(place for place in positions if place is not None)


def _span(node: ast.expr) -> tuple[int, ...]:
    return (node.lineno, node.end_lineno or 0, node.col_offset, node.end_col_offset or 0)


@functools.lru_cache(maxsize=64)
def _statements(filename: str) -> tuple[ast.If | ast.Assert, ...]:
    """``assert``, and ``if`` that ends by raising, outside of ``try``."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return ()
    return tuple(_raising(tree))


def _raising(tree: ast.AST) -> Iterator[ast.If | ast.Assert]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Try):
            continue
        if isinstance(node, ast.Assert) or (isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise)):
            yield node
        yield from _raising(node)


def _decisive(test: ast.expr, answer: bool) -> Iterator[tuple[ast.expr, bool]]:
    """Operands of a condition that each have to be what is beside them for the condition to be ``answer``."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _decisive(test.operand, not answer)
    elif isinstance(test, ast.BoolOp):
        # The others are settled when the last one is asked: of "and" they are true, of "or" false.
        all_decide = isinstance(test.op, ast.And) == answer
        for operand in test.values if all_decide else test.values[-1:]:
            yield from _decisive(operand, answer)
    elif not isinstance(test, ast.Compare) or len(test.ops) == 1:
        yield test, answer
