"""Patterns that people register (``planner.register_fusion``): their spellings become calls of their operators."""

from __future__ import annotations

from collections.abc import Sequence

from cost_models.registrations import forget, note
from passes.fuse.pattern_notation import Constant, Tensor, leaves_of
from passes.fuse.patterns import ACTIVATIONS, OPERATORS, Row
from passes.rules.operator_call import schema_of

KIND = "fusions"
#: "name: pattern → fused" → its row, in the order of registration.
_ROWS: dict[str, Row] = {}


def register_fusion(name: str, pattern: str, fused: str) -> None:
    """Have a spelling planned and run as one operator; it is tried before those of this package of the same size.

    Every match is checked: both sides run on small random tensors, with gradients, and must agree. Every process that
    plans or runs a plan with the pattern must register it, and the operator, which needs an implementation for fake
    tensors and one for gradients (``torch.library``), and may have a rule (``planner.register_rule``).

    Args:
        name: what reports call matches, one word; several spellings may have the same.
        pattern: the spelling, in the notation of ``passes.fuse.pattern_notation``:
            ``"x * sigmoid($beta * x)"``. Activations that torch has a name for (``silu``, ``gelu``) go by it.
        fused: what stands for it, in the same notation: ``"ops.my.swish(x, $beta)"``.

    Raises:
        ValueError: if a side is not in the notation or names an operator that torch does not know, if ``fused`` takes
            what ``pattern`` does not have, or the name is one of this package's patterns.
    """
    row = _checked(name, pattern, fused)
    _ROWS[_line(row)] = row
    note(KIND, f"{name}: {pattern}", fused)


def registered_rows(lines: Sequence[str] | None = None) -> dict[str, Row]:
    """The registered patterns by line: all of them, or those that a plan was made with.

    Raises:
        ValueError: if one of ``lines`` is not registered in this process.
    """
    if lines is None:
        return dict(_ROWS)
    missing = [line for line in lines if line not in _ROWS]
    if missing:
        raise ValueError(
            f"the plan was made with the pattern {missing[0]!r}, which is not registered here: call "
            "planner.register_fusion with it before (or plan again without)"
        )
    return {line: row for line, row in _ROWS.items() if line in lines}


def forget_fusions() -> None:
    """Forget all registered patterns."""
    for row in _ROWS.values():
        forget(KIND, f"{row.name}: {row.pattern}")
    _ROWS.clear()


def _line(row: Row) -> str:
    return f"{row.name}: {row.pattern} → {row.fused}"


def _checked(name: str, pattern: str, fused: str) -> Row:
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"name of a pattern: expected one word of letters, digits and '_', got {name!r}")
    if any(name == row.name for row in (*ACTIVATIONS, *OPERATORS)):
        raise ValueError(f"pattern {name!r} comes with this package: choose another name")
    for text in (pattern, fused):
        if not isinstance(text, str) or not text.isprintable():
            raise ValueError(f"pattern {name!r}: expected one line of text, got {text!r}")
    row = Row(name, pattern, fused)
    for text, tree in ((pattern, row.tree), (fused, row.result)):
        unknown = min((ops[0] for ops in tree.operators if not any(map(schema_of, ops))), default=None)
        if unknown is not None:
            raise ValueError(f"pattern {text!r}: torch has no operator {unknown!r}; define it before its pattern")
    twin = next((each for each in _ROWS.values() if each.pattern == pattern and each != row), None)
    if twin is not None:
        raise ValueError(f"pattern {pattern!r} is registered as {twin.name!r} → {twin.fused!r}")
    bound = set(leaves_of(row.tree))
    for leaf in sorted(leaves_of(row.result), key=str):
        if leaf not in bound or leaf == Tensor("_"):
            kind = "$" if isinstance(leaf, Constant) else ""
            raise ValueError(f"pattern {pattern!r} has no {kind}{leaf.name}, which {fused!r} takes")
    return row
