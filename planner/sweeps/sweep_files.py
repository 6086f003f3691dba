"""The files that a sweep ends with: tables as CSV and Markdown, seconds of planning, and a page of charts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from planner.sweeps.results_folder import ResultsFolder
from planner.sweeps.study import Study
from planner.sweeps.sweep_page import sweep_page
from planner.sweeps.sweep_row import SweepRow
from planner.sweeps.sweep_table import (
    FEWEST_HEADER,
    as_csv,
    as_texts,
    csv_table,
    fewest_devices,
    fewest_texts,
    markdown_table,
)


def write_results(study: Study, rows: Sequence[SweepRow], folder: ResultsFolder) -> tuple[Path, ...]:
    """Write all files. ``planning_time.csv`` and the page say what planning took, which differs from run to run."""
    return (
        folder.write("table.csv", as_csv(study, rows)),
        folder.write("table.md", _markdown(study, rows)),
        folder.write("planning_time.csv", _planning_time(rows)),
        folder.write("sweep.html", sweep_page(study, rows)),
    )


def _markdown(study: Study, rows: Sequence[SweepRow]) -> str:
    parts = [f"# {study.title}\n", markdown_table(*as_texts(study, rows))]
    answers = fewest_devices(study, rows)
    if answers:
        parts += ["## The fewest devices\n", markdown_table(FEWEST_HEADER, fewest_texts(answers))]
    return "\n".join(parts)


def _planning_time(rows: Sequence[SweepRow]) -> str:
    header = ("model", "cluster", "devices", "global_batch", "seq_len", "options", "layout", "plan",
              "processor_seconds", "seconds")  # fmt: skip
    return csv_table(
        header,
        (
            (
                row.request.model, row.request.cluster, row.num_devices, row.request.global_batch, row.request.seq_len,
                row.request.options, row.request.layout, row.plan, row.planning_seconds, row.result["seconds"],
            )
            for row in rows
        ),
    )  # fmt: skip
