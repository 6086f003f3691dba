"""Processes that find each other, or say why not: real ones, over loopback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

import planner
from runtime.launch import last_words
from runtime.launch.last_words import first_to_fail
from runtime.launch.place import LaunchError, ProcessPlace
from runtime.launch.rendezvous import Deadline, agree_on_meeting, check_in
from tests.patience import PATIENCE
from tests.rank_server import of_no_job
from tests.ranks import ROOT, free_port, run_on_ranks, run_script

#: Seconds until a start that cannot succeed gives up.
TIMEOUT = 3.0


def environment(**changes: str) -> dict[str, str]:
    return {
        **of_no_job(os.environ),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(ROOT),
        **changes,
    }


def join(*processes: tuple[dict[str, Any], dict[str, str]]) -> list[dict[str, Any]]:
    """How ``planner.init(**arguments)`` ends on processes with these (arguments, variables)."""
    environments = [
        {**variables, "MESHWRIGHT_TEST_INIT": json.dumps({"timeout": TIMEOUT, "device": "cpu", **arguments})}
        for arguments, variables in processes
    ]
    script = ROOT / "tests" / "launch_worker.py"
    with tempfile.TemporaryDirectory() as folder:
        written = run_script(script, environments, folder=Path(folder), timeout=PATIENCE)
    return [json.loads(next(line for line in lines.splitlines() if line.startswith("{"))) for lines in written]


def rank(number: int, world_size: int, port: int) -> tuple[dict[str, Any], dict[str, str]]:
    return {"rank": number, "world_size": world_size, "address": "127.0.0.1", "port": port, "timeout": PATIENCE}, {}


def test_processes_join_as_slurm_says() -> None:
    job = {"SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "localhost", "MASTER_PORT": str(free_port())}
    tasks = [{**job, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)} for task in range(2)]
    outcomes = join(*(({"timeout": PATIENCE}, task) for task in tasks))
    assert outcomes == [{"rank": task, "local_rank": task, "again": task, "ranks": [0, 1]} for task in range(2)]


def test_all_that_came_say_who_is_missing() -> None:
    port = free_port()
    outcomes = join(*(({**rank(number, 5, port)[0], "timeout": TIMEOUT}, {}) for number in (0, 3)))
    for number, process in zip((0, 3), outcomes, strict=True):
        assert process["kind"] == "LaunchError"
        assert f"rank {number} of 5" in process["error"] and f"127.0.0.1:{port}" in process["error"]
        # Under load the second may come after the first has given up.
        assert "ranks 1-2, 4 did not come" in process["error"] or "of rank 0" in process["error"]


def check_in_all(store: dist.Store, *places: tuple[int, int], timeout: float = PATIENCE) -> list[str]:
    """What ends the start of processes with these (rank, world_size), each a thread here."""

    def one(place: tuple[int, int]) -> str:
        with pytest.raises(LaunchError) as ended:
            check_in(store, ProcessPlace(*place, None, "node1", 4000, "slurm"), Deadline.after(timeout))
        return str(ended.value)

    with ThreadPoolExecutor() as threads:
        return list(threads.map(one, places))


def test_missing_ranks_are_counted_by_host() -> None:
    outcomes = check_in_all(dist.HashStore(), (0, 9), (1, 9), (5, 9), timeout=5.0)
    assert all("ranks 2-4, 6-8 did not come within 5 s; here are ranks 0-1, 5 on" in error for error in outcomes)
    assert all("node1:4000" in error and "srun" in error for error in outcomes)


def test_two_processes_of_one_rank_end_the_job_at_once() -> None:
    store = dist.HashStore()
    store.set("rank/1", "node7 (process 4711)")
    outcomes = check_in_all(store, (0, 3), (1, 3))
    assert all("two processes are rank 1: on node7 (process 4711) and on" in error for error in outcomes)


def test_unequal_world_sizes_end_the_job_at_once() -> None:
    store = dist.HashStore()
    store.set("world_size", "2")
    outcomes = check_in_all(store, (0, 2), (1, 3))
    assert all("rank 1 of 3" in error and "expects 3 processes, the first one to come 2" in error for error in outcomes)


def test_a_start_at_a_store_that_others_have_used_hears_of_its_own_processes_alone() -> None:
    """As torchrun's agents start workers again, three and then two: the others are there before rank 0."""
    store = dist.HashStore()

    def meeting(rank: int, world_size: int) -> str:
        place = ProcessPlace(rank, world_size, None, "node1", 4000, "torchrun")
        return agree_on_meeting(store, place, Deadline.after(PATIENCE))

    names = []
    with ThreadPoolExecutor() as threads:
        for world_size in (3, 2):
            started = store.add("meshwright/processes", 0)
            others = [threads.submit(meeting, rank, world_size) for rank in range(1, world_size)]
            while store.add("meshwright/processes", 0) < started + world_size - 1:
                time.sleep(0.01)
            names.append(meeting(0, world_size))
            assert [other.result() for other in others] == names[-1:] * (world_size - 1)
    assert names[0] != names[1]
    with pytest.raises(LaunchError, match=r"rank 1 did not come within 0\.1 s\. .*the launcher runs on every host"):
        agree_on_meeting(store, ProcessPlace(0, 2, None, "node1", 4000, "torchrun"), Deadline.after(0.1))


