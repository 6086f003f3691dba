"""``planner.compile`` on two real processes: when it plans, what it refuses, what it saves."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.patience import PATIENCE
from tests.ranks import run_on_ranks, run_script
from tests.runtime_worker import SCENARIOS

NAMES = [scenario.__name__ for scenario in SCENARIOS]


@functools.cache
def results() -> dict[str, bool]:
    return run_on_ranks("runtime_worker", 2, NAMES)


@pytest.mark.parametrize("scenario", NAMES)
def test_scenario(scenario: str) -> None:
    assert results()[scenario]


def test_one_process_needs_no_launcher(tmp_path: Path) -> None:
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
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    run_script(tmp_path / "script.py", [{}], folder=tmp_path, timeout=PATIENCE)  # raises what it says if it fails
