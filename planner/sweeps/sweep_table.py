"""A sweep's table: columns as data, as CSV (every figure in full) and as Markdown (as people read it).

Nothing in it depends on the machine that planned, or on how often the sweep was stopped.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from passes.plan.text_tables import format_bytes, format_rate, format_seconds
from planner.sweeps.study import SEARCHED, Study
from planner.sweeps.sweep_row import SweepRow

Rows = Sequence[SweepRow]


@dataclass(frozen=True)
class Column:
    """``value`` of a row, None where it has none; ``text``: how people read it, ``""``: in the CSV alone."""

    name: str
    value: Callable[[SweepRow], Any]
    title: str = ""
    text: Callable[[Any], str] = str


def _percent(value: float) -> str:
    return f"{value:.2%}"


def _figure(name: str, title: str = "", text: Callable[[Any], str] = str) -> Column:
    return Column(name, lambda row: row.figure(name), title, text)


def columns(study: Study, rows: Rows) -> tuple[Column, ...]:
    """The columns of a study's table."""
    return (
        Column("model", lambda row: row.request.model, "model"),
        Column("cluster", lambda row: row.request.cluster, "cluster"),
        Column("devices", lambda row: row.num_devices, "devices", "{:,}".format),
        Column("global_batch", lambda row: row.request.global_batch, "batch", "{:,}".format),
        Column("seq_len", lambda row: row.request.seq_len, "length", "{:,}".format),
        Column("options", lambda row: row.request.options, "options"),
        Column("layout", lambda row: row.request.layout, "layout"),
        _figure("step_seconds", "step", format_seconds),
        _figure("step_seconds_low"),
        _figure("step_seconds_high"),
        _figure("closed_form_seconds"),
        _figure("tokens_per_second", "tokens/s", format_rate),
        _figure("samples_per_second", "samples/s", format_rate),
        _figure("utilisation", "utilisation", _percent),
        _figure("memory_bytes", "memory", format_bytes),
        _figure("memory_bytes_low"),
        _figure("memory_bytes_high"),
        _figure("memory_limit_bytes"),
        _figure("bound_seconds"),
        _figure("gap", "gap", _percent),
        _figure("status"),
        *_cost_columns(study, rows),
        *_baseline_columns(rows),
        *_layout_columns(rows),
        _figure("choice", "choice"),
        Column("plan", lambda row: row.plan or None, "plan"),
        Column("error", lambda row: row.error, "error"),
    )


def _cost_columns(study: Study, rows: Rows) -> Iterable[Column]:
    """Cost per million tokens, for models without tokens per thousand samples; nothing without prices."""
    if not study.prices:
        return
    efficient = pareto_front(study, rows)
    yield Column(
        "cost_per_million_tokens",
        lambda row: row.cost_per_million(study),
        "cost a million tokens" if all(row.figure("tokens_per_second") for row in rows if row.plan) else "cost",
        format_rate,
    )
    yield Column("pareto", lambda row: "yes" if id(row) in efficient else "", "on the Pareto front")


def _baseline_columns(rows: Rows) -> Iterable[Column]:
    for name in baseline_names_of(rows):
        yield Column(f"{name}_seconds", lambda row, name=name: row.baseline(name).get("seconds"))  # type: ignore[misc]
        yield Column(f"{name}_ratio", lambda row, name=name: row.ratio(name), f"over {name}", format_rate)  # type: ignore[misc]
        yield Column(f"{name}_is", lambda row, name=name: row.baseline(name).get("what"))  # type: ignore[misc]


def _layout_columns(rows: Rows) -> Iterable[Column]:
    if any(row.request.layout != SEARCHED for row in rows):
        searched = searched_seconds(rows)
        yield Column("over_searched", lambda row: over_searched(row, searched), "over searched", format_rate)


def baseline_names_of(rows: Rows) -> tuple[str, ...]:
    """The baselines that some row was to be compared with, in order."""
    return tuple(dict.fromkeys(name for row in rows for name in row.request.baselines))


