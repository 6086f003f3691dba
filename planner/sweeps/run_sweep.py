"""``planner.sweep``: plan every row of a study that is not finished, in parallel, and write the tables and the page."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cost_models.short_text import ShortRepr
from planner.sweeps.plan_row import error_record, plan_row
from planner.sweeps.results_folder import ResultsFolder
from planner.sweeps.row_processes import RowProcesses
from planner.sweeps.row_request import RowRequest, study_rows
from planner.sweeps.study import Study
from planner.sweeps.study_format import load_study, read_study
from planner.sweeps.sweep_files import write_results
from planner.sweeps.sweep_row import SweepRow

#: Told of each row: how many are finished, of how many, the row, and whether it was planned now.
RowListener = Callable[[int, int, SweepRow, bool], None]


@dataclass(frozen=True, repr=False)
class Sweep(ShortRepr):
    """A finished sweep: its rows in the study's order, and the files that were written."""

    study: Study
    rows: tuple[SweepRow, ...]
    files: tuple[Path, ...]

    @property
    def num_errors(self) -> int:
        """Rows without a plan."""
        return sum(row.error is not None for row in self.rows)


def sweep(
    study: Study | Mapping[str, Any] | str | Path,
    output: str | Path,
    *,
    executor: Executor | None = None,
    jobs: int | None = None,
    listener: RowListener | None = None,
) -> Sweep:
    """Plan every combination of a study and write plans, tables and a page into the folder ``output``.

    Rows that are finished there are not planned again, so that a sweep that was killed goes on, and a study that was
    changed plans what is new. A row that cannot be planned has its error in the table.

    Args:
        study: a study, its fields as plain data, or a TOML file of them (``planner.sweeps.study_format``).
        executor: who plans the rows, any ``concurrent.futures.Executor``; None for processes of this machine.
        jobs: how many processes that are (default: one for each core).
        listener: told of every row.

    Raises:
        ValueError: for a study that cannot be read, a folder that cannot be written, and an executor that breaks.

    Example:
        >>> planner.sweep({"models": ["llama-3-8b"], "clusters": ["dgx-h100:1", "dgx-h100:2"],
        ...                "global_batches": [64], "seq_lens": [8192]}, "results")
    """
    if isinstance(study, (str, Path)):
        study = load_study(study)
    elif not isinstance(study, Study):
        study = read_study(study)
    if jobs is not None and (isinstance(jobs, bool) or not isinstance(jobs, int) or jobs < 1):
        raise ValueError(f"jobs must be a whole number of at least 1, got {jobs!r}")
    if jobs is not None and executor is not None:
        raise ValueError("jobs are processes of this machine, but an executor plans the rows: drop one of them")
    requests = study_rows(study)
    folder = ResultsFolder(output)
    with folder.locked():
        results = {request.key: result for request in requests if (result := folder.finished(request)) is not None}
        rows = {key: SweepRow(request, results[key]) for request in requests if (key := request.key) in results}
        for place, row in enumerate(rows.values()):
            if listener is not None:
                listener(place + 1, len(requests), row, False)
        missing = [request for request in requests if request.key not in rows]
        for request, result in _planned(missing, executor, jobs):
            rows[request.key] = SweepRow(request, folder.keep(request, result))
            if listener is not None:
                listener(len(rows), len(requests), rows[request.key], True)
        ordered = tuple(rows[request.key] for request in requests)
        return Sweep(study, ordered, write_results(study, ordered, folder))


def _planned(
    requests: list[RowRequest], executor: Executor | None, jobs: int | None
) -> Iterator[tuple[RowRequest, dict[str, Any]]]:
    """Yield each request with what ``plan_row`` returns for it, as they are finished."""
    if executor is not None or not requests:
        yield from _through(executor, requests)
        return
    workers = RowProcesses(min(jobs or len(os.sched_getaffinity(0)), len(requests)))
    ended = False
    try:
        yield from _through(workers, requests)
        ended = True
    finally:
        workers.shutdown(cancel_futures=not ended)


def _through(executor: Executor | None, requests: list[RowRequest]) -> Iterator[tuple[RowRequest, dict[str, Any]]]:
    """Submit the first row of every graph; the others of a graph when its first is done, which has kept the graph."""
    waiting: dict[tuple[Any, ...], list[RowRequest]] = {}
    ready: deque[RowRequest] = deque()
    for request in requests:
        if request.graph in waiting:
            waiting[request.graph].append(request)
        else:
            waiting[request.graph] = []
            ready.append(request)
    pending: dict[Future[Any], RowRequest] = {}
    try:
        yield from _until_done(executor, ready, waiting, pending)
    finally:
        for future in pending:
            future.cancel()


def _until_done(
    executor: Executor | None,
    ready: deque[RowRequest],
    waiting: dict[tuple[Any, ...], list[RowRequest]],
    pending: dict[Future[Any], RowRequest],
) -> Iterator[tuple[RowRequest, dict[str, Any]]]:
    """Submit ``ready`` requests, yield results, and release those that are ``waiting`` for a graph."""
    while ready or pending:
        done: set[Future[Any]] = set()
        while ready and not done:  # an executor may run what is submitted at once: its rows are written at once
            assert executor is not None
            future = _submit(executor, ready[0])
            pending[future] = ready.popleft()
            done = {future} if future.done() else set()
        if not done:
            done, _ = wait(pending, return_when=FIRST_COMPLETED)
        for future in done:
            request = pending.pop(future)
            yield request, _result(future)
            ready.extendleft(reversed(waiting.pop(request.graph, [])))


def _submit(executor: Executor, request: RowRequest) -> Future[Any]:
    try:
        return executor.submit(plan_row, request)
    except BrokenExecutor as error:
        raise _broken(error) from error


def _result(future: Future[Any]) -> dict[str, Any]:
    """What ``plan_row`` returned; what the executor raised as the error of this row."""
    try:
        return future.result()  # type: ignore[no-any-return]
    except BrokenExecutor as error:
        raise _broken(error) from error
    except Exception as error:  # the row's own errors are in its record: this one is of a worker, or on the way
        record = {**error_record(error), "final": False}
        return {"record": record, "plan": None, "seconds": 0.0, "processor_seconds": 0.0}


def _broken(error: BrokenExecutor) -> ValueError:
    return ValueError(
        f"the executor broke ({str(error) or type(error).__name__}): what is finished is kept, run the sweep again to "
        "go on"
    )
