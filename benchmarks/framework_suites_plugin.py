"""Pytest plugin of ``benchmarks.framework_suites``: swaps our classes in and writes outcomes, a line of JSON a test.

Variables of the environment: ``SUITE_OUTCOMES`` is the file to write, ``SUITE_SWAPPED`` is ``1`` for our classes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

#: Names that tests of an older transformers import for cases that are skipped here, and newer ones no longer have.
REMOVED_NAMES = ("GlueDataset", "GlueDataTrainingArguments")


def pytest_collection() -> None:
    """Before test modules are imported, so that what they import is ours."""
    import transformers
    import transformers.testing_utils

    library: Any = sys.modules["transformers"]
    for name in REMOVED_NAMES:
        library.__dict__.setdefault(name, type(name, (), {}))
    if os.environ["SUITE_SWAPPED"] != "1":
        return
    import transformers.trainer
    import transformers.trainer_seq2seq

    from planner.integrations import transformers as hf

    transformers.trainer.Trainer = library.__dict__["Trainer"] = hf.Trainer  # type: ignore[misc]
    transformers.trainer_seq2seq.Seq2SeqTrainer = hf.Seq2SeqTrainer  # type: ignore[misc]
    library.__dict__["Seq2SeqTrainer"] = hf.Seq2SeqTrainer


def pytest_runtest_logreport(report: Any) -> None:
    """One line for each test that was called or skipped, and for one whose setup failed."""
    if report.when != "call" and report.outcome == "passed":
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    line = {"test": report.nodeid, "outcome": report.outcome, "message": "" if crash is None else crash.message}
    with Path(os.environ["SUITE_OUTCOMES"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
