"""Starts an elastic training of two processes, one of which kills itself, and says how it went."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

from benchmarks.elastic import compared, run_elastically
from benchmarks.elastic_worker import Training

if __name__ == "__main__":
    folder = Path(os.environ["MESHWRIGHT_TEST_FOLDER"])
    training = Training({2: "dp=2", 1: "dp=1"}, {"zero": 3}, num_steps=6, dies=(2, 2), late=3)
    run_elastically(training, folder, random.Random(0), 0, num_processes=2, least=1, max_restarts=1)
    (folder / "answer.json").write_text(json.dumps(compared(training, folder)), encoding="utf-8")
