"""A trace with open sizes, made by one rank of a job: the others read the graphs that it makes of it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

#: Seconds that a rank waits for the graph that the tracing rank makes too; then it traces itself.
_WAIT = 60.0

Graphs = Callable[[Mapping[Any, Any]], Any]


class OpenTrace:
    """What ``trace_shapes`` gives, for all ranks of a job and later jobs of the run.

    Args:
        file: names the trace; graphs lie beside it.
        trace: makes it; what it raises is raised on every rank that calls it.
    """

    def __init__(self, file: Path, trace: Callable[[], Graphs]) -> None:
        self._file, self._trace = file, trace
        self._graphs: Graphs | None = None
        job = os.environ.get("MESHWRIGHT_TEST_FOLDER") or os.environ.get("MASTER_PORT") or str(os.getpid())
        self._claim = file.with_suffix("." + hashlib.sha256(job.encode()).hexdigest())
        with _locked(file):
            if not file.exists():
                self._graphs = trace()
                self._claim.write_text(str(os.getpid()))
                file.touch()

    def __call__(self, shapes: Mapping[Any, Any]) -> Any:
        answer = self._file.with_suffix("." + hashlib.sha256(repr(sorted(shapes.items())).encode()).hexdigest())
        if self._graphs is None and self._is_anothers():
            _wait_for(answer)
        with _locked(answer):
            if not answer.exists():
                if self._graphs is None:
                    self._graphs = self._trace()
                answer.write_bytes(_result(self._graphs, shapes))
        result = pickle.loads(answer.read_bytes())
        if isinstance(result, ValueError):
            raise result
        return result

    def _is_anothers(self) -> bool:
        """Whether another rank of this job has the trace, or will when it is needed."""
        with _locked(self._claim):
            if not self._claim.exists():
                self._claim.write_text(str(os.getpid()))
            return self._claim.read_text() != str(os.getpid())


def _result(graphs: Graphs, shapes: Mapping[Any, Any]) -> bytes:
    """The graph, or the error that says that these shapes need another trace."""
    try:
        return pickle.dumps(graphs(shapes))
    except ValueError as error:
        return pickle.dumps(error)


def _wait_for(answer: Path) -> None:
    end = time.monotonic() + _WAIT
    while not answer.exists() and time.monotonic() < end:
        time.sleep(0.02)


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.with_name(f"{file.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
