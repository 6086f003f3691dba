"""Every example, run once on four processes, reaches the loss that it states."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
SECONDS = 280


def run_example(name: str, *, num_processes: int = 4) -> str:
    """Its output; no process of it is left behind."""
    command = [sys.executable, "-m", "planner", "run", "--nproc", str(num_processes), f"examples/{name}.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
        raise AssertionError(f"{name} took more than {SECONDS} s:\n{output[-2000:]}") from None
    assert process.returncode == 0, output[-4000:]
    return output


@pytest.mark.examples
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_reaches_its_goal(name: str) -> None:
    output = run_example(name)
    found = re.search(r"^loss (\S+) \(goal (\S+)\)$", output, re.MULTILINE)
    assert found, output[-2000:]
    assert float(found[1]) <= float(found[2])


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_is_short(name: str) -> None:
    assert len((ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 120
