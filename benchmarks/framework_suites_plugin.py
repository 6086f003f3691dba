"""Pytest plugin of ``benchmarks.framework_suites``: swaps our classes in and writes outcomes, a line of JSON a test.

Variables of the environment: ``SUITE_OUTCOMES`` is the file to write, ``SUITE_FRAMEWORK`` whose tests these are,
``SUITE_SWAPPED`` is ``1`` for our classes.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

#: Names that tests of an older transformers import for cases that are skipped here, and newer ones no longer have.
REMOVED_NAMES = ("GlueDataset", "GlueDataTrainingArguments")
#: What tests of a newer Lightning ask of its own modules, and the installed torch's answer.
NEWER_NAMES = {"_TORCH_GREATER_EQUAL_2_11": True}


def pytest_collection() -> None:
    """Before test modules are imported, so that what they import is ours."""
    framework, swapped = os.environ["SUITE_FRAMEWORK"], os.environ["SUITE_SWAPPED"] == "1"
    if framework == "transformers":
        _provide_removed_names()
    if framework == "lightning":
        for name in ("lightning.pytorch.utilities.imports", "lightning.fabric.utilities.imports"):
            vars(importlib.import_module(name)).update(NEWER_NAMES)
    if swapped:
        {"transformers": _swap_trainer, "accelerate": _swap_accelerator, "lightning": _swap_strategy}[framework]()


def _provide_removed_names() -> None:
    library: Any = importlib.import_module("transformers")
    importlib.import_module("transformers.testing_utils")
    for name in REMOVED_NAMES:
        library.__dict__.setdefault(name, type(name, (), {}))


def _swap_trainer() -> None:
    import transformers.trainer
    import transformers.trainer_seq2seq

    from planner.integrations import transformers as hf

    library: Any = sys.modules["transformers"]
    transformers.trainer.Trainer = library.__dict__["Trainer"] = hf.Trainer  # type: ignore[misc]
    transformers.trainer_seq2seq.Seq2SeqTrainer = hf.Seq2SeqTrainer  # type: ignore[misc]
    library.__dict__["Seq2SeqTrainer"] = hf.Seq2SeqTrainer


def _swap_accelerator() -> None:
    import accelerate.accelerator

    from planner.integrations.accelerate import Accelerator

    library: Any = accelerate
    library.Accelerator = library.accelerator.Accelerator = Accelerator


def _swap_strategy() -> None:
    """Trainers on one device of the CPU, which is what tests ask for that name no strategy, get ours."""
    import lightning.pytorch

    from planner.integrations.lightning import Strategy

    trainer: Any = lightning.pytorch.Trainer
    initialise = trainer.__init__

    @functools.wraps(initialise)
    def with_strategy(self: Any, *args: Any, **options: Any) -> None:
        if options.get("strategy", "auto") == "auto" and options.get("devices", "auto") in ("auto", 1):
            options |= {"strategy": Strategy(mesh="dp=1"), "accelerator": "cpu", "devices": 1}
        initialise(self, *args, **options)

    trainer.__init__ = with_strategy


def pytest_runtest_logreport(report: Any) -> None:
    """One line for each test that was called or skipped, and for one whose setup failed."""
    if report.when != "call" and report.outcome == "passed":
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    line = {"test": report.nodeid, "outcome": report.outcome, "message": "" if crash is None else crash.message}
    with Path(os.environ["SUITE_OUTCOMES"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
