"""The rows of a run: what is known of every model type, each figure with the commit that it was measured at."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

#: In the order in which a type passes them; those after ``capture`` do not depend on one another.
STAGES = ("build", "eager", "capture", "plan", "verify", "pipeline")


@dataclass(frozen=True)
class Outcome:
    """How a stage ended.

    Attributes:
        commit: of the code that was run; "x or before" for one that was not written down at the time.
        reason: why it failed; empty if it passed.
        seconds: of processor time; None if not recorded.
        facts: what else is known, by name.
    """

    commit: str
    reason: str = ""
    seconds: float | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return not self.reason


@dataclass(frozen=True)
class Row:
    """A model type, the class that trains it, and the newest outcome of each stage that was tried."""

    model_type: str
    class_name: str
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)

    def passed(self, stage: str) -> bool:
        return stage in self.outcomes and self.outcomes[stage].passed

    def failed(self, stage: str) -> bool:
        return stage in self.outcomes and not self.outcomes[stage].passed

    @property
    def captured(self) -> bool:
        """A plan that was made or verified proves a capture."""
        return any(self.passed(stage) for stage in STAGES[2:])

    def updated(self, newer: Mapping[str, Outcome]) -> Row:
        """The row with newer outcomes.

        A new failure up to the capture drops what was measured behind it; what newly passes behind a capture that
        failed once drops that failure.
        """
        older = dict(self.outcomes)
        if any(stage in newer and not newer[stage].passed for stage in STAGES[:3]):
            older = {}
        elif self.failed("capture") and any(newer[stage].passed for stage in STAGES[2:] if stage in newer):
            del older["capture"]
        return Row(self.model_type, self.class_name, {**older, **newer})


def read_rows(path: Path) -> dict[str, Row]:
    """Model type → row."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [_row(json.loads(line)) for line in lines if line.strip()]
    return {row.model_type: row for row in rows}


def write_rows(path: Path, rows: Mapping[str, Row]) -> None:
    """One line a type, sorted; whole or not at all, so that a run that is stopped leaves the last complete file."""
    text = "".join(_line(row) + "\n" for _, row in sorted(rows.items()))
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    os.replace(partial, path)


def outcomes_as_data(outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    """Plain data, without empty entries."""
    return {
        stage: {name: value for name, value in asdict(outcomes[stage]).items() if value not in ("", None, {})}
        for stage in STAGES
        if stage in outcomes
    }


def outcomes_from_data(data: Mapping[str, Any]) -> dict[str, Outcome]:
    return {stage: Outcome(**entries) for stage, entries in data.items()}


def _row(data: dict[str, Any]) -> Row:
    return Row(data["type"], data["class"], outcomes_from_data(data["outcomes"]))


def _line(row: Row) -> str:
    data = {"type": row.model_type, "class": row.class_name, "outcomes": outcomes_as_data(row.outcomes)}
    return json.dumps(data, ensure_ascii=False)
