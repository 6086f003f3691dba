"""Start a worker on several real processes (gloo over loopback) and read what rank 0 found."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

#: Seconds that the other workers have left when one has failed.
GRACE = 20.0
ROOT = Path(__file__).resolve().parent.parent


def run_on_ranks(worker: str, world_size: int, payload: Any, *, timeout: float = 280.0) -> Any:
    """Run ``tests/<worker>.py`` on ``world_size`` processes; rank 0 leaves its result as JSON.

    The workers get ``payload`` through ``tests.ranks.task()`` and answer with ``tests.ranks.answer(result)``. They are
    forks of one process that has imported what all of them need, which takes longer than most of them run.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "task.json").write_text(json.dumps(payload), encoding="utf-8")
        environment = {
            **os.environ,
            "WORLD_SIZE": str(world_size),
            "MESHWRIGHT_TEST_FOLDER": folder,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": str(ROOT),
        }
        log = Path(folder) / "log"
        with log.open("w") as output:
            command = [sys.executable, "-m", "tests.ranks", str(ROOT / "tests" / f"{worker}.py"), str(timeout)]
            group = subprocess.Popen(
                command, env=environment, stdout=output, stderr=output, cwd=ROOT, start_new_session=True
            )
            try:
                group.wait(timeout + 2 * GRACE)
            except subprocess.TimeoutExpired:
                pass
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group.pid, signal.SIGKILL)
                group.wait()
        if group.returncode != 0:
            logs = [log, *(Path(folder) / f"log{rank}" for rank in range(world_size))]
            said = "\n".join(f"--- {path.name} ---\n{path.read_text()[-3000:]}" for path in logs if path.exists())
            raise AssertionError(f"workers failed ({group.returncode})\n{said}")
        return json.loads((Path(folder) / "answer.json").read_text(encoding="utf-8"))


def _fork_ranks(worker: str, timeout: float) -> None:
    """In a process of its own: import what workers need, fork one for each rank, and end as they do."""
    import torch
    import transformers  # noqa: F401

    import planner.compilation
    import planner.verification  # noqa: F401

    torch.set_num_threads(1)
    ranks = [_fork(worker, rank) for rank in range(int(os.environ["WORLD_SIZE"]))]
    codes = _wait(ranks, timeout)
    for rank, code in zip(ranks, codes):
        if code is None:
            os.kill(rank, signal.SIGKILL)
    print(f"exit codes {codes}", flush=True)
    os._exit(int(any(code != 0 for code in codes)))


def _fork(worker: str, rank: int) -> int:
    """The process of a rank, which runs the worker's file as a script."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        log = (Path(os.environ["MESHWRIGHT_TEST_FOLDER"]) / f"log{rank}").open("w")
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        os.environ["RANK"] = str(rank)
        sys.argv = [worker]
        runpy.run_path(worker, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(ranks: list[int], timeout: float) -> list[int | None]:
    """Exit codes; once one process has failed, the others have a few seconds left (None: it did not end)."""
    end = time.monotonic() + timeout
    codes: dict[int, int] = {}
    while len(codes) < len(ranks) and time.monotonic() < end:
        for rank in ranks:
            if rank not in codes:
                ended, status = os.waitpid(rank, os.WNOHANG)
                if ended:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                    if codes[rank]:
                        end = min(end, time.monotonic() + GRACE)
        time.sleep(0.05)
    return [codes.get(rank) for rank in ranks]


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


if __name__ == "__main__":
    _fork_ranks(sys.argv[1], float(sys.argv[2]))
