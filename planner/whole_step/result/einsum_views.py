"""Which operands of an einsum its product takes as they lie in memory, so that autograd keeps their memory.

``torch.einsum`` of two operands multiplies matrices ``[batch, rows, columns]``: it permutes each operand to the letters
that both have and the result has, its own, and those that are summed (of the second: the other way round), each group
in the order of the result or, of summed letters, of the alphabet, and merges each group. Dims that do not follow each
other in memory are copied first. Where nothing is summed entries are multiplied, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def operands_taken_as_they_are(equation: str, shapes: Sequence[Sequence[int]]) -> tuple[bool, ...]:
    """For each of two operands without gaps, of these local shapes, whether no copy is made of it.

    Of other numbers of operands, repeated letters and ellipses nothing is said: False for all.

        >>> operands_taken_as_they_are("ebch,ehf->ebcf", [(1, 8, 3, 16), (1, 16, 12)])
        (True, True)
        >>> operands_taken_as_they_are("bsec,ebch->bsh", [(4, 6, 4, 3), (4, 4, 3, 8)])
        (True, False)
    """
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    letters = inputs.split(",")
    is_simple = arrow and len(letters) == 2 == len(shapes) and "." not in equation
    if not is_simple or any(len(set(own)) != len(own) for own in letters):
        return (False,) * len(shapes)
    summed = sorted((set(letters[0]) | set(letters[1])) - set(result))
    sizes = dict(zip(inputs.replace(",", ""), (size for shape in shapes for size in shape)))
    if all(sizes[letter] == 1 for letter in summed):
        return True, True  # multiplied entry by entry
    order = [*result, *summed]
    both = set(letters[0]) & set(letters[1])
    return tuple(_is_view(own, shape, order, both, set(result)) for own, shape in zip(letters, shapes, strict=True))


def _is_view(own: str, shape: Sequence[int], order: Sequence[str], both: set[str], result: set[str]) -> bool:
    sizes = dict(zip(own, shape, strict=True))
    steps, step = {}, 1
    for letter in reversed(own):
        steps[letter], step = step, step * sizes[letter]
    groups: list[list[str]] = [[], [], []]  # both and the result, one alone and the result, summed
    for letter in order:
        if letter in sizes and sizes[letter] > 1:
            groups[2 if letter not in result else 0 if letter in both else 1].append(letter)
    return all(steps[first] == steps[second] * sizes[second] for group in groups for first, second in pairwise(group))
