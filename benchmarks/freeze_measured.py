"""PipeTransformer's parts one after the other, measured on a link that is shaped, with a gloo rank at each end.

    python -m benchmarks.freeze_measured [--mbit 100] [--passes 3] [--markdown FILE]

As root, on Linux: two network namespaces that a limited link joins (``benchmarks.shaped_hosts``). All variants run in
the same processes by turns, a step each, so that what else the machine does meets all of them alike: ratios are what to
read. A phase has so many passes over the data, and a decision of the adaptive rule (α = 1/3, the most that it may
freeze) after each. Prices are of processes as ``planner profile`` measures them first and of the link as it is shaped.
Seconds are of steps, and once more with the median of a pass for each of its steps; what replanning takes is a column
of its own, as programs are made once however long the training is.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.shaped_hosts import run_on_hosts, shaped_hosts

#: How long bytes may wait for the link.
QUEUE_MS = 400.0


def measured(mbit: float, passes: int) -> dict[str, Any]:
    """What the first rank measured."""
    with tempfile.TemporaryDirectory() as folder, shaped_hosts(mbit, queue_ms=QUEUE_MS) as hosts:
        cluster, output = Path(folder) / "shaped.toml", Path(folder) / "rows.json"
        run_on_hosts(hosts, "planner", "profile", "-o", str(cluster), "--device", "cpu", "--quick")
        run_on_hosts(hosts, "benchmarks.freeze_measured_worker", str(cluster), str(mbit), str(passes), str(output))
        answer: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return answer


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each variant, beside the first."""
    lines = [
        "| parts | steps, s | times as fast | in medians | replanning, s | pp×dp, ms of a step at its end, by phase |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        phases = "; ".join(f"{layout} {seconds * 1e3:.0f}" for layout, seconds in zip(row["layouts"], row["last pass"]))
        ratios = [rows[0][kind] / row[kind] for kind in ("seconds", "medians")]
        lines.append(
            f"| {row['name']} | {row['seconds']:.1f} | {ratios[0]:.2f} | {ratios[1]:.2f} | {row['replanning']:.1f} | "
            f"{phases} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=100.0, help="of the link, in each direction")
    parser.add_argument("--passes", type=int, default=3, help="over the data in each phase, 2 or more")
    parser.add_argument("--markdown", type=Path, help="append the table there")
    options = parser.parse_args()
    measurement = measured(options.mbit, options.passes)
    text = "\n".join(
        [
            f"## {options.mbit:g} Mbit/s, {options.passes} passes a phase",
            "",
            *table(measurement["rows"]),
            "",
            f"Frozen of {measurement['layers']} layers, by phase: {measurement['frozen']}. Losses of the variants that "
            f"freeze are within {measurement['apart']:.1e} of each other (float32).",
            "",
        ]
    )
    print(text)
    if options.markdown is not None:
        with options.markdown.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
