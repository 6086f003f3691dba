"""The results of ``benchmarks.kernels`` as tables and as JSON, and what they say of the goals."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.kernels_cases import BACKWARD, FORWARD, LLAMA_8B, Case
from benchmarks.kernels_contestants import COMPILED, EAGER, LIGER, OURS
from benchmarks.kernels_layer import NAME as LAYER
from benchmarks.kernels_measure import Row, ratio_to_best
from benchmarks.kernels_prediction import Prediction, as_toml, fitted_curves, median_error, predictions
from cost_models import Cluster
from cost_models.files import write_text

#: The goals: share of copy bandwidth, times as fast as the better of torch.compile and Liger (to two decimals, as it
#: is printed), and median relative error of predicted times.
BANDWIDTH_GOAL, RATIO_GOAL, PREDICTION_GOAL = 0.85, 1.0, 0.15
RIVALS = (COMPILED, LIGER)
_GOAL_ROWS = f"norms, activations, rotary, cross-entropy at {LLAMA_8B.name}"


@dataclass(frozen=True)
class Verdict:
    """Whether a goal holds; None if nothing was measured that says. What does not count is told, but is no goal."""

    goal: str
    holds: bool | None
    details: str
    counts: bool = True


@dataclass
class Results:
    """All that was measured so far.

    Attributes:
        machine: device, driver and versions.
        bandwidth: bytes per second of a copy, read and written.
        cluster: what times are predicted for; None where nothing is known of the device.
    """

    machine: dict[str, str]
    comparable: bool
    bandwidth: float
    cluster: Cluster | None
    cases: list[tuple[Case, list[Row]]] = field(default_factory=list)
    others: list[Row] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def rows(self) -> list[Row]:
        return [row for _, rows in self.cases for row in rows] + self.others

    @property
    def predictions(self) -> list[Prediction]:
        return predictions(self.cases, self.cluster) if self.cluster else []

    def share(self, row: Row) -> float | None:
        """Bytes that had to be moved per second, over copy bandwidth."""
        return row.num_bytes / row.seconds / self.bandwidth if row.seconds and row.num_bytes else None

    def verdicts(self) -> list[Verdict]:
        """Of each goal."""
        return [
            self._bandwidth_verdict(),
            self._ratio_verdict(of_goal=True),
            self._ratio_verdict(of_goal=False),
            self._prediction_verdict(),
            self._layer_verdict(),
        ]

    def _bandwidth_verdict(self) -> Verdict:
        shares = {
            _label(row): share
            for row in self.rows
            if row.contestant == OURS and _of_goal(row) and row.what in (FORWARD, BACKWARD)
            if (share := self.share(row)) is not None
        }
        goal = f"≥ {BANDWIDTH_GOAL:.0%} of copy bandwidth: {_GOAL_ROWS}"
        return _held(goal, shares, BANDWIDTH_GOAL, "{:.1%}", failed=self._failed(of_goal=True))

    def _ratio_verdict(self, *, of_goal: bool) -> Verdict:
        rows = self.rows
        ratios = {
            _label(row): round(ratio, 2)
            for row in rows
            if row.contestant == OURS and row.operator != LAYER and _of_goal(row) == of_goal
            if (ratio := ratio_to_best(rows, row, others=RIVALS)) is not None
        }
        scope = _GOAL_ROWS if of_goal else "other operators and sizes (no goal)"
        goal = f"≥ {RATIO_GOAL:.1f}× the better of torch.compile and Liger, each pass: {scope}"
        verdict = _held(goal, ratios, RATIO_GOAL, "{:.2f}×", failed=self._failed(of_goal=of_goal))
        return dataclasses.replace(verdict, counts=of_goal)

    def _failed(self, *, of_goal: bool) -> list[str]:
        ours = (row for row in self.rows if row.contestant == OURS and _of_goal(row) == of_goal)
        return [_label(row) for row in ours if row.seconds is None]

    def _prediction_verdict(self) -> Verdict:
        goal = f"predicted times within {PREDICTION_GOAL:.0%} of measured, median"
        median = median_error(self.predictions)
        if median is None:
            return Verdict(goal, None, "nothing measured, or the device is not known to the cost model")
        return Verdict(goal, median <= PREDICTION_GOAL, f"median {median:.1%} over {len(self.predictions)} passes")

    def _layer_verdict(self) -> Verdict:
        goal = "a whole Llama-3-8B layer, ratio and peak memory stated"
        rows = [row for row in self.others if row.operator == LAYER]
        ours = next((row for row in rows if row.contestant == OURS and row.seconds is not None), None)
        if ours is None:
            return Verdict(goal, False if rows else None, "; ".join(row.note for row in rows if row.note) or "not run")
        ratios = {name: ratio_to_best(rows, ours, others=[name]) for name in (EAGER, COMPILED)}
        told = ", ".join(f"{ratio:.2f}× {name}" for name, ratio in ratios.items() if ratio is not None)
        stated = len(told.split(",")) == len(ratios)
        peaks = ", ".join(f"{row.contestant} {_bytes(row.peak_bytes)}" for row in rows)
        return Verdict(goal, stated, f"{told}; peak memory above weights and input: {peaks}")

    # -- text -----------------------------------------------------------------------------------------------------

    def markdown(self) -> str:
        """The page that is written."""
        predicted = self.predictions
        parts = [
            "# Fused operators against eager PyTorch, torch.compile and Liger Kernel",
            "`python -m benchmarks.kernels`. " + "; ".join(f"{name} {value}" for name, value in self.machine.items()),
            "" if self.comparable else "**No GPU: shapes are tiny, figures are not comparable with anything.**",
            f"Copy bandwidth, bytes read and written: {self.bandwidth / 1e9:,.0f} GB/s.",
            _EXPLAINED,
            "## Goals\n\n" + self.verdict_table(),
            "## Operators\n\n" + self.table([row for row in self.rows if row.operator != LAYER]),
            "## A whole layer, forward and backward\n\n" + self.table([r for r in self.rows if r.operator == LAYER]),
            "## Predicted times\n\n" + _prediction_table(predicted),
            "Efficiency curves that would fit what was measured (`cost_models/presets/efficiency/`):\n\n```toml\n"
            + (as_toml(fitted_curves(predicted, self.cluster.device.memory_bandwidth)) if self.cluster else "")
            + "\n```",
        ]
        if self.skipped:
            parts.append("Not measured, out of time: " + ", ".join(self.skipped) + ".")
        return "\n\n".join(part for part in parts if part) + "\n"

    def verdict_table(self) -> str:
        """Markdown: every goal, whether it holds, and what it rests on."""
        said = {True: "holds", False: "does not hold", None: "not measured"}
        lines = ["| goal | verdict | |", "|---|---|---|"]
        for verdict in self.verdicts():
            text = said[verdict.holds] if self.comparable else "not comparable"
            lines.append(f"| {verdict.goal} | {text} | {verdict.details} |")
        return "\n".join(lines)

    def table(self, rows: Sequence[Row]) -> str:
        """Markdown: one line a contestant and pass."""
        lines = [
            "| operator | size | dtype | pass | contestant | ms | quartiles | of copy bandwidth | peak memory "
            "| max error | ours / better of torch.compile, Liger |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        lines += [f"| {' | '.join(self._cells(row))} |" for row in rows]
        return "\n".join(lines)

    def _cells(self, row: Row) -> list[str]:
        head = [row.operator, row.size, row.dtype, row.what, row.contestant]
        if row.seconds is None or row.low is None or row.high is None:
            return [*head, row.note, "", "", "", "", ""]
        share = self.share(row)
        ratio = ratio_to_best(self.rows, row, others=RIVALS) if row.contestant == OURS else None
        return [
            *head,
            f"{row.seconds * 1e3:.4f}" + ("" if row.comparable else " (1)"),
            f"{row.low * 1e3:.4f}–{row.high * 1e3:.4f}",
            "" if share is None else f"{share:.1%}",
            _bytes(row.peak_bytes),
            "" if row.error is None else f"{row.error:.1e}",
            "" if ratio is None else f"{ratio:.2f}×",
        ]

    def write(self, folder: Path) -> None:
        """Write ``kernels.md`` and ``kernels.json``; whoever reads meanwhile sees whole files."""
        folder.mkdir(parents=True, exist_ok=True)
        data: dict[str, Any] = {
            "machine": self.machine,
            "comparable": self.comparable,
            "copy_bandwidth": self.bandwidth,
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "predictions": [dataclasses.asdict(one) for one in self.predictions],
            "verdicts": [dataclasses.asdict(verdict) for verdict in self.verdicts()],
            "skipped": self.skipped,
        }
        texts = {"kernels.md": self.markdown(), "kernels.json": json.dumps(data, indent=1, ensure_ascii=False) + "\n"}
        for name, text in texts.items():
            write_text(folder / name, text)


_EXPLAINED = """Times are medians of runs with a cold L2 cache, by the device's events. Shares are bytes that an
operator must move (each tensor once, a formula for each operator) over copy bandwidth. Peak memory is above the inputs
and the gradients of the outputs. Errors are against float64: largest difference over largest value, of the worst of
outputs (forward), gradients (backward) or both. Above 1× ours is faster. (1): forward makes gradients too, so only both
passes together are compared."""


def _of_goal(row: Row) -> bool:
    return bool(row.kind) and row.size == LLAMA_8B.name


def _label(row: Row) -> str:
    return f"{row.operator} {row.size} {row.dtype} {row.what}"


def _held(goal: str, values: dict[str, float], least: float, shown: str, *, failed: Sequence[str]) -> Verdict:
    """Whether all values reach ``least`` and nothing failed, and those that do not."""
    if not values and not failed:
        return Verdict(goal, None, "nothing measured")
    low = sorted((value, label) for label, value in values.items() if value < least)
    details = f"{len(values) - len(low)} of {len(values)}"
    if low:
        details += "; below: " + ", ".join(f"{label} {shown.format(value)}" for value, label in low)
    if failed:
        details += "; failed: " + ", ".join(failed)
    return Verdict(goal, not low and not failed, details)


def _prediction_table(compared: Sequence[Prediction]) -> str:
    lines = ["| case | pass | kind | predicted, ms | measured, ms | error |", "|---|---|---|---|---|---|"]
    for one in compared:
        times = f"{one.predicted * 1e3:.4f} | {one.measured * 1e3:.4f}"
        lines.append(f"| {one.label} | {one.what} | {one.kind} | {times} | {one.error:+.0%} |")
    median = median_error(compared)
    return "\n".join(lines) + ("" if median is None else f"\n\nMedian of the errors' sizes: {median:.1%}.")


def _bytes(count: int | None) -> str:
    return "–" if count is None else f"{count / 2**20:,.1f} MiB"
