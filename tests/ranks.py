"""Start a worker on several real processes (gloo over loopback) and read what rank 0 found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

#: Seconds that the other workers have left when one has failed.
GRACE = 20.0
ROOT = Path(__file__).resolve().parent.parent


def run_on_ranks(worker: str, world_size: int, payload: Any, *, timeout: float = 280.0) -> Any:
    """Run ``tests/<worker>.py`` on ``world_size`` processes; rank 0 leaves its result as JSON.

    The workers get ``payload`` through ``tests.ranks.task()`` and answer with ``tests.ranks.answer(result)``.
    """
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder) / "task.json"
        task.write_text(json.dumps(payload), encoding="utf-8")
        processes = []
        for rank in range(world_size):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MESHWRIGHT_TEST_FOLDER": folder,
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "PYTHONPATH": str(ROOT),
            }
            log = (Path(folder) / f"log{rank}").open("w")
            command = [sys.executable, str(ROOT / "tests" / f"{worker}.py")]
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=ROOT))
        try:
            codes = _wait(processes, timeout)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(code != 0 for code in codes):
            logs = "\n".join(
                f"--- rank {rank} ---\n{(Path(folder) / f'log{rank}').read_text()[-3000:]}"
                for rank in range(world_size)
            )
            raise AssertionError(f"workers ended with {codes}\n{logs}")
        return json.loads((Path(folder) / "answer.json").read_text(encoding="utf-8"))


def _wait(processes: list[subprocess.Popen[bytes]], timeout: float) -> list[int | None]:
    """Exit codes; once one process has failed, the others have a few seconds left (None: it did not end)."""
    end = time.monotonic() + timeout
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            end = min(end, time.monotonic() + GRACE)
        if time.monotonic() > end:
            break
        time.sleep(0.1)
    return [process.poll() for process in processes]


def task() -> Any:
    """In a worker: join the process group and read the payload."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    folder = os.environ["MESHWRIGHT_TEST_FOLDER"]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    return json.loads((Path(folder) / "task.json").read_text(encoding="utf-8"))


def answer(result: Any) -> None:
    """In a worker: rank 0 leaves the result; all leave the process group."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        target = Path(os.environ["MESHWRIGHT_TEST_FOLDER"]) / "answer.json"
        target.write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
