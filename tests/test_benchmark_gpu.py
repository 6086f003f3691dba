"""The command for a GPU machine, rehearsed on a processor; and that no part stops another, whatever happens in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks.gpu import running
from benchmarks.gpu.parts import Item, Part, Setting, plan
from benchmarks.gpu.report import Report
from benchmarks.gpu.running import Outcome, in_turn, run_part
from tests.patience import PATIENCE

ROOT = Path(__file__).parent.parent
HERE = "tests.test_benchmark_gpu"
TINY = Setting(0, tiny=True)
#: Items of this file need nothing of what real ones do.
without_imports = mock.patch.object(running, "PRELOADED", [])


def good(setting: Setting, value: int = 1) -> Iterator[dict[str, Any]]:
    yield {"value": value, "ok": True}


def raising(setting: Setting) -> Iterator[dict[str, Any]]:
    yield {"value": 2}
    raise ArithmeticError("of this item")


def crashing(setting: Setting) -> Iterator[dict[str, Any]]:
    yield {"value": 3}
    print("last words", flush=True)
    os.abort()


def hanging(setting: Setting) -> Iterator[dict[str, Any]]:
    yield {"value": 4}
    time.sleep(PATIENCE)


def wrong(setting: Setting) -> Iterator[dict[str, Any]]:
    yield {"value": 5, "ok": False}


def item(name: str, seconds: float = PATIENCE) -> Item:
    return Item(name, f"{HERE}:{name.split()[0]}", seconds)


@without_imports
def test_what_fails_crashes_or_hangs_leaves_the_others_alone(tmp_path: Path) -> None:
    names = ("good", "raising", "crashing", "wrong")
    part = Part("all", "All", PATIENCE, (*map(item, names), item("hanging", 1.0), item("good again"), item("missing")))
    outcomes = {outcome.item: outcome for outcome in run_part(part, TINY, tmp_path)}
    assert {name: outcome.status for name, outcome in outcomes.items()} == {
        "good": "done",
        "raising": "failed: ArithmeticError: of this item",
        "crashing": "crashed: signal SIGABRT",
        "wrong": "done",
        "hanging": "hung: more than 1 s",
        "good again": "done",
        "missing": f"failed: AttributeError: module '{HERE}' has no attribute 'missing'",
    }
    assert [outcome.rows[0]["value"] for outcome in outcomes.values() if outcome.rows] == [1, 2, 3, 5, 4, 1]
    assert "last words" in outcomes["crashing"].log
    assert [name for name, outcome in outcomes.items() if outcome.holds] == ["good", "good again"]


@without_imports
def test_a_part_whose_time_is_spent_is_cut_off(tmp_path: Path) -> None:
    # The server of processes has done its imports by then, however long they take.
    assert run_part(Part("first", "First", PATIENCE, (item("good"),)), TINY, tmp_path / "first")[0].holds
    part = Part("late", "Late", 8.0, (item("hanging"), item("good")))
    statuses = [outcome.status for outcome in run_part(part, TINY, tmp_path)]
    assert statuses == ["cut off: the part's time was spent", "left out: the part's time was spent"]


def test_a_fault_of_the_command_itself_ends_one_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_part(part: Part, setting: Setting, folder: Path) -> list[Outcome]:
        if part.name == "first":
            raise ValueError("a line that is no record")
        return [Outcome(one.name, "done") for one in part.items]

    monkeypatch.setattr(running, "run_part", run_part)
    parts = [Part(name, name, 9.0, (item("good"),), needs=0) for name in ("first", "second")]
    statuses = [outcomes[0].status for _, outcomes, _ in in_turn(parts, TINY, tmp_path)]
    assert statuses == ["not run: ValueError: a line that is no record", "done"]


def test_parts_need_gpus_and_are_written_down(tmp_path: Path) -> None:
    report = Report(TINY)
    parts = [Part("many", "Many", 9.0, (item("good"),), needs=2), Part("one", "One", 99.0, (item("wrong"),), needs=0)]
    for part, outcomes, seconds in in_turn(parts[:1], TINY, tmp_path):
        report.add(part, outcomes, seconds)
    assert report.holds and "left out: needs 2 GPUs, there are 0" in report.markdown()


def test_the_plan_takes_less_than_36_minutes_on_one_gpu() -> None:
    for num_gpus, minutes in ((1, 36), (2, 39), (8, 39)):
        parts = plan(Setting(num_gpus))
        assert sum(part.seconds for part in parts if part.needs <= num_gpus) < minutes * 60
        assert {part.name.split()[0] for part in parts} == {
            "machine", "numerics", "training", "products", "bandwidth", "step", "memory", "parity", "generation",
            "resume", "host",
        }  # fmt: skip
        assert len({item.name for part in parts for item in part.items if part.name == "numerics"}) == 15
        for part in parts:
            for entry in part.items:
                assert entry.seconds <= part.seconds


def test_the_command_is_rehearsed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--output", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    data = json.loads((tmp_path / "gpu.json").read_text())
    statuses = {f"{part['name']}: {entry['item']}": entry for part in data["parts"] for entry in part["items"]}
    assert run.returncode == 0, run.stdout + run.stderr
    assert all(entry["holds"] and entry["rows"] for entry in statuses.values())
    (steps,) = (part for part in data["parts"] if part["name"] == "step Llama")
    losses = {entry["item"]: entry["rows"][0]["first loss"] for entry in steps["items"]}
    assert set(losses) == {"Meshwright", "Hugging Face eager", "FSDP2 eager"}
    assert max(losses.values()) - min(losses.values()) <= 1e-4
    assert "A rehearsal on a processor" in (tmp_path / "gpu.md").read_text()
