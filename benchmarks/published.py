"""Published training runs, predicted against published, and the medians by family before and after.

    python -m benchmarks.published                          # all runs of published_runs/, some minutes
    python -m benchmarks.published titan MPT-7B             # those whose name contains one of these
    python -m benchmarks.published MPT --write              # store their predictions, and results/published.md
    python -m benchmarks.published --no-runs                # only the medians, of what is stored
    python -m benchmarks.published --before old.json        # medians against another revision's stored predictions

"Before" is what is stored in results/published_predictions.json unless ``--before`` says otherwise.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from benchmarks.published_scores import (
    APART,
    RECENT,
    Predictions,
    as_prediction,
    coverage,
    falls_behind,
    faster_pairs,
    ordered_by_distance,
    read_predictions,
    recent_medians,
    score_table,
    scoreboard_errors,
    write_ordered_pairs,
    write_predictions,
    write_residuals,
)
from benchmarks.published_table import Comparison, PublishedRun, compare, published_runs, table_row
from cost_models.told_apart import least_ordered

RESULTS_FILE = Path(__file__).parent / "results" / "published.md"


def main() -> None:
    arguments = parse_arguments()
    before = read_predictions() if arguments.before is None else read_predictions(arguments.before)
    results = [] if arguments.no_runs else list(printed(arguments.names))
    after = {**read_predictions(), **{result.run.name: as_prediction(result) for result in results}}
    if arguments.write:
        after = dict(write_predictions(results))
        write_residuals(after)
        write_ordered_pairs(after)
        RESULTS_FILE.write_text(results_page(after), encoding="utf-8")
    print(score_table(published_runs(), before, after))
    print(covered_text(after))
    print(recent_text(after))
    print(near_pairs_text(after))
    for name, error in scoreboard_errors(after).items():
        print(f"mean error of {name} runs: {error:.4f}")
    for sentence in falls_behind(after):
        print(f"worse than the scoreboard allows: {sentence}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="runs whose name contains one of these (default: all)")
    parser.add_argument("--no-runs", action="store_true", help="predict nothing, report what is stored")
    parser.add_argument("--before", type=Path, help="a file of stored predictions to compare with")
    parser.add_argument("--write", action="store_true", help="store predictions and results/published.md")
    return parser.parse_args()


def printed(names: list[str]) -> Iterator[Comparison]:
    """Predict the runs that ``names`` choose, and print each as it is done."""
    print(f"{'run':34} {'half':11} {'tokens/s a device':>26} {'GiB':>22}  source")
    for run in published_runs():
        if not names or any(name in run.name for name in names):
            result = compare(run)
            print(table_row(result), flush=True)
            yield result


def results_page(predictions: Predictions) -> str:
    """``results/published.md``: the scores, and every run with its ratios."""
    runs = published_runs()
    lines = [
        "# Published runs: predicted over published",
        "",
        f"{len(runs)} runs of `benchmarks/published_runs/`, written by `python -m benchmarks.published --write`. A"
        " speed above 1 is too fast. Halves are",
        "decided by a hash of a run's name; calibration runs may set constants, test runs judge them.",
        "",
        score_table(runs, {}, predictions),
        "",
        covered_text(predictions),
        recent_text(predictions),
        near_pairs_text(predictions),
        "",
        "| run | half | family | software | speed | memory | open | likely reason |",
        "|---|---|---|---:|---:|---:|---|---|",
        *(_page_row(run, predictions) for run in runs if run.name in predictions),
    ]
    return "\n".join(lines) + "\n"


def covered_text(predictions: Predictions) -> str:
    """How many runs lie in their nominal 90% intervals: of the test half, and of its recent ones."""
    tests = [run for run in published_runs() if run.split == "test"]
    recent = [run for run in tests if run.software >= RECENT]
    (inside, total), (inside_recent, total_recent) = (coverage(runs, predictions) for runs in (tests, recent))
    return (
        f"Intervals of nominal 90% cover {inside} of {total} test runs ({inside / max(1, total):.0%}), of those with"
        f" software of {RECENT} on {inside_recent} of {total_recent} ({inside_recent / max(1, total_recent):.0%})."
    )


def recent_text(predictions: Predictions) -> str:
    """Medians of families and chips beside each other, and how many pairs of runs are ordered rightly."""
    medians = ", ".join(f"{name} {median:.3f}" for name, median in recent_medians(predictions).items())
    tests = [run for run in published_runs() if run.split == "test"]
    (right, total), (right_test, total_test) = (faster_pairs(runs, predictions) for runs in (published_runs(), tests))
    return (
        f"Medians of test runs with software of {RECENT} on: {medians}. Of pairs of runs of one model on one chip that"
        f" differ by more than {APART - 1:.0%} the faster is predicted in {right} of {total}, of pairs of test runs in"
        f" {right_test} of {total_test}."
    )


def near_pairs_text(predictions: Predictions) -> str:
    """Pairs that are predicted near each other, by distance: of how many the faster is predicted, in both halves."""
    halves = {half: [run for run in published_runs() if run.split == half] for half in ("calibration", "test")}
    calibration, test = (ordered_by_distance(runs, predictions) for runs in halves.values())
    counts = "; ".join(
        f"from {row.apart:.0%} on {row.right} of {row.pairs} ({other.right} of {other.pairs})"
        for row, other in zip(calibration, test)
        if row.pairs
    )
    return (
        f"Pairs of calibration runs (of test runs) of one model on one chip, software of {RECENT} on, by how far apart"
        f" they are predicted, and of how many the faster is the one that is predicted to be: {counts}. Plans nearer"
        f" than {least_ordered(calibration):.0%} are not told apart."
    )


def _page_row(run: PublishedRun, predictions: Predictions) -> str:
    ratios = [predictions[run.name][name] for name in ("speed", "memory")]
    speed, memory = ("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
    family = f"{run.family}, {run.device}"
    return f"| {run.name} | {run.split} | {family} | {run.software} | {speed} | {memory} | {run.open} | {run.why} |"


if __name__ == "__main__":
    main()
