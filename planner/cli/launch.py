"""Start a program on several processes, of this host or of many, through torchrun's own agent."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.launch.last_words import ENABLED, first_to_fail, last_words
from runtime.launch.place import DEFAULT_PORT, LaunchError


@dataclass(frozen=True)
class Hosts:
    """This host among ``count``: all start the same command, each with its own ``rank``.

    ``address``, ``port``: where host 0 listens. ``timeout``: seconds within which all hosts must have come.
    """

    count: int = 1
    rank: int = 0
    address: str | None = None
    port: int = DEFAULT_PORT
    timeout: float = 300.0

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.rank < self.count:
            raise ValueError(
                f"the host's number must be in 0..{max(self.count - 1, 0)}, got {self.rank} of {self.count} hosts "
                "(--node-rank, --nnodes)"
            )
        if self.count > 1 and not self.address:
            raise ValueError(f"{self.count} hosts need the host name of host 0: --address")
        if not 0 < self.port < 2**16:
            raise ValueError(f"a port is in 1..65535, got {self.port}")
        if not 1 <= self.timeout < float("inf"):
            raise ValueError(f"the time-out must be at least 1 second, got {self.timeout:g}")


def launch(command: Sequence[str], *, num_processes: int, hosts: Hosts | None = None) -> int:
    """Run ``command`` (a script and its arguments, or ``-m module …``) on ``num_processes`` of each host.

    Returns:
        the exit code: 0 if all ended well, else that of the process that failed first (128 + the signal that ended it);
        the other processes are stopped then.

    Raises:
        ValueError: if ``num_processes`` is not positive.
        LaunchError: if the hosts do not find one another in time.
    """
    hosts = hosts or Hosts()
    if num_processes < 1:
        raise ValueError(f"the number of processes must be at least 1, got {num_processes}")
    # Without a limit every process would start one thread for each core.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    os.environ[ENABLED] = "1"
    find_modules_here()
    if hosts.count == 1:
        return _run_agent(["--standalone", f"--nproc-per-node={num_processes}", *command], world_size=num_processes)
    return _run_on_many(command, num_processes, hosts)


def find_modules_here() -> None:
    """Put this package's folder on Python's path: processes start with only their script's folder there."""
    package_folder = str(Path(__file__).resolve().parents[2])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if package_folder not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in (*paths, package_folder) if path)


def _run_on_many(command: Sequence[str], num_processes: int, hosts: Hosts) -> int:
    import torch.distributed as dist

    from runtime.launch.rendezvous import Deadline, open_store

    assert hosts.address is not None
    deadline = Deadline.after(hosts.timeout)
    waiting = f"host {hosts.rank} of {hosts.count}"
    if hosts.rank > 0:  # the agent's own attempt would say less, and hang where something else listens
        open_store(hosts.address, hosts.port, keeps=False, waiting=waiting, keeper="host 0", deadline=deadline)
    static = [f"--nnodes={hosts.count}", f"--node-rank={hosts.rank}", f"--nproc-per-node={num_processes}"]
    static += [f"--master-addr={hosts.address}", f"--master-port={hosts.port}"]
    started = time.monotonic()
    try:
        waits = f"--rdzv-conf=timeout={max(1, round(deadline.left))}"
        return _run_agent([*static, waits, *command], world_size=hosts.count * num_processes)
    except dist.DistError as error:
        raise LaunchError(
            f"{waiting}: after {time.monotonic() - started:.0f} s not all hosts have come to {hosts.address}:"
            f"{hosts.port} ({error}); run the same command on every host, with its own --node-rank"
        ) from error


def _epitaph(rank: int, world_size: int, failure: Any) -> str:
    code, words = failure.exitcode, last_words(failure)
    ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    others = "; the other ranks were stopped because of it" if world_size > 1 else ""
    return (
        f"rank {rank} of {world_size} (process {failure.pid}) {ended}"
        f"{': ' + words if words else ', what it wrote stands above'}{others}"
    )


def _run_agent(arguments: list[str], *, world_size: int) -> int:
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        torchrun.run(torchrun.parse_args(arguments))
    except ChildFailedError as error:
        rank = first_to_fail(error.failures)
        code = error.failures[rank].exitcode
        print(f"planner: {_epitaph(rank, world_size, error.failures[rank])}", file=sys.stderr)
        return code if code > 0 else 128 - code
    except SignalException as error:
        print(f"planner: stopped by {signal.Signals(error.sigval).name}, with all processes", file=sys.stderr)
        return 128 + error.sigval
    return 0