def test_nobody_at_the_address_and_a_stranger_there() -> None:
    """Connection refused; a name that is none; a listener that never answers; a port that is taken."""
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        taken = stranger.getsockname()[1]
        refused = {**rank(1, 2, free_port())[0], "timeout": TIMEOUT}
        unknown = {**refused, "address": "no-such-host.invalid"}
        outcomes = join((refused, {}), (unknown, {}), ({**refused, "port": taken}, {}), rank(0, 2, taken))
    assert "rank 1 of 2 did not reach rank 0" in outcomes[0]["error"] and "Connection refused" in outcomes[0]["error"]
    assert "no-such-host.invalid" in outcomes[1]["error"]
    assert "another program may use that port" in outcomes[2]["error"]
    assert f"cannot listen at port {taken}" in outcomes[3]["error"]
    assert all(process["kind"] == "LaunchError" for process in outcomes)


def planner_run(script: Path, text: str, *arguments: str) -> subprocess.Popen[str]:
    script.write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "planner", "run", *arguments]
    return subprocess.Popen(
        command, env=environment(), cwd=script.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


SLEEPER = """
import os, pathlib, time
pathlib.Path("pid" + os.environ["RANK"]).write_text(str(os.getpid()))
while not (pathlib.Path("pid0").exists() and pathlib.Path("pid1").exists()):
    time.sleep(0.05)
time.sleep(3600)
"""


CRASH = """
import os, pathlib, sys
import planner
pathlib.Path("pid" + os.environ["RANK"]).write_text(str(os.getpid()))
planner.init()
import torch, torch.distributed as dist
if sys.argv[1:] == ["crash", "--port", "7"] and os.environ["RANK"] == "1":
    raise RuntimeError("the data is gone\\non two lines")
dist.all_reduce(torch.ones(1))
"""


def gone(folder: Path) -> bool:
    """Whether both workers have ended."""
    pids = [int((folder / f"pid{number}").read_text()) for number in range(2)]
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_crash_ends_the_others_and_shows_why(tmp_path: Path) -> None:
    """The last line is about the rank that failed of itself, whenever the others followed it."""
    arguments = ("train.py", "--nproc", "2", "crash", "--port", "7")  # the last is the script's own
    process = planner_run(tmp_path / "train.py", CRASH, *arguments)
    _, written = process.communicate(timeout=PATIENCE)
    pids = [(tmp_path / f"pid{number}").read_text() for number in range(2)]
    assert process.returncode == 1, written
    assert written.splitlines()[-1] == (
        f"planner: rank 1 of 2 (process {pids[1]}) exited with code 1: RuntimeError: the data is gone; "
        "the other ranks were stopped because of it"
    )
    assert gone(tmp_path)


def test_a_rank_that_is_stopped_while_it_writes_leaves_no_half_of_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's agent fails on a file that is not JSON yet."""
    left = tmp_path / "error.json"
    for variable, value in ((last_words.ENABLED, "1"), (last_words.FILE, str(left))):
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    monkeypatch.setattr(last_words, "_hooked", False)
    last_words.leave_last_words()
    with monkeypatch.context() as stopped:
        stopped.setattr(os, "replace", Mock(side_effect=OSError("stopped here")))
        sys.excepthook(ValueError, ValueError("no"), None)
    assert not left.exists()
    sys.excepthook(ValueError, ValueError("no"), None)
    assert json.loads(left.read_text())["message"]["message"] == "ValueError: no"


def test_the_rank_that_failed_of_itself_is_told_from_those_that_lost_it() -> None:
    def failure(code: int, second: int, words: str | None = None) -> SimpleNamespace:
        left = None if words is None else {"message": words, "extraInfo": {"seconds": second + 0.5}}
        return SimpleNamespace(exitcode=code, timestamp=second, message=left)

    lost = failure(1, 7, "RuntimeError: [pair.cc:537] Read error: Connection reset by peer.")
    stopped, aborted = failure(-signal.SIGTERM, 7), failure(-signal.SIGABRT, 7)
    assert first_to_fail({0: lost, 1: stopped, 2: failure(1, 8, "KeyError: 'x'")}) == 2
    assert first_to_fail({0: lost, 1: aborted, 2: failure(-signal.SIGKILL, 8)}) == 2
    assert first_to_fail({0: lost, 1: failure(1, 7, "ValueError: rank 2: no"), 2: failure(1, 8, "ValueError: no")}) == 2
    assert first_to_fail({0: lost, 1: aborted}) == 1


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_process_behind(tmp_path: Path, sent: signal.Signals) -> None:
    process = planner_run(tmp_path / "train.py", SLEEPER, "--nproc=2", "train.py")
    deadline = time.monotonic() + PATIENCE
    while not all((tmp_path / f"pid{n}").exists() for n in range(2)) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(sent)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + sent
    assert gone(tmp_path)


#: Makes its process group itself, over which a model is planned, and leaves it to the end of the process.
OWN_GROUP = """
import atexit
import torch
import torch.distributed as dist
atexit.register(lambda: print("left" if not dist.is_initialized() else "joined to the last"))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import planner
mesh = {mesh}
parallel = planner.compile(torch.nn.Linear(2, 2), mesh)
parallel(torch.ones(1, 2)).sum().backward()
"""


@pytest.mark.parametrize("mesh", ["'dp=1'", "dist.init_device_mesh('cpu', (1,), mesh_dim_names=('dp',))"])
def test_a_group_that_a_script_made_is_left_before_the_interpreter_is_taken_down(mesh: str) -> None:
    command = [sys.executable, "-c", OWN_GROUP.format(mesh=mesh)]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE)
    assert (ended.returncode, ended.stdout) == (0, "left\n"), ended.stderr


