"""The notation of sharding rules: an einsum with names, one line per operator.

    "...k, nk + n -> ...n"          linear: a product of two inputs plus a term, contracted over k
    "~ ... -> ..."                  relu: not linear, takes no partial sums
    "vd / ... => ...d"              embedding: rows of a table picked by the indices behind the slash

One operand per tensor argument of the operator, in the order of its schema; an argument that is None drops out.

=============  ====================================================================================================
``k``          a factor: one letter per dim
``...``        the remaining dims, aligned from the right across operands as broadcasting does
``(h d)``      a dim made of several factors, outermost first
``k!``         a factor that must stay whole
``[v]``        a factor that the operator itself reduces over (it issues the collective, its output is whole)
``_``          a dim without factors (no cut reaches it)
``a, b``       factors of a product; ``a + b`` a sum of such terms
``a / i``      operands behind the slash steer (divisors, indices, masks): the operator is not linear in them; nothing
               behind it is one operand without dims
``~``          in front: the operator is not a sum of products at all
``->``         partial sums pass through; ``=>``: a contraction gives partial sums, but none may come in
=============  ====================================================================================================

A dim of size 1 carries no factor: broadcasting needs no notation of its own.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from passes.rules.operator_call import OperatorCall, tensor_arguments
from passes.rules.rule import Dims, Factor, Reduction, ShardingRule

REST = "..."
_TOKEN = re.compile(r"\.\.\.|\([^)]*\)|\[[a-z]\]|[a-z]!?|_")

#: Factors of one dim as written; ``(REST,)`` stands for the remaining dims.
Tokens = tuple[tuple[Factor, ...], ...]


@dataclass(frozen=True)
class Notation:
    """A parsed line; ``terms`` hold operand indices as written (arguments left out included)."""

    operands: tuple[Tokens, ...]
    outputs: tuple[Tokens, ...]
    terms: tuple[tuple[int, ...], ...] | None
    whole: frozenset[Factor]
    reduced: frozenset[Factor]
    passes_partial: bool


@functools.cache
def parse(text: str) -> Notation:
    """Read one line of the notation.

    Raises:
        ValueError: if the line is not in the notation.
    """
    left, arrow, right = text.partition("=>" if "=>" in text else "->")
    if not arrow:
        raise ValueError(f"sharding rule {text!r}: expected 'operands -> outputs'")
    nonlinear = left.strip().startswith("~")
    summed, slash, steering = left.strip().removeprefix("~").partition("/")
    operands: list[str] = []
    terms = []
    for term in summed.split("+"):
        parts = term.split(",")
        terms.append(tuple(range(len(operands), len(operands) + len(parts))))
        operands.extend(parts)
    if slash:
        operands.extend(steering.split(","))
    return Notation(
        operands=tuple(_tokens(operand, text) for operand in operands),
        outputs=tuple(_tokens(output, text) for output in right.split(",")),
        terms=None if nonlinear else tuple(terms),
        whole=frozenset(re.findall(r"([a-z])!", text)),
        reduced=frozenset(re.findall(r"\[([a-z])\]", text)),
        passes_partial=arrow == "->",
    )


def _tokens(operand: str, line: str) -> Tokens:
    compact = operand.strip()
    if _TOKEN.sub("", compact).strip():
        raise ValueError(f"sharding rule {line!r}: cannot read operand {operand.strip()!r}")
    tokens: list[tuple[Factor, ...]] = []
    for token in _TOKEN.findall(compact):
        if token == REST:
            tokens.append((REST,))
        elif token == "_":
            tokens.append(())
        else:
            tokens.append(tuple(re.findall(r"[a-z]", token)))
    if tokens.count((REST,)) > 1:
        raise ValueError(f"sharding rule {line!r}: '...' twice in {compact!r}")
    return tuple(tokens)


def instantiate(text: str, call: OperatorCall, reductions: tuple[Reduction, ...] = ()) -> ShardingRule | None:
    """The rule ``text`` for one call, or None if its shapes do not fit the notation."""
    notation = parse(text)
    names = tensor_arguments(call.node.op)
    written = {name: index for index, name in enumerate(names)}
    if any(slot not in written for slot in call.slots) or len(notation.outputs) != len(call.outputs):
        return None
    places = [written[slot] for slot in call.slots]
    if any(place >= len(notation.operands) for place in places):
        return None
    tokens = [notation.operands[place] for place in places] + list(notation.outputs)
    shapes = [value.shape for value in (*call.inputs, *call.outputs)]
    expanded = [_expand(item, len(shape)) for item, shape in zip(tokens, shapes)]
    dims = [item for item in expanded if item is not None]
    if len(dims) != len(shapes):
        return None
    sizes = _sizes(dims, shapes)
    if sizes is None:
        return None
    dims = [_without_singletons(item, shape) for item, shape in zip(dims, shapes)]
    used = {factor for item in dims for factors in item for factor in factors}
    count = len(call.inputs)
    return ShardingRule(
        inputs=tuple(dims[:count]),
        outputs=tuple(dims[count:]),
        sizes={factor: size for factor, size in sizes.items() if factor in used},
        whole=notation.whole,
        terms=_terms(notation, call, names, places),
        reductions=reductions,
        passes_partial=notation.passes_partial,
    )


def _expand(tokens: Tokens, rank: int) -> Dims | None:
    """Tokens with the ellipsis spelled out, its dims counted from the right; None if the rank does not fit."""
    rest = rank - sum(token != (REST,) for token in tokens)
    if rest < 0 or (rest > 0 and (REST,) not in tokens):
        return None
    dims: list[tuple[Factor, ...]] = []
    for token in tokens:
        if token == (REST,):
            dims.extend((f"b{place}",) for place in reversed(range(rest)))
        else:
            dims.append(token)
    return tuple(dims)


def _sizes(dims: Sequence[Dims], shapes: Sequence[tuple[int, ...]]) -> dict[Factor, int] | None:
    """Size of every factor, or None if two dims disagree (a size of 1 broadcasts)."""
    sizes: dict[Factor, int] = {}
    composites = []
    for item, shape in zip(dims, shapes):
        for factors, size in zip(item, shape):
            if len(factors) > 1:
                composites.append((factors, size))
            elif factors and size != 1 and sizes.setdefault(factors[0], size) != size:
                return None
    for factors, size in composites:
        unknown = [factor for factor in factors if factor not in sizes]
        rest, remainder = divmod(size, math.prod(sizes.get(factor, 1) for factor in factors))
        if remainder or len(unknown) > 1 or (not unknown and rest != 1):
            return None
        sizes.update((factor, rest) for factor in unknown)
    return sizes


def _without_singletons(dims: Dims, shape: tuple[int, ...]) -> Dims:
    return tuple(() if size == 1 else factors for factors, size in zip(dims, shape))


def _terms(
    notation: Notation, call: OperatorCall, names: Sequence[str], places: Sequence[int]
) -> tuple[tuple[int, ...], ...] | None:
    """The terms over the inputs that were passed; None if a number took the place of a whole term."""
    if notation.terms is None:
        return None
    terms = []
    for term in notation.terms:
        input_indices = tuple(index for index, place in enumerate(places) if place in term)
        if input_indices:
            terms.append(input_indices)
        elif any(_is_number(call.get(names[place])) for place in term if place < len(names)):
            return None
    return tuple(terms)


def _is_number(value: object) -> bool:
    return isinstance(value, (bool, int, float, complex))
