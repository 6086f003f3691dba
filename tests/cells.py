"""Parameters of which the suite runs some: ``python -m benchmarks.every_cell`` runs the rest, too."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TypeVar

#: Set where every cell is to run.
EVERY_CELL = "MESHWRIGHT_EVERY_CELL"

Cell = TypeVar("Cell")


def cells(always: Sequence[Cell], slow: Sequence[Cell]) -> list[Cell]:
    """``always``, in which every value of every parameter occurs; and ``slow``, other combinations of them."""
    return [*always, *(slow if os.environ.get(EVERY_CELL) else ())]


def named_cells(every: Mapping[str, Cell], *slow: str) -> dict[str, Cell]:
    """``every`` cell by name, without those that are ``slow``."""
    unknown = set(slow) - set(every)
    assert not unknown, f"no such cells: {unknown}"
    names = cells([name for name in every if name not in slow], slow)
    return {name: every[name] for name in names}
