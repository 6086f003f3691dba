"""Starts elastic trainings, processes of which kill themselves, and says how they went."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

from benchmarks.elastic import compared, run_elastically
from benchmarks.elastic_worker import Training, rows_in
from benchmarks.kill_points import PHASES, KillPoint


def with_a_process_lost_and_another_come(folder: Path) -> dict[str, Any]:
    """One of two dies, the half of whose state the other holds, too; a third takes its place."""
    training = Training({2: "dp=2", 1: "dp=1"}, {"zero": 3}, num_steps=6, dies=(2, 2), late=3)
    run_elastically(training, folder, random.Random(0), 0, num_processes=2, least=1, max_restarts=1)
    return compared(training, folder)


def with_one_that_does_not_pay(folder: Path) -> dict[str, Any]:
    """One of two dies; another comes, for whose part two steps are left."""
    axes = {2: "dp=2", 1: "dp=1"}
    training = Training(axes, {"zero": 3}, num_steps=5, dies=(2, 1), late=3, take_in="if it pays")
    run_elastically(training, folder, random.Random(0), 0, num_processes=2, least=1, max_restarts=1)
    return {**compared(training, folder), "rows": rows_in(folder), "log": (folder / "log").read_text()}


def killed_within_a_collective_and_a_copy(folder: Path) -> dict[str, Any]:
    """2 → 1 → 2 → 1 → 2: each time one in the place of the lost one."""
    phases = {phase.name: phase for phase in PHASES}
    points = [KillPoint(phases["collective"], 2, 0, 1), KillPoint(phases["copy to the second holder"], 3, 1, 1)]
    training = Training({2: "dp=2", 1: "dp=1"}, {"zero": 3}, num_steps=16, points=points)
    run_elastically(training, folder, random.Random(0), 0, num_processes=2, least=1, max_restarts=2)
    return compared(training, folder)


def with_both_holders_lost(folder: Path, *, checkpoint_every: int) -> dict[str, Any]:
    """Of three that hold a third each, two die in the step after the third: a shard and its copy are gone."""
    training = Training(
        {3: "dp=3", 1: "dp=1"}, {"zero": 3}, num_steps=5, die_together=((2, 3), 3), checkpoint_every=checkpoint_every
    )
    try:
        run_elastically(training, folder, random.Random(0), 0, num_processes=3, least=1, max_restarts=0)
    except RuntimeError as error:
        return {"error": str(error), "rows": rows_in(folder)}
    return {**compared(training, folder), "rows": rows_in(folder)}


if __name__ == "__main__":
    place = Path(os.environ["MESHWRIGHT_TEST_FOLDER"])
    for folder in (folders := [place / name for name in ("lost", "pays", "points", "checkpoint", "no checkpoint")]):
        folder.mkdir()
    answers = {
        "lost and come": with_a_process_lost_and_another_come(folders[0]),
        "does not pay": with_one_that_does_not_pay(folders[1]),
        "points": killed_within_a_collective_and_a_copy(folders[2]),
        "checkpoint": with_both_holders_lost(folders[3], checkpoint_every=2),
        "no checkpoint": with_both_holders_lost(folders[4], checkpoint_every=0),
    }
    (place / "answer.json").write_text(json.dumps(answers), encoding="utf-8")
