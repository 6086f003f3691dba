"""The rows of a run, and the table that they make."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

Row = dict[str, Any]

#: Stages that are the benchmark's or transformers' own.
BEFORE_CAPTURE = ("build", "eager")


def read_rows(path: Path) -> dict[str, Row]:
    """Model type → its last row."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["type"]: row for row in map(json.loads, lines)}


def table(rows: dict[str, Row]) -> str:
    """Counts, and one line for each type, as Markdown."""
    reached = [row for row in rows.values() if row.get("failed") not in BEFORE_CAPTURE]
    passed = Counter(stage for row in reached for stage in _passed(row))
    lines = [
        f"{len(rows)} types were run; {len(reached)} of them were built tiny and trained a step in eager.",
        "",
        "| of these | types |",
        "|---|---|",
        *(f"| {stage} | {passed[stage]} |" for stage in ("capture", "verify", "pipeline")),
        f"| operators without a rule take at most 1% of the compute | {sum(map(_is_ruled, reached))} |",
        "",
        "| type | class | passed | without a rule | reason of what failed |",
        "|---|---|---|---|---|",
    ]
    return "\n".join(lines + [_line(row) for _, row in sorted(rows.items())])


def _passed(row: Row) -> list[str]:
    order = ["capture", "verify", "pipeline"]
    last = "capture" if row.get("passed") == "plan" else row.get("passed")
    return order[: order.index(last) + 1] if last in order else []


def _is_ruled(row: Row) -> bool:
    return "share_without_rule" in row and row["share_without_rule"] <= 0.01


def _line(row: Row) -> str:
    share = row.get("share_without_rule")
    operators = ", ".join(name.removeprefix("aten.") for name in row.get("without_rule", ()))
    unruled = "" if share is None else f"{share:.1%} {operators}".strip()
    reason = row.get("reason", "").replace("|", "\\|")[:200]
    return f"| {row['type']} | {row['class']} | {row.get('passed') or '-'} | {unruled} | {reason} |"
