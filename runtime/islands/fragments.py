"""Fragments of a model that islands exchange at different steps, so that the slow link is busy evenly."""

from __future__ import annotations

from collections.abc import Mapping


def fragments_of(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Parameters in their order, as ``count`` runs of about as many elements each.

    Args:
        sizes: elements of each parameter.

    Raises:
        ValueError: if there are fewer parameters than fragments.
    """
    if not 1 <= count <= len(sizes):
        raise ValueError(f"fragments={count}: it must be from 1 to {len(sizes)}, the number of trained parameters")
    names, total, so_far = list(sizes), sum(sizes.values()), 0
    runs: list[list[str]] = [[]]
    for index, name in enumerate(names):
        is_full = so_far * count >= len(runs) * total
        must_begin = len(names) - index == count - len(runs)
        if runs[-1] and len(runs) < count and (is_full or must_begin):
            runs.append([])
        runs[-1].append(name)
        so_far += sizes[name]
    return runs


def due_fragments(step: int, *, inner_steps: int, count: int) -> list[int]:
    """The fragments that are exchanged after inner step number ``step`` (from 1): number k at H − ⌊k·H/count⌋, and
    every H = ``inner_steps`` from there, but the first at H."""
    return [index for index in range(count) if (step + index * inner_steps // count) % inner_steps == 0]
