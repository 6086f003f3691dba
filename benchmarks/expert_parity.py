"""Mixtures of experts under every layout of experts, on real processes, against one device in float64.

    python -m benchmarks.expert_parity [--only mixtral] [--record experts.jsonl]
        [--markdown benchmarks/results/expert_parity.md]

Each model of ``tests.expert_families`` is trained for three AdamW steps on gloo processes under each layout, and alone
by plain PyTorch, the experts of transformers in their own loops. The largest relative error of the loss, every gradient
and every weight is listed, or why a layout is refused. An interrupted run goes on from the file of ``--record``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from benchmarks.parity import Case, run_command
from tests.expert_families import FAMILIES

#: Layouts: axes, and what else is fixed.
LAYOUTS: tuple[tuple[dict[str, int], dict[str, Any]], ...] = (
    ({"ep": 2}, {}),
    ({"ep": 4}, {}),
    ({"ep": 4}, {"num_microbatches": 2}),
    ({"ep": 2, "tp": 2}, {}),
    ({"ep": 2, "tp": 2}, {"num_microbatches": 4, "zero": 1}),
    ({"ep": 2, "pp": 2}, {"num_microbatches": 1}),
    ({"ep": 2, "pp": 2}, {"num_microbatches": 2, "schedule": "1f1b"}),
    ({"ep": 2, "pp": 2}, {"num_microbatches": 4, "schedule": "zb_h1", "zero": 1}),
    ({"dp": 2, "ep": 2}, {"zero": 1}),
    ({"dp": 2, "ep": 2}, {"zero": 2, "num_microbatches": 2}),
    ({"dp": 2, "ep": 2}, {"zero": 3, "num_microbatches": 2, "recompute": "full"}),
    ({"dp": 2, "tp": 2}, {"num_microbatches": 2}),
)


def all_cases() -> Iterator[Case]:
    """Every model under every layout."""
    for model in FAMILIES:
        for axes, more in LAYOUTS:
            fix = {"pp": 1, "dp": 1, "ep": 1, "cp": 1, "tp": 1, "recompute": "none", "zero": 0, **axes, **more}
            words = [f"{name}={size}" for name, size in (*axes.items(), *more.items())]
            yield {"name": f"{model} {' '.join(words)}", "model": model, "fix": fix, "ranks": math.prod(axes.values())}


if __name__ == "__main__":
    run_command(__doc__, "Mixtures of experts on real processes against one device", list(all_cases()))
