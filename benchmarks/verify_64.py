"""Plans of 64 ranks with all four axes, every rank in this process, against one device in float64.

    python -m benchmarks.verify_64 [--markdown benchmarks/results/verify_64.md]

A Llama of two layers is trained for one AdamW step under each plan.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import planner
from planner.library import load_config

MESHES = ("pp=2,dp=4,cp=2,tp=4", "pp=4,dp=4,cp=2,tp=2")
FIX: dict[str, Any] = {"num_microbatches": 2, "schedule": "gpipe"}
VARIANTS: tuple[dict[str, Any], ...] = ({"zero": 0, "recompute": "none"}, {"zero": 3, "recompute": "selective"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path, help="write the table here")
    arguments = parser.parse_args()
    lines = ["| mesh | plan | largest relative error | ranks that should agree differ by |"]
    lines.append("|---|---|---|---|")
    for mesh in MESHES:
        for variant in VARIANTS:
            lines.append(row(mesh, variant))
            print(lines[-1], flush=True)
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")


def row(mesh: str, variant: dict[str, Any]) -> str:
    """One plan verified, as a line of a table."""
    config = load_config("tiny-llama")
    config.num_hidden_layers = 2
    report = planner.verify(config, mesh, fix={**FIX, **variant}, batch_size=8, seq_len=8, steps=1)
    if not report.ok:
        raise SystemExit(report.table())
    what = f"ZeRO {variant['zero']}, recompute {variant['recompute']}, {FIX['num_microbatches']} micro-batches"
    return f"| {mesh} | {what} | {report.largest_error:.1e} | {report.disagreement:.1e} |"


if __name__ == "__main__":
    main()
