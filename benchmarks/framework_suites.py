"""transformers' own training tests, run with its ``Trainer`` and with ours in its place.

    python -m benchmarks.framework_suites CHECKOUT [TEST_FILE…] [--markdown benchmarks/results/framework_suites.md]

CHECKOUT is a folder with transformers' repository, which need not be of the version that is installed. Nothing is
downloaded and no GPU is used: tests that want either are skipped, or fail with both classes, and do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEST_FILES = ("tests/trainer/test_trainer.py",)
#: Seconds after which one test, and one run of all, are stopped.
PATIENCE, PATIENCE_OF_ALL = 60, 3600
#: What a failure's message, or the test's name, has in it → why ours differs.
REASONS = (
    (r"bitsandbytes\.", "bitsandbytes' optimizers have no sharding rule for DTensors"),
    (r"aten\.allclose", "the test compares parameters by `torch.allclose`, which DTensors lack"),
    (r"forward draws from Python's random", "refused: the model's forward draws from Python's random"),
    (r"data_order", "the model replaces a buffer by a longer one in each forward"),
    (r"keeps the dtypes and the device", "refused: a planned model is evaluated in the dtype that it is planned for"),
    (r"test_save|resume_from_checkpoint_false", "the test wants `optimizer.pt`; ours are files that any mesh reads"),
)  # fmt: skip


@dataclass(frozen=True)
class SuiteOutcome:
    """What became of one test: passed, failed or skipped, and the message of a failure."""

    outcome: str
    message: str


def run_suite(checkout: Path, files: Sequence[str], *, swapped: bool) -> dict[str, SuiteOutcome]:
    """Outcomes by test; ``swapped`` is whether our classes stand in for transformers'.

    Raises:
        ValueError: if no test ran.
    """
    with tempfile.TemporaryDirectory() as folder:
        outcomes = Path(folder) / "outcomes.jsonl"
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "SUITE_OUTCOMES": str(outcomes), "SUITE_SWAPPED": str(int(swapped)),
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.framework_suites_plugin", "--tb=short",
                   "-p", "no:cacheprovider", "--timeout", str(PATIENCE), *files]  # fmt: skip
        completed = subprocess.run(
            command, cwd=checkout, env=environment, text=True, capture_output=True, timeout=PATIENCE_OF_ALL, check=False
        )
        if not outcomes.exists():
            raise ValueError(
                f"no test of {', '.join(files)} ran: give the folder of transformers' repository and install what its "
                f"tests import (pytest-timeout, datasets, parameterized, …). pytest said:\n{completed.stdout[-2000:]}"
                f"{completed.stderr[-2000:]}"
            )
        lines = [json.loads(line) for line in outcomes.read_text(encoding="utf-8").splitlines()]
    return {line["test"]: SuiteOutcome(line["outcome"], line["message"]) for line in lines}


def reason(test: str, outcome: SuiteOutcome) -> str:
    """Why a test that passes with transformers' class fails with ours: a row of ``REASONS``, else the message."""
    for pattern, why in REASONS:
        if re.search(pattern, f"{test} {outcome.message}"):
            return why
    message = " ".join(outcome.message.split()).replace("|", "\\|")
    return re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "…/", message)[:160] or outcome.outcome


def page(stock: Mapping[str, SuiteOutcome], ours: Mapping[str, SuiteOutcome]) -> str:
    """A table of counts by file, and one of failures by reason."""
    passing = [test for test, outcome in stock.items() if outcome.outcome == "passed"]
    counts = {}
    for test in stock:
        counts.setdefault(test.partition("::")[0], [0, 0, 0, 0])
    for test, outcome in stock.items():
        row = counts[test.partition("::")[0]]
        row[0] += outcome.outcome == "skipped"
        row[1] += outcome.outcome != "skipped"
        row[2] += outcome.outcome == "passed"
        row[3] += outcome.outcome == "passed" and _outcome(ours, test).outcome == "passed"
    failures: dict[str, list[str]] = {}
    for test in passing:
        if _outcome(ours, test).outcome != "passed":
            failures.setdefault(reason(test, _outcome(ours, test)), []).append(test.rpartition("::")[2])
    lines = [
        "# Test suites of training frameworks",
        "",
        "`python -m benchmarks.framework_suites CHECKOUT --markdown PATH`: transformers' own tests on one process",
        "without network and GPU, with its `Trainer` and with ours in its place. What fails with its own",
        "(most want a download) says nothing about ours.",
        "",
        "| file | skipped | run | pass with transformers' | of these pass with ours |",
        "|---|---|---|---|---|",
        *(f"| {file} | {' | '.join(map(str, row))} |" for file, row in counts.items()),
        "",
        "| tests | why they fail with ours | which |",
        "|---|---|---|",
        *(
            f"| {len(tests)} | {why} | {', '.join(tests)} |"
            for why, tests in sorted(failures.items(), key=lambda item: -len(item[1]))
        ),
        "",
    ]
    return "\n".join(lines)


def _outcome(outcomes: Mapping[str, SuiteOutcome], test: str) -> SuiteOutcome:
    return outcomes.get(test, SuiteOutcome("not run", "the run ended before this test"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("files", nargs="*", default=TEST_FILES)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    stock, ours = (run_suite(options.checkout, options.files, swapped=swapped) for swapped in (False, True))
    text = page(stock, ours)
    print(text)
    if options.markdown:
        options.markdown.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
