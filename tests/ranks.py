"""Start a worker on several real processes (gloo over loopback) and read what rank 0 found."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE
from tests.rank_server import ROOT, RankServer

#: Of this process of pytest: a second one only if the first has died.
_servers: list[RankServer] = []


def run_on_ranks(worker: str, world_size: int, payload: Any, *, timeout: float = PATIENCE) -> Any:
    """Run ``tests/<worker>.py`` on ``world_size`` processes; rank 0 leaves its result as JSON.

    The workers get ``payload`` through ``tests.ranks.task()`` and answer with ``tests.ranks.answer(result)``. Where the
    tests of a module are dealt out to several processes of pytest, the first to ask runs it and the others read.
    """
    text = json.dumps(payload)
    with _one_at_a_time(f"{worker} {world_size} {text}") as answer_file:
        if not answer_file.exists():
            try:
                answered = {"result": json.loads(_answer_of_ranks(worker, world_size, text, timeout))}
            except AssertionError as error:  # not tried again for every test that asks, nor said again at length
                first_line = next(iter(str(error).splitlines()), "")
                answer_file.write_text(json.dumps({"failure": f"{first_line}; an earlier test says more"}))
                raise
            answer_file.write_text(json.dumps(answered), encoding="utf-8")
    answered = json.loads(answer_file.read_text(encoding="utf-8"))
    assert "failure" not in answered, answered["failure"]
    return answered["result"]


@contextlib.contextmanager
def _one_at_a_time(question: str) -> Iterator[Path]:
    """The file in which the answer to ``question`` is kept for this run of the tests, locked."""
    folder = Path(os.environ["MESHWRIGHT_TEST_RUN"])
    answer_file = folder / f"{hashlib.sha256(question.encode()).hexdigest()}.json"
    with answer_file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield answer_file


def _answer_of_ranks(worker: str, world_size: int, payload: str, timeout: float) -> str:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "task.json").write_text(payload, encoding="utf-8")
        shared = {"WORLD_SIZE": str(world_size), "MESHWRIGHT_TEST_FOLDER": folder}
        environments = [{**shared, "RANK": str(rank)} for rank in range(world_size)]
        run_script(ROOT / "tests" / f"{worker}.py", environments, folder=Path(folder), timeout=timeout)
        return (Path(folder) / "answer.json").read_text(encoding="utf-8")


def run_script(
    script: Path,
    environments: Sequence[Mapping[str, str]],
    *,
    folder: Path,
    timeout: float,
    arguments: Sequence[str] = (),
) -> list[str]:
    """Run a script on a process for each environment; what each of them wrote.

    Raises:
        AssertionError: if one failed or did not end in time; it says what they wrote.
    """
    codes = _server().run(script, folder, environments, arguments=arguments, timeout=timeout)
    written = [(folder / f"log{rank}").read_text() for rank in range(len(environments))]
    if any(code != 0 for code in codes):
        # Whoever ended by a signal comes last: the end of a long message is what a log shows.
        order = sorted(range(len(codes)), key=lambda rank: (codes[rank] or 0) < 0)
        said = "\n".join(f"--- rank {rank} ---\n{written[rank][-8000:]}" for rank in order)
        raise AssertionError(f"ranks ended with {codes} (None: not within {timeout} s)\n{said}")
    return written


def _server() -> RankServer:
    if not _servers or not _servers[-1].is_alive:
        _servers.append(RankServer())
    return _servers[-1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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


def result_of(function: Callable[..., Any], *args: Any) -> Any:
    """In a worker: what it returns, or the error that it raises, in words."""
    try:
        return function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
