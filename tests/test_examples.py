"""Every example, run once on several processes, reaches the loss that it states."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE
from tests.rank_server import ROOT, environment_of_ranks
from tests.ranks import free_port, run_script

EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
#: The one that is started as a user does, on a process of its own, which imports least (several: test_launch.py); the
#: others run on processes that have done their imports.
LAUNCHED = "meta_learning"
#: Example → processes and axis sizes, other than four on its own mesh.
MESHES: dict[str, tuple[int, str]] = {
    "captioning": (2, "dp=2"),
    "clip": (2, "dp=2"),
    "diffusion": (2, "dp=2"),
    "federated_averaging": (2, "dp=2"),
    "language_model": (2, "pp=2"),
    "lora": (2, "tp=2"),
    "meta_learning": (1, "dp=1"),
    "reinforcement_learning": (2, "dp=2"),
    "sequence_to_sequence": (2, "tp=2"),
    "text_classification": (2, "tp=2"),
}


def launched(name: str) -> str:
    """Output of ``planner run``; no process of it is left behind."""
    num_ranks, mesh = MESHES[name]
    script = ["--nproc", str(num_ranks), f"examples/{name}.py", "--mesh", mesh]
    command = [sys.executable, "-m", "planner", "run", *script]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment_of_ranks(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=PATIENCE)
        raise AssertionError(f"{name} took more than {PATIENCE} s:\n{output[-2000:]}") from None
    assert process.returncode == 0, output[-4000:]
    return output


def forked(name: str, folder: Path) -> str:
    """Output of rank 0, with the environment that ``torchrun`` gives."""
    num_ranks, mesh = MESHES.get(name, (4, ""))
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_ranks)}
    environments = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
    arguments = (name, *(("--mesh", mesh) if mesh else ()))
    script = ROOT / "tests" / "example_worker.py"
    return run_script(script, environments, folder=folder, timeout=PATIENCE, arguments=arguments)[0]


@pytest.mark.examples
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_reaches_its_goal(name: str, tmp_path: Path) -> None:
    output = launched(name) if name == LAUNCHED else forked(name, tmp_path)
    match = re.search(r"^loss (\S+) \(goal (\S+)\)$", output, re.MULTILINE)
    assert match, output[-2000:]
    assert float(match[1]) <= float(match[2])


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_is_short(name: str) -> None:
    assert len((ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 120
