"""Start a script on processes of this host that may be lost: another is started in the place of each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from planner.cli.launch import find_modules_here
from runtime.elastic.job_rounds import MEMBER_VARIABLE, STORE_VARIABLE, Leader
from runtime.elastic.supervisor import Started, Supervisor


def launch_elastic(command: Sequence[str], *, num_processes: int, least: int, max_restarts: int) -> int:
    """Run ``command`` (a script and its arguments) on ``num_processes``, and go on with ``least`` at least.

    Returns:
        the exit code: 0 if the training came to its end.

    Raises:
        ValueError: for numbers that contradict each other.
    """
    if not 1 <= least <= num_processes:
        raise ValueError(f"--elastic {least}: at least 1 process, and at most the {num_processes} of --nproc")
    if max_restarts < 0:
        raise ValueError(f"--max-restarts {max_restarts}: at least 0")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    find_modules_here()
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60), multi_tenant=False
    )

    def start(number: int, place: int) -> Started:
        environment = {
            **os.environ,
            STORE_VARIABLE: f"127.0.0.1:{store.port}",
            MEMBER_VARIABLE: str(number),
            "LOCAL_RANK": str(place),
            "LOCAL_WORLD_SIZE": str(num_processes),
        }
        return subprocess.Popen([sys.executable, *command], env=environment)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the processes are ended, too
    leader = Leader(store, first=num_processes, least=least)
    supervisor = Supervisor(
        store,
        start,
        num_processes=num_processes,
        max_restarts=max_restarts,
        leader=leader,
        on_loss=lambda words: print(f"planner: {words}", file=sys.stderr, flush=True),
    )
    return supervisor.run()
