"""One rank of the tests of losses that reach the model: what differs from torch, by loss and layout."""

from __future__ import annotations

from typing import Any

from tests.ranks import answer, result_of, task
from tests.test_losses_that_reach_the_model import errors

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tp": ("tp=2", {}),
    "dp": ("dp=2", {}),
    "pp": ("pp=2", {}),
    "zero 3": ("dp=2", {"fix": {"zero": 3}}),
}

#: Layouts of the first two ways to reach the model; of the others these.
OF_OTHERS = ("tp", "pp")

if __name__ == "__main__":
    kinds = task()
    answer(
        {
            f"{kind}, {layout}": result_of(lambda: errors(kind, mesh, lazy=layout == "pp", **options))  # noqa: B023
            for number, kind in enumerate(kinds)
            for layout, (mesh, options) in LAYOUTS.items()
            if number < 2 or layout in OF_OTHERS
        }
    )
