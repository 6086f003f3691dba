"""``planner.compile`` on two real processes: when it plans, what it refuses, what it saves."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest

from tests.patience import PATIENCE
from tests.ranks import ROOT, run_on_ranks
from tests.runtime_worker import SCENARIOS

NAMES = [scenario.__name__ for scenario in SCENARIOS]


@functools.cache
def results() -> dict[str, bool]:
    return run_on_ranks("runtime_worker", 2, NAMES)


@pytest.mark.parametrize("scenario", NAMES)
def test_scenario(scenario: str) -> None:
    assert results()[scenario]


def test_one_process_needs_no_launcher() -> None:
    """Without torchrun there is a world of one, and a mesh that needs more is refused in one line."""
    script = (
        "import planner, torch\n"
        "from tests.small_models import Mlp, mlp_batch, seeded, squared_error\n"
        "parallel = planner.compile(seeded(Mlp), 'dp=1,tp=1', loss_fn=squared_error)\n"
        "parallel(*mlp_batch()).loss.backward()\n"
        "assert 'spmd.' not in parallel.source.split('class Program')[1]\n"
        "try:\n    planner.compile(seeded(Mlp), 'tp=2')\n"
        "except ValueError as error:\n    assert 'world size is 1' in str(error), error\n"
        "else:\n    raise SystemExit('not refused')\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr[-2000:]
