"""The folder of a sweep's results: a file for each finished row and one for its plan, each there whole or not at all.

    results/rows/KEY.json       a finished row: its figures or its error, and the hash of its plan
    results/plans/NAME.json     its plan
    results/table.csv, …        written from the rows of the study, in its order

A row is finished when its file is there; its plan is written before it. So a sweep that is killed at any moment goes on
where it was, and what it ends with does not depend on where that was.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cost_models.files import read_json, write_text
from cost_models.text import printable
from planner.sweeps.row_request import RowRequest


class ResultsFolder:
    """Reads and writes the rows and plans under ``path``."""

    def __init__(self, path: str | Path) -> None:
        """Make the folder where it is not there.

        Raises:
            ValueError: if it cannot be made or written.
        """
        self.path = Path(path)
        self.rows, self.plans = self.path / "rows", self.path / "plans"
        try:
            for folder in (self.rows, self.plans):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"cannot write '{printable(str(path))}': {error.strerror or error}") from error

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other sweeps out of the folder, and remove what a killed one was writing.

        Raises:
            ValueError: if another sweep is writing here.
        """
        with (self.path / ".lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"another sweep is writing into '{printable(str(self.path))}': wait for it, or give another folder"
                ) from None
            except OSError:
                pass  # a file system without locks
            for folder in (self.path, self.rows, self.plans):
                for partial in folder.glob(".*.partial"):
                    partial.unlink(missing_ok=True)
            yield

    def finished(self, request: RowRequest) -> Mapping[str, Any] | None:
        """The result of a row that is finished, None if it is to be planned."""
        path = self.rows / f"{request.key}.json"
        if not path.exists():
            return None
        try:
            result = read_json(path, what="row")
            record = result["record"]
            final = bool(record["final"]) if "error" in record else self._plan_hash(request) == result["plan_hash"]
            complete = isinstance(result["seconds"], float) and isinstance(result["processor_seconds"], float)
        except (KeyError, OSError, TypeError, ValueError):  # damaged: planned again
            return None
        return result if final and complete else None

    def keep(self, request: RowRequest, result: Mapping[str, Any]) -> Mapping[str, Any]:
        """Write what ``plan_row`` returned; returns the result as ``finished`` does."""
        text = result["plan"]
        if text is not None:
            write_text(self.plans / request.plan_file, text)
        row = {
            "request": _named(request),
            "record": result["record"],
            "plan_hash": None if text is None else _hash(text.encode()),
            "seconds": result["seconds"],
            "processor_seconds": result["processor_seconds"],
        }
        write_text(self.rows / f"{request.key}.json", json.dumps(row, indent=1) + os.linesep)
        return row

    def write(self, name: str, text: str) -> Path:
        """Write a table or page of the results."""
        write_text(self.path / name, text)
        return self.path / name

    def _plan_hash(self, request: RowRequest) -> str:
        return _hash((self.plans / request.plan_file).read_bytes())


def _named(request: RowRequest) -> dict[str, Any]:
    """What a person who reads the file wants to know of the request."""
    return {
        "model": request.model,
        "cluster": request.cluster,
        "devices": request.num_devices,
        "batch": request.batch,
        "seq_len": request.seq_len,
        "options": request.options,
        "layout": request.layout,
    }


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
