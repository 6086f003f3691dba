"""Training tests of transformers, accelerate and Lightning, run with their own class and with ours in its place.

    python -m benchmarks.framework_suites CHECKOUT [TEST_FILE…] [--framework transformers]
        [--markdown benchmarks/results/framework_suites.md]

CHECKOUT is a folder with the framework's repository, which need not be of the version that is installed. Nothing is
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


@dataclass(frozen=True)
class Framework:
    """A framework: the class that ours stands in for, in words, its tests, and the folder in which pytest starts."""

    swapped: str
    files: tuple[str, ...]
    folder: str = "."


FRAMEWORKS = {
    "transformers": Framework("`Trainer`", ("tests/trainer/test_trainer.py",)),
    "accelerate": Framework(
        "`Accelerator`",
        tuple(f"tests/test_{name}.py" for name in ("accelerator", "state_checkpointing", "optimizer", "scheduler")),
    ),
    "lightning": Framework(
        "strategy for one device",
        (
            *("trainer/optimization/test_manual_optimization.py", "trainer/optimization/test_optimizers.py"),
            *("trainer/optimization/test_multiple_optimizers.py", "trainer/optimization/test_backward_calls.py"),
            *("loops/test_training_loop.py", "loops/test_training_loop_flow_scalar.py"),
            "checkpointing/test_trainer_checkpoint.py",
        ),
        "tests/tests_pytorch",
    ),
}
#: Seconds after which one test is stopped, if nothing else is said, and those after which one run of all is.
PATIENCE, PATIENCE_OF_ALL = 60, 3600
#: What a failure's message, or the test's name, has in it → why ours differs.
REASONS = (
    (r"bitsandbytes\.", "bitsandbytes' optimizers have no sharding rule for DTensors"),
    (r"aten\.allclose", "the test compares parameters by `torch.allclose`, which DTensors lack"),
    (r"forward draws from Python's random", "refused: the model's forward draws from Python's random"),
    (r"data_order", "the model replaces a buffer by a longer one in each forward"),
    (r"assert 'random' == 'Linear'", "the test goes on with the model that it has handed over, not with what it gets"),
    (r"DataLoaderDispatcher", "every process reads all samples: no loader sends batches from the first process"),
    (r"cannot be pickled", "refused: a parallel module is one rank's part, and is saved by `save_pretrained`"),
    (r"hf_device_map|8bit_cpu_offload", "no quantised model is looked at: that one's device map is of no account"),
    (r"holds the parameters of the model that was given", "refused: the optimizer was made before the plan"),
    (r"LBFGS makes one vector", "refused: LBFGS makes one vector of all parameters, which shards do not form"),
    (r"test_free_memory", "the test measures the free memory of the whole machine"),
    (r"keeps the dtypes and the device", "refused: a planned model is evaluated in the dtype that it is planned for"),
)  # fmt: skip


@dataclass(frozen=True)
class SuiteOutcome:
    """What became of one test: passed, failed or skipped, and the message of a failure."""

    outcome: str
    message: str


def run_suite(
    checkout: Path, files: Sequence[str], *, framework: str, swapped: bool, patience: int = PATIENCE
) -> dict[str, SuiteOutcome]:
    """Outcomes by test; ``swapped`` is whether our classes stand in for the framework's.

    Raises:
        ValueError: if no test ran.
    """
    with tempfile.TemporaryDirectory() as folder:
        outcomes = Path(folder) / "outcomes.jsonl"
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "SUITE_OUTCOMES": str(outcomes),
            "SUITE_FRAMEWORK": framework, "SUITE_SWAPPED": str(int(swapped)),
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.framework_suites_plugin", "--tb=short",
                   "-p", "no:cacheprovider", "--timeout", str(patience)]  # fmt: skip
        said = [_pytest_says([*command, file], checkout / FRAMEWORKS[framework].folder, environment) for file in files]
        if not outcomes.exists():
            raise ValueError(
                f"no test of {', '.join(files)} ran: give the folder of {framework}'s repository and install what its "
                f"tests import (pytest-timeout, datasets, parameterized, …). pytest said:\n{said[0]}"
            )
        lines = [json.loads(line) for line in outcomes.read_text(encoding="utf-8").splitlines()]
    return {line["test"]: SuiteOutcome(line["outcome"], line["message"]) for line in lines}


def _pytest_says(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> str:
    """The end of what a process of its own for one file writes; tests that are launched inherit no process group."""
    completed = subprocess.run(
        command, cwd=folder, env=environment, text=True, capture_output=True, timeout=PATIENCE_OF_ALL, check=False
    )
    return f"{completed.stdout[-2000:]}{completed.stderr[-2000:]}"


def reason(test: str, outcome: SuiteOutcome) -> str:
    """Why a test that passes with transformers' class fails with ours: a row of ``REASONS``, else the message."""
    for pattern, why in REASONS:
        if re.search(pattern, f"{test} {outcome.message}"):
            return why
    message = " ".join(outcome.message.split()).replace("|", "\\|")
    return re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "…/", message)[:160] or outcome.outcome


def page(framework: str, stock: Mapping[str, SuiteOutcome], ours: Mapping[str, SuiteOutcome]) -> str:
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
        f"`python -m benchmarks.framework_suites CHECKOUT --framework {framework} --markdown PATH`: {framework}'s own",
        f"tests on one process without network and GPU, with its {FRAMEWORKS[framework].swapped} and with ours in its",
        "place. What fails with its own (most want a download) says nothing about ours.",
        "",
        f"| file | skipped | run | pass with {framework}'s | of these pass with ours |",
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
    parser.add_argument("files", nargs="*", help="in the folder in which its tests are started")
    parser.add_argument("--framework", choices=sorted(FRAMEWORKS), default="transformers")
    parser.add_argument("--patience", type=int, default=PATIENCE, help="seconds after which a test is stopped")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    name = options.framework
    files = options.files or FRAMEWORKS[name].files
    stock, ours = (
        run_suite(options.checkout, files, framework=name, swapped=swapped, patience=options.patience)
        for swapped in (False, True)
    )
    text = page(name, stock, ours)
    print(text)
    if options.markdown:
        options.markdown.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
