"""How well predictions of published runs do, by half, family, device and year; and what they must not fall behind.

``results/published_predictions.json`` keeps every run's ratios predicted / published (``python -m benchmarks.published
--write`` writes it); ``published_scoreboard.toml`` the errors that no change may make worse: the total by more than
5%, a family's by more than 10%; and the number of runs, of which none may be lost.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy

from benchmarks.published_table import Comparison, PublishedRun, published_runs
from cost_models.step_interval import NOMINAL_SHARE, ResidualQuantiles
from cost_models.told_apart import OrderedPairs

PREDICTIONS_FILE = Path(__file__).parent / "results" / "published_predictions.json"
RESIDUALS = Path(__file__).parents[1] / "cost_models" / "presets" / "residuals"
RESIDUALS_FILE, PAIRS_FILE = RESIDUALS / "published_runs.toml", RESIDUALS / "ordered_pairs.toml"
SCOREBOARD_FILE = Path(__file__).with_name("published_scoreboard.toml")
#: By how much the mean error may grow: of all runs, of one family.
TOTAL_SLACK, FAMILY_SLACK = 1.05, 1.10
#: Chip of the table → parts of the names of devices that have it.
CHIPS = {"A100": ("A100",), "H100": ("H100", "H200", "H800")}
#: Published speeds that differ by less are not told apart.
APART = 1.10
#: Shares by which pairs are predicted apart, from which on each row of ``ordered_pairs`` counts.
DISTANCES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3)
#: The year from which on software counts as recent.
RECENT = 2023

#: Run → ratios predicted / published: ``"speed"``, ``"memory"`` (None where nothing was published), and predicted
#: ``"tokens_per_second"`` of a device.
Predictions = Mapping[str, Mapping[str, float | None]]


@dataclass(frozen=True)
class Score:
    """Of one group of runs, from the logarithms of predicted / published speed.

    Attributes:
        rows: how many runs state a speed.
        median_ratio: predicted / published, at the median: above 1 is too fast.
        median_error: the median of |log ratio|.
        mean_error: the mean of it.
        within: share of runs within 15%.
    """

    rows: int
    median_ratio: float
    median_error: float
    mean_error: float
    within: float


def score(ratios: Iterable[float]) -> Score:
    """The score of ``ratios``; of none all figures are NaN."""
    logs = [math.log(ratio) for ratio in ratios]
    if not logs:
        return Score(0, math.nan, math.nan, math.nan, math.nan)
    errors = [abs(log) for log in logs]
    return Score(
        rows=len(logs),
        median_ratio=math.exp(statistics.median(logs)),
        median_error=statistics.median(errors),
        mean_error=statistics.fmean(errors),
        within=sum(error <= math.log(1.15) for error in errors) / len(errors),
    )


def groups(runs: Iterable[PublishedRun]) -> Iterator[tuple[str, tuple[PublishedRun, ...]]]:
    """The groups that are reported: for each half all runs, each family and device, recent and older software."""
    table = tuple(runs)
    for half in ("calibration", "test"):
        rows = tuple(run for run in table if run.split == half)
        yield f"{half}: all", rows
        yield f"{half}: software of {RECENT} on", tuple(run for run in rows if run.software >= RECENT)
        yield f"{half}: older software", tuple(run for run in rows if run.software < RECENT)
        for family in sorted({run.family for run in table}):
            for device in sorted({run.device for run in table}):
                name = f"{half}: {family}, {device}"
                yield name, tuple(run for run in rows if (run.family, run.device) == (family, device))


def speed_ratios(runs: Iterable[PublishedRun], predictions: Predictions) -> list[float]:
    """Predicted / published speed of those of ``runs`` that state one and were predicted."""
    ratios = (predictions[run.name]["speed"] for run in runs if run.name in predictions)
    return [ratio for ratio in ratios if ratio is not None]


def read_predictions(path: Path = PREDICTIONS_FILE) -> Predictions:
    """What ``--write`` stored; nothing if it never did."""
    if not path.exists():
        return {}
    stored: Predictions = json.loads(path.read_text(encoding="utf-8"))
    return stored


def write_predictions(results: Iterable[Comparison], path: Path = PREDICTIONS_FILE) -> Predictions:
    """Store ``results`` in place of what was stored of the same runs, and drop runs that the table does not have."""
    merged = {**read_predictions(path), **{result.run.name: as_prediction(result) for result in results}}
    ordered = {run.name: merged[run.name] for run in published_runs() if run.name in merged}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in ordered.items())
    path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    return ordered


def as_prediction(result: Comparison) -> Mapping[str, float | None]:
    """The figures of one run that are stored, to four digits."""
    figures = {
        "speed": result.speed_ratio,
        "memory": result.memory_ratio,
        "tokens_per_second": result.predicted_speed,
    }
    return {name: None if value is None else float(f"{value:.4g}") for name, value in figures.items()}


def score_table(runs: Iterable[PublishedRun], before: Predictions, after: Predictions) -> str:
    """A Markdown table of every group's score before and after."""
    lines = [
        "| runs | rows | median predicted / published | median error | within 15% |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, rows in groups(runs):
        old, new = score(speed_ratios(rows, before)), score(speed_ratios(rows, after))
        if new.rows:
            lines.append(
                f"| {name} | {new.rows} | {_change(old.median_ratio, new.median_ratio, '.2f')}"
                f" | {_change(old.median_error, new.median_error, '.1%')} | {_change(old.within, new.within, '.0%')} |"
            )
    return "\n".join(lines)


def _change(before: float, after: float, style: str) -> str:
    texts = [format(value, style) for value in (before, after)]
    return texts[1] if math.isnan(before) or texts[0] == texts[1] else f"{texts[0]} → {texts[1]}"


def residual_quantiles(predictions: Predictions) -> dict[str, ResidualQuantiles]:
    """Chip → quantiles of measured over predicted seconds, of its calibration runs (0.9 of them lie between).

    Of recent software alone, where there is any: plans will run on such.
    """
    quantiles = {}
    for chip, devices in CHIPS.items():
        rows = [run for run in published_runs() if run.split == "calibration" and run.device == chip]
        ratios = speed_ratios([run for run in rows if run.software >= RECENT] or rows, predictions)
        if ratios:
            tail = (1.0 - NOMINAL_SHARE) / 2
            low, high = numpy.quantile(ratios, (tail, 1.0 - tail), method="weibull")
            quantiles[chip] = ResidualQuantiles(devices, round(float(low), 3), round(float(high), 3), len(ratios))
    return quantiles


def write_residuals(predictions: Predictions, path: Path = RESIDUALS_FILE) -> None:
    """Write the quantiles as the file that the package ships."""
    lines = [
        "# Measured over predicted seconds of steps: between which quantiles nine of ten published runs lie, by chip.",
        f"# Source: the calibration half of benchmarks/published_runs, software of {RECENT} on; by python -m"
        " benchmarks.published --write.",
    ]
    for chip, row in residual_quantiles(predictions).items():
        figures = f"low = {row.low}\nhigh = {row.high}\nruns = {row.runs}"
        lines.append(f"\n[{chip}]\ndevices = {json.dumps(list(row.devices))}\n{figures}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_ordered_pairs(predictions: Predictions, path: Path = PAIRS_FILE) -> None:
    """Write the pairs of the calibration half as the file that the package ships."""
    runs = [run for run in published_runs() if run.split == "calibration"]
    lines = [
        "# Pairs of published runs of one model on one chip: of how many the faster is the one predicted to be, by how",
        "# far apart they are predicted (a share of the faster's seconds; each row up to the next).",
        f"# Source: the calibration half of benchmarks/published_runs, software of {RECENT} on; by python -m"
        " benchmarks.published --write.",
    ]
    for row in ordered_by_distance(runs, predictions):
        lines.append(f"\n[[distance]]\napart = {row.apart}\nright = {row.right}\npairs = {row.pairs}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def coverage(runs: Iterable[PublishedRun], predictions: Predictions) -> tuple[int, int]:
    """How many of ``runs`` took seconds inside their interval, and how many state a speed."""
    residuals = residual_quantiles(predictions)
    inside = total = 0
    for run in runs:
        for ratio in speed_ratios([run], predictions):
            total += 1
            inside += residuals[run.device].low <= ratio <= residuals[run.device].high
    return inside, total


def recent_medians(predictions: Predictions) -> dict[str, float]:
    """Family and chip → the median ratio of its test runs with recent software; those that have none are left out."""
    recent = [run for run in published_runs() if run.split == "test" and run.software >= RECENT]
    ratios: dict[str, list[float]] = {}
    for run in recent:
        for name in (run.family, run.device):
            ratios.setdefault(name, []).extend(speed_ratios([run], predictions))
    return {name: statistics.median(each) for name, each in sorted(ratios.items()) if each}


def faster_pairs(runs: Iterable[PublishedRun], predictions: Predictions) -> tuple[int, int]:
    """Of pairs of one model on one chip whose published speeds differ by more than ``APART``: rightly ordered, all."""
    far = [pair for pair in _pairs(runs, predictions) if abs(math.log(pair[1])) > math.log(APART)]
    return sum((predicted > 1.0) == (published > 1.0) for predicted, published in far), len(far)


def ordered_by_distance(runs: Iterable[PublishedRun], predictions: Predictions) -> list[OrderedPairs]:
    """Pairs of one model on one chip with recent software, by how far apart they are predicted."""
    pairs = list(_pairs((run for run in runs if run.software >= RECENT), predictions))
    rows = []
    for least, most in zip(DISTANCES, (*DISTANCES[1:], math.inf)):
        within = [(one, other) for one, other in pairs if least <= max(one, 1.0 / one) - 1.0 < most]
        rows.append(OrderedPairs(least, sum((one > 1.0) == (other > 1.0) for one, other in within), len(within)))
    return rows


def _pairs(runs: Iterable[PublishedRun], predictions: Predictions) -> Iterator[tuple[float, float]]:
    """Of each pair of one model on one chip, the ratios of their speeds: predicted, published."""
    stated = [run for run in runs if speed_ratios([run], predictions)]
    for one, other in itertools.combinations(stated, 2):
        if (one.architecture, one.device) == (other.architecture, other.device):
            predicted, published = (
                _speed_of(one, predictions, each) / _speed_of(other, predictions, each)
                for each in ("predicted", "published")
            )
            yield predicted, published


def _speed_of(run: PublishedRun, predictions: Predictions, what: str) -> float:
    """Tokens/s of a device of a run that was predicted."""
    row = predictions[run.name]
    speed, ratio = row["tokens_per_second"], row["speed"]
    assert speed is not None and ratio is not None
    return speed if what == "predicted" else speed / ratio


def scoreboard_errors(predictions: Predictions) -> dict[str, float]:
    """``"total"``, and every family: the mean of |log ratio| of its runs."""
    runs = published_runs()
    families = sorted({run.family for run in runs})
    rows = {"total": runs} | {family: tuple(run for run in runs if run.family == family) for family in families}
    return {name: score(speed_ratios(members, predictions)).mean_error for name, members in rows.items()}


def read_scoreboard() -> tuple[int, Mapping[str, float]]:
    """Number of runs, and the error of all and of each family that changes are held to."""
    stored = tomllib.loads(SCOREBOARD_FILE.read_text(encoding="utf-8"))
    return stored["runs"], stored["mean_error"]


def falls_behind(predictions: Predictions) -> list[str]:
    """Sentences that say where ``predictions`` are worse than the scoreboard allows; none if they are not."""
    num_runs, errors = read_scoreboard()
    missing = [run.name for run in published_runs() if run.name not in predictions]
    sentences = [f"no prediction is stored of {name!r}" for name in missing]
    if len(published_runs()) < num_runs:
        sentences.append(f"the table has {len(published_runs())} runs, it had {num_runs}")
    for name, error in scoreboard_errors(predictions).items():
        most = errors[name] * (TOTAL_SLACK if name == "total" else FAMILY_SLACK)
        if error > most:
            sentences.append(f"the mean error of {name} runs is {error:.4f}, at most {most:.4f} is allowed")
    return sentences
