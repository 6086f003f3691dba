"""Runs a part in processes of its own, so that nothing that happens there stops anything else.

Processes are forked from a server that has imported everything and touched no GPU. Each notes in a file what it begins,
every row as it comes, and what is done; so whatever was measured before a crash, a hang or the end of the time stays.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import Item, Part, Setting
from benchmarks.ports import free_port

#: Seconds between looks, and that the other ranks have when one has ended.
LOOK, GRACE = 0.05, 10.0
#: What the server imports before it forks.
PRELOADED = ["benchmarks.gpu.preload"]
_LOG_LINES = 15
Record = dict[str, Any]


@dataclass
class Outcome:
    """What came of an item: ``status`` is "done", or what went wrong."""

    item: str
    status: str
    rows: list[Record] = field(default_factory=list)
    log: str = ""

    @property
    def holds(self) -> bool:
        return self.status == "done" and all(row.get("ok") is not False for row in self.rows)


def run_part(part: Part, setting: Setting, folder: Path) -> list[Outcome]:
    """All items of a part, begun again behind whatever ended a group of processes."""
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + part.seconds
    outcomes: dict[str, Outcome] = {}
    group = 0
    while remaining := [item for item in part.items if item.name not in outcomes]:
        if time.monotonic() > deadline:
            return [
                *outcomes.values(),
                *(Outcome(item.name, "left out: the part's time was spent") for item in remaining),
            ]
        group += 1
        records, log = folder / f"records-{group}.jsonl", folder / f"log-{group}"
        chosen = remaining[:1] if part.fresh else remaining
        try:
            problem = _run_group(part, chosen, setting, records, log, deadline)
        except (OSError, EOFError) as error:  # the server is gone: what it writes stands on the terminal
            problem = f"processes could not be started: {type(error).__name__}: {error}"
        attempted = _outcomes(_read(records), problem, _tail(log))
        if not attempted:  # nothing was begun: it would not be at the next try either
            attempted = {item.name: Outcome(item.name, problem or "never begun", log=_tail(log)) for item in chosen}
        outcomes |= attempted
    return list(outcomes.values())


def _run_group(
    part: Part, items: Sequence[Item], setting: Setting, records: Path, log: Path, deadline: float
) -> str | None:
    """Run items in one group of processes; what ended it before its time, if anything did."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    port = free_port()
    ranks = [
        context.Process(target=_rank, args=(rank, part.ranks, port, list(items), setting, records, log), daemon=False)
        for rank in range(part.ranks)
    ]
    for process in ranks:
        process.start()
    limits = {item.name: item.seconds for item in items}
    try:
        began = time.monotonic()
        current: str | None = None
        while any(process.is_alive() for process in ranks):
            if failed := [process.exitcode for process in ranks if process.exitcode]:
                _join(ranks, GRACE)
                return f"crashed: {_exit_text(failed[0])}"
            running = _running_item(_read(records))
            if running != current:
                current, began = running, time.monotonic()
            limit = max(limits.values()) if current is None else limits[current]
            if time.monotonic() - began > limit:
                return f"hung: more than {limit:g} s"
            if time.monotonic() > deadline:
                return "cut off: the part's time was spent"
            time.sleep(LOOK)
        failed = [process.exitcode for process in ranks if process.exitcode]
        return f"crashed: {_exit_text(failed[0])}" if failed else None
    finally:
        for process in ranks:
            _kill(process)


def _rank(rank: int, num_ranks: int, port: int, items: list[Item], setting: Setting, records: Path, log: Path) -> None:
    """One process: runs the items in order; what an item raises is noted by the first rank, and the next goes on."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(num_ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if setting.tiny:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"

    def note(**record: Any) -> None:
        if rank == 0:
            with records.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(record) + "\n")

    for item in items:
        note(event="begun", item=item.name)
        try:
            module, _, name = item.function.partition(":")
            for row in getattr(importlib.import_module(module), name)(setting, **item.arguments):
                note(event="row", item=item.name, row=row)
            note(event="done", item=item.name)
        except Exception as error:  # whatever an item raises: the others go on
            traceback.print_exc()
            note(event="failed", item=item.name, error=f"{type(error).__name__}: {error}"[:500])
            if num_ranks > 1 or not _is_usable(setting):
                raise SystemExit(1) from error  # the other ranks may wait for this one; a GPU that failed stays so
    _leave_group()


def _is_usable(setting: Setting) -> bool:
    if setting.device != "cuda":
        return True
    import torch

    try:
        torch.cuda.empty_cache()
        torch.zeros(1, device="cuda").add_(1).item()
    except Exception:  # an error of a kernel makes every later call fail
        return False
    return True


def _leave_group() -> None:
    if "torch.distributed" not in sys.modules:
        return
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _outcomes(records: Sequence[Record], problem: str | None, log: str) -> dict[str, Outcome]:
    """Of the items that were begun."""
    outcomes: dict[str, Outcome] = {}
    for record in records:
        name = record["item"]
        if record["event"] == "begun":
            outcomes[name] = Outcome(name, problem or "ended without a word", log=log)
        elif record["event"] == "row":
            outcomes[name].rows.append(record["row"])
        elif record["event"] == "done":
            outcomes[name].status, outcomes[name].log = "done", ""
        else:
            outcomes[name].status = f"failed: {record['error']}"
    return outcomes


def _running_item(records: Sequence[Record]) -> str | None:
    return next((record["item"] for record in reversed(records) if record["event"] == "begun"), None)


def _read(records: Path) -> list[Record]:
    if not records.exists():
        return []
    lines = records.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]  # the last may be half written


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:]) if log.exists() else ""


def _exit_text(code: int | None) -> str:
    return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit status {code}"


def _join(processes: Sequence[Any], seconds: float) -> None:
    until = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))


def _kill(process: Any) -> None:
    """End a process and all that it started."""
    if process.pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.is_alive():
        process.kill()
    process.join(GRACE)  # what hangs in a driver cannot be killed: it is left behind


def in_turn(parts: Sequence[Part], setting: Setting, folder: Path) -> Iterator[tuple[Part, list[Outcome], float]]:
    """Every part with its outcomes and the seconds that it took."""
    for part in parts:
        start = time.monotonic()
        if part.needs > setting.num_gpus:
            reason = f"left out: needs {part.needs} GPUs, there are {setting.num_gpus}"
            yield part, [Outcome(item.name, reason) for item in part.items], 0.0
            continue
        try:
            outcomes = run_part(part, setting, folder / part.name.replace(" ", "-"))
        except Exception as error:  # a fault of this command itself: the other parts go on
            outcomes = [Outcome(item.name, f"not run: {type(error).__name__}: {error}") for item in part.items]
        yield part, outcomes, time.monotonic() - start
