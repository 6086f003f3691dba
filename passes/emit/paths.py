"""Paths of modules, placements and numbers as source and as comments."""

from __future__ import annotations

import keyword
from collections.abc import Sequence
from itertools import pairwise

from passes.emit.quoting import comment, literal
from passes.ir.types import MeshShape, Placement, part_of_dim, uneven_dims
from passes.shard import Local


def attribute(base: str, path: str) -> str:
    """``w`` and ``layers.0.proj`` → ``w.layers[0].proj``."""
    source = base
    if not path:
        return source
    for part in path.split("."):
        if part.isdecimal() and part.isascii():
            source += f"[{part}]"
        elif part.isascii() and part.isidentifier() and not keyword.iskeyword(part):
            source += f".{part}"
        else:
            source += f"[{literal(part)}]"
    return source


def describe_local(local: Local, mesh: MeshShape) -> str:
    """``[4, 16, 64] → [2, 16, 64] {dp: S(0)}``: global shape, local shape where it differs, type on each axis.

    The local shape is the first rank's; where an axis cuts a dim unevenly the last ranks have less.
    """
    shapes = str(list(local.value.shape))
    if local.shape != local.value.shape:
        shapes += f" → {list(local.shape)}"
    for dim, axis in uneven_dims(local.value.shape, local.placement, mesh).items():
        count = mesh.sizes[axis]
        last = part_of_dim(local.value.shape[dim], count, count - 1)[1]
        shapes += f" (on the last rank of {mesh.names[axis]} {last} in dim {dim})"
    return f"{shapes} {describe_placement(local.placement, mesh)}".rstrip()


def describe_placement(placement: Placement, mesh: MeshShape) -> str:
    """``{dp: S(0), tp: R}``, without axes of size 1."""
    types = (f"{name}: {spmd_type}" for name, size, spmd_type in zip(mesh.names, mesh.sizes, placement) if size > 1)
    text = ", ".join(types)
    return f"{{{text}}}" if text else ""


def list_slice(paths: Sequence[str]) -> str:
    """The entries of a list of modules as source: ``w.model.layers[1:12]``."""
    parents = {path.rpartition(".")[0] for path in paths}
    indices = [int(path.rpartition(".")[2]) for path in paths]
    steps = {later - earlier for earlier, later in pairwise(indices)} or {1}
    if len(parents) != 1 or len(steps) != 1 or min(steps) < 1:
        return f"[{', '.join(attribute('w', path) for path in paths)}]"
    (parent,), (step,) = parents, steps
    start = str(indices[0]) if indices[0] else ""
    stride = f":{step}" if step > 1 else ""
    base = attribute("w", parent) if parent else "w"
    return f"{base}[{start}:{indices[-1] + 1}{stride}]"


def roots_title(roots: tuple[tuple[str, ...], ...]) -> str:
    """``model.layers.{0..31}``."""
    titles = []
    for first, last in zip(roots[0], roots[-1]):
        parent, _, index = first.rpartition(".")
        prefix = f"{parent}." if parent else ""
        final = last.rpartition(".")[2]
        titles.append(first if index == final else f"{prefix}{{{index}..{final}}}")
    return ", ".join(titles)


def roots_comment(roots: tuple[tuple[str, ...], ...]) -> str:
    """What a block's class says of its copies; nothing for a stretch of the model itself."""
    return "" if roots[0] == ("",) else f"  # {comment(roots_title(roots))}"


def arithmetic(numbers: Sequence[int]) -> str:
    """Numbers as source: ``range(1, 37, 3)`` if they are equally spaced, else one by one."""
    steps = {later - earlier for earlier, later in pairwise(numbers)} or {1}
    step = steps.pop()
    if steps or step < 1:
        return f"({', '.join(map(str, numbers))})"
    return f"range({numbers[0]}, {numbers[-1] + 1}{f', {step}' if step > 1 else ''})"
