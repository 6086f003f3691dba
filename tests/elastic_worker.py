"""Starts elastic trainings, processes of which kill themselves, and says how they went."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

from benchmarks.elastic import compared, run_elastically
from benchmarks.elastic_worker import Training, rows_in


def with_a_process_lost_and_another_come(folder: Path) -> dict[str, Any]:
    """One of two dies, the half of whose state the other holds, too; a third takes its place."""
    training = Training({2: "dp=2", 1: "dp=1"}, {"zero": 3}, num_steps=6, dies=(2, 2), late=3)
    run_elastically(training, folder, random.Random(0), 0, num_processes=2, least=1, max_restarts=1)
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
    answers = {}
    place = Path(os.environ["MESHWRIGHT_TEST_FOLDER"])
    for name, every in (("lost and come", None), ("checkpoint", 2), ("no checkpoint", 0)):
        (place / name).mkdir()
        if every is None:
            answers[name] = with_a_process_lost_and_another_come(place / name)
        else:
            answers[name] = with_both_holders_lost(place / name, checkpoint_every=every)
    (place / "answer.json").write_text(json.dumps(answers), encoding="utf-8")
