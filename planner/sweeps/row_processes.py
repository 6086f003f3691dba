"""Worker processes of this machine for a sweep, as a ``concurrent.futures.Executor``.

Each worker is ``python -m planner.sweeps.row_processes``, which reads a request a line and answers each with a line of
JSON. So nothing imports the caller's script a second time, a worker that dies takes down one row and not the pool, and
when the sweep itself is killed its workers read the end of their input and end too.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from planner.sweeps.row_request import RowRequest

_ROOT = Path(__file__).resolve().parents[2]


class WorkerDied(RuntimeError):
    """A worker process ended while it planned a row."""


class RowProcesses(Executor):
    """``num_workers`` processes that plan rows; what is submitted must be ``plan_row``."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._threads = ThreadPoolExecutor(num_workers)
        self._local = threading.local()
        self._workers: set[subprocess.Popen[str]] = set()
        self._closed = False

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        """Plan the row of ``plan_row, request``."""
        (request,) = arguments
        return self._threads.submit(self._plan, request)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the workers, those that are planning too if ``cancel_futures``."""
        self._closed = cancel_futures  # no thread starts another worker
        self._threads.shutdown(wait=wait and not cancel_futures, cancel_futures=cancel_futures)
        for worker in list(self._workers):
            if cancel_futures:
                worker.kill()
            with contextlib.suppress(OSError):
                assert worker.stdin is not None
                worker.stdin.close()
            worker.wait()

    def _plan(self, request: RowRequest) -> Any:
        worker = self._worker()
        assert worker.stdin is not None and worker.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            worker.stdin.write(json.dumps(asdict(request)) + "\n")
            worker.stdin.flush()
        answer = worker.stdout.readline()
        if answer:
            return json.loads(answer)
        self._local.worker = None
        self._workers.discard(worker)
        with contextlib.suppress(OSError):
            worker.stdin.close()
        raise WorkerDied(f"the process that planned this row {_how_it_ended(worker.wait())}")

    def _worker(self) -> subprocess.Popen[str]:
        """The worker of the calling thread."""
        worker: subprocess.Popen[str] | None = getattr(self._local, "worker", None)
        if worker is None:
            if self._closed:
                raise WorkerDied("the sweep was ended")
            paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            worker = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # what libraries say while a model is captured
                env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                text=True,
            )
            self._workers.add(worker)
            self._local.worker = worker
        return worker


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"was ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def _serve() -> None:
    """Answer requests until the input ends."""
    from planner.sweeps.plan_row import plan_row

    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # nothing that a library prints is taken for an answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the sweep ends its workers
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    while True:
        data = json.loads(lines.get())
        request = RowRequest(**{**data, "baselines": tuple(data["baselines"])})
        answers.write(json.dumps(plan_row(request)) + "\n")
        answers.flush()


def _read(lines: queue.SimpleQueue[str]) -> None:
    """Pass on lines of the input; at its end the sweep has ended, and so does this process, whatever it is doing."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


if __name__ == "__main__":
    _serve()
