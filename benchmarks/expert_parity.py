"""Mixtures of experts under every layout of experts, on real processes, against one device in float64.

    python -m benchmarks.expert_parity [--only mixtral] [--record experts.jsonl]
        [--markdown benchmarks/results/expert_parity.md]

Each model of ``tests.expert_families`` is trained for three AdamW steps on gloo processes under each layout, and alone
by plain PyTorch, the experts of transformers in their own loops. The largest relative error of the loss, every gradient
and every weight is listed, or why a layout is refused. An interrupted run goes on from the file of ``--record``.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.parity import TOLERANCES, Case, recorded, run, table
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
            ranks = 1
            for size in axes.values():
                ranks *= size
            fix = {"pp": 1, "dp": 1, "ep": 1, "cp": 1, "tp": 1, "recompute": "none", "zero": 0, **axes, **more}
            words = [*(f"{name}={size}" for name, size in (*axes.items(), *more.items()))]
            yield {"name": f"{model} {' '.join(words)}", "model": model, "fix": fix, "ranks": ranks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name matches this regular expression")
    parser.add_argument("--record", type=Path, help="add every answer to this file; what is in it is not run again")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    arguments = parser.parse_args()
    cases = [case for case in all_cases() if re.search(arguments.only, case["name"])]
    with tempfile.TemporaryDirectory() as folder:
        record = arguments.record or Path(folder) / "experts.jsonl"
        earlier = recorded(record)
        run([case for case in cases if case["name"] not in earlier], record)
        answers = recorded(record)
    results = {case["name"]: answers[case["name"]] for case in cases}
    errors = [entry.get("error", float("inf")) for entry in results.values() if "refused" not in entry]
    refused = sum("refused" in entry for entry in results.values())
    wrong = sum(not error <= TOLERANCES["float64"] for error in errors)
    summary = (
        f"{len(results)} cases: {len(errors) - wrong} within {TOLERANCES['float64']:.0e} (largest "
        f"{max(errors, default=0.0):.1e}), {wrong} not, {refused} refused."
    )
    print(table(results) + summary)
    if arguments.markdown:
        text = "# Mixtures of experts on real processes against one device\n\n"
        text += f"`python -m benchmarks.expert_parity --markdown PATH`. {summary}\n\n{table(results)}"
        arguments.markdown.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
