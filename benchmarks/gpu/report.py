"""The results of ``benchmarks.gpu`` as one page of Markdown and one file of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import Part, Setting
from benchmarks.gpu.running import Outcome
from cost_models.files import write_text


@dataclass(frozen=True)
class _Section:
    part: Part
    outcomes: list[Outcome]
    seconds: float

    @property
    def is_left_out(self) -> bool:
        """Whether the machine has not what the part needs."""
        return all(outcome.status.startswith("left out: needs") for outcome in self.outcomes)

    @property
    def holds(self) -> bool:
        return self.is_left_out or all(outcome.holds for outcome in self.outcomes)


@dataclass
class Report:
    """All that has been measured so far."""

    setting: Setting
    sections: dict[str, _Section] = field(default_factory=dict)

    def add(self, part: Part, outcomes: list[Outcome], seconds: float) -> None:
        self.sections[part.name] = _Section(part, outcomes, seconds)

    @property
    def holds(self) -> bool:
        """Whether everything ran and every check passed."""
        return all(section.holds for section in self.sections.values())

    def section(self, name: str) -> str:
        """One part as Markdown: its tables, what failed, and the ends of the logs."""
        section = self.sections[name]
        lines = [f"## {section.part.title}", "", f"{section.seconds:.0f} s of {section.part.seconds:.0f} s.", ""]
        rows = [row for outcome in section.outcomes for row in outcome.rows]
        if rows:
            lines += [_table(rows), ""]
        for outcome in section.outcomes:
            if outcome.status != "done":
                lines += [f"* **{outcome.item}** {outcome.status}", ""]
                if outcome.log:
                    lines += ["```", outcome.log, "```", ""]
        return "\n".join(lines)

    def markdown(self) -> str:
        note = "" if not self.setting.tiny else "A rehearsal on a processor: no figure here means anything.\n\n"
        summary = [
            {
                "part": section.part.title,
                "items": f"{sum(outcome.holds for outcome in section.outcomes)} of {len(section.outcomes)} hold",
                "seconds": round(section.seconds),
                "": "left out" if section.is_left_out else "" if section.holds else "**fails**",
            }
            for section in self.sections.values()
        ]
        parts = "\n".join(self.section(name) for name in self.sections)
        return f"# On GPUs\n\n`python -m benchmarks.gpu` wrote this page.\n\n{note}{_table(summary)}\n\n{parts}"

    def write(self, folder: Path) -> None:
        """Write ``gpu.md`` and ``gpu.json``; whoever reads meanwhile sees whole files."""
        folder.mkdir(parents=True, exist_ok=True)
        data = {
            "setting": asdict(self.setting),
            "holds": self.holds,
            "parts": [
                {
                    "name": section.part.name,
                    "seconds": section.seconds,
                    "limit": section.part.seconds,
                    "items": [{**asdict(outcome), "holds": outcome.holds} for outcome in section.outcomes],
                }
                for section in self.sections.values()
            ],
        }
        write_text(folder / "gpu.md", self.markdown())
        write_text(folder / "gpu.json", json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def _table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows under all the columns that any has."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [
        _line(columns),
        _line(["---"] * len(columns)),
        *(_line(_cell(row.get(c)) for c in columns) for row in rows),
    ]
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    return str(value).replace("|", "\\|").replace("\n", " ")