def searched_seconds(rows: Rows) -> dict[tuple[Any, ...], float]:
    """All of a row but its layout → seconds of the plan whose choices were all searched."""
    return {
        _without_layout(row): row.figure("step_seconds")
        for row in rows
        if row.request.layout == SEARCHED and row.error is None
    }


def over_searched(row: SweepRow, searched: dict[tuple[Any, ...], float]) -> float | None:
    """Seconds of a layout over those of the searched plan beside it, None where one is missing."""
    seconds, best = row.figure("step_seconds"), searched.get(_without_layout(row))
    return None if seconds is None or best is None or row.request.layout == SEARCHED else seconds / best


def _without_layout(row: SweepRow) -> tuple[Any, ...]:
    request = row.request
    return (
        request.model, request.cluster, request.num_devices, request.global_batch, request.seq_len, request.options
    )  # fmt: skip


def pareto_front(study: Study, rows: Rows) -> set[int]:
    """By id, rows that no other row of the same model and length beats in both cost and speed."""
    costs = {id(row): row.cost_per_million(study) for row in rows}
    efficient: set[int] = set()
    groups: dict[tuple[Any, ...], list[SweepRow]] = {}
    for row in rows:
        if costs[id(row)] is not None:
            groups.setdefault((row.request.model, row.request.seq_len), []).append(row)
    for group in groups.values():
        cheapest = float("inf")
        for row in sorted(group, key=lambda row: (-(row.rate[0] or 0.0), costs[id(row)])):
            if costs[id(row)] < cheapest:  # type: ignore[operator]
                cheapest = costs[id(row)]  # type: ignore[assignment]
                efficient.add(id(row))
    return efficient


@dataclass(frozen=True)
class FewestDevices:
    """The smallest of a series that reaches ``target`` tokens a second; ``row`` None: the largest does not."""

    series: tuple[str, ...]
    target: float
    row: SweepRow | None
    fastest: float


def fewest_devices(study: Study, rows: Rows) -> tuple[FewestDevices, ...]:
    """For each series of rows over numbers of devices and each target of the study."""
    groups: dict[tuple[str, ...], list[SweepRow]] = {}
    for row in rows:
        if row.figure("tokens_per_second") is not None:
            groups.setdefault(row.series, []).append(row)
    answers = []
    for series, group in groups.items():
        for target in study.target_tokens_per_second:
            enough = [row for row in group if row.figure("tokens_per_second") >= target]
            least = min(enough, key=lambda row: (row.num_devices, -row.figure("tokens_per_second")), default=None)
            fastest = max(row.figure("tokens_per_second") for row in group)
            answers.append(FewestDevices(series, target, least, fastest))
    return tuple(answers)


def csv_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Comma-separated values; None is empty, floats are written in full."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([["" if cell is None else cell for cell in row] for row in rows])
    return stream.getvalue()


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def as_csv(study: Study, rows: Rows) -> str:
    """The whole table."""
    table = columns(study, rows)
    return csv_table([column.name for column in table], ([column.value(row) for column in table] for row in rows))


def as_texts(study: Study, rows: Rows) -> tuple[list[str], list[list[str]]]:
    """Titles and cells of the columns that people read, without those that are empty in all rows."""
    shown = [
        column
        for column in columns(study, rows)
        if column.title and any(column.value(row) not in (None, "") for row in rows)
    ]
    cells = [["" if (value := column.value(row)) is None else column.text(value) for column in shown] for row in rows]
    return [column.title for column in shown], cells


def fewest_texts(answers: Iterable[FewestDevices]) -> list[list[str]]:
    """Cells of the table of fewest devices."""
    return [
        [
            " ".join(filter(None, answer.series)),
            format_rate(answer.target),
            "—" if answer.row is None else f"{answer.row.num_devices:,}",
            format_rate(answer.fastest if answer.row is None else answer.row.figure("tokens_per_second")),
            "none is fast enough" if answer.row is None else answer.row.figure("choice"),
        ]
        for answer in answers
    ]


FEWEST_HEADER = ("series", "tokens/s at least", "devices", "tokens/s", "choice")