def test_a_host_says_which_one_it_cannot_reach(tmp_path: Path) -> None:
    port = free_port()
    hosts = ("--nproc=1", "--nnodes=2", "--address=127.0.0.1", f"--port={port}", "--timeout=2")
    process = planner_run(tmp_path / "train.py", "", *hosts, "--node-rank=1", "train.py")
    _, written = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert f"planner: host 1 of 2 did not reach host 0 at 127.0.0.1:{port}" in written


def test_two_hosts_number_their_processes_through(tmp_path: Path) -> None:
    # one write a line: four processes share the standard output
    text = "import os; os.write(1, ' '.join([os.environ['RANK'], os.environ['WORLD_SIZE']]).encode() + b'\\n')"
    hosts = ("--nproc=2", "--nnodes=2", "--address=127.0.0.1", f"--port={free_port()}", f"--timeout={PATIENCE}")
    started = [
        planner_run(tmp_path / "train.py", text, *hosts, f"--node-rank={number}", "train.py") for number in (0, 1)
    ]
    written = [process.communicate(timeout=PATIENCE)[0] for process in started]
    assert [sorted(lines.splitlines()) for lines in written] == [["0 4", "1 4"], ["2 4", "3 4"]]


def group_of(backend_config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with four GPUs on which the user has made a process group, and chosen no GPU."""
    chosen = [0]
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backend_config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen[0])
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: chosen.__setitem__(0, index))


def test_a_gloo_group_on_a_host_with_gpus_computes_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    group_of("cpu:gloo,cuda:gloo", monkeypatch)
    assert planner.init().device == torch.device("cpu")


@pytest.mark.parametrize(("local_rank", "expected"), [("3", 3), ("1", 1), (None, 3)])
def test_under_a_users_nccl_group_each_process_takes_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch, local_rank: str | None, expected: int
) -> None:
    group_of("cuda:nccl", monkeypatch)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert planner.init().device == torch.device("cuda", expected)
    assert torch.cuda.current_device() == expected


def test_groups_of_axes_wait_as_long_as_the_job() -> None:
    """torch gives them its own 30 minutes (10 on NCCL), whatever the job was started with."""
    assert run_on_ranks("groups_worker", 4, {"seconds": 77}, timeout=PATIENCE) == {"seconds": [77.0] * 6}


#: How a script ends → whether the group is still there when the interpreter is taken down.
ENDS = {"pass": False, "planner.init()": False, "sys.exit(3)": False, "raise KeyError": True}
END = """
import atexit, os, sys
import planner, torch.distributed as dist
for number, end in enumerate(sys.argv[1:]):
    if os.fork():
        os.wait()
        continue
    atexit._clear()
    atexit.register(lambda: print(number, dist.is_initialized(), flush=True))
    planner.init()
    exec(end)
    break
"""


def test_a_group_that_init_made_is_left_when_the_script_ends_well() -> None:
    written = subprocess.run(
        [sys.executable, "-c", END, *ENDS], env=environment(), capture_output=True, text=True, timeout=PATIENCE
    )
    assert written.stdout.split() == [
        word for number, there in enumerate(ENDS.values()) for word in (str(number), str(there))
    ]
