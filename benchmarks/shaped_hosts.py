"""Hosts joined by a shaped link, on one machine: two network namespaces, processes in each, shares of its processors.

As root, on Linux. A veth pair joins the namespaces and ``tc`` (tbf) limits both of its ends; processes of one namespace
talk over the loopback, which nothing limits. Shares of processors are control groups (version 1).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Of the first host: no other process is in a new namespace.
PORT = 29611
NUM_HOSTS = 2
#: What holds control groups of processors.
GROUPS = Path("/sys/fs/cgroup/cpu")
#: Seconds in which a group has its share: so short that a process that waits for another does not wait for much of it.
PERIOD = 10e-3


@dataclass(frozen=True)
class ShapedHost:
    """A network namespace, its end of the link, and its address there."""

    namespace: str
    device: str
    address: str


@contextmanager
def shaped_hosts(mbit: float, *, queue_ms: float = 50.0) -> Iterator[list[ShapedHost]]:
    """Two hosts that one link of so many Mbit/s in each direction joins, whose queue drops what waits longer."""
    mark = f"{os.getpid() % 0x10000:x}"
    hosts = [ShapedHost(f"mw{mark}n{each}", f"mw{mark}v{each}", f"10.77.0.{each + 1}") for each in range(NUM_HOSTS)]
    try:
        for host in hosts:
            _run("ip", "netns", "add", host.namespace)
        first, second = hosts
        pair = ("type", "veth", "peer", "name", second.device, "netns", second.namespace)
        _run("ip", "link", "add", first.device, "netns", first.namespace, *pair)
        for host in hosts:
            inside = ("ip", "netns", "exec", host.namespace)
            _run(*inside, "ip", "address", "add", f"{host.address}/24", "dev", host.device)
            for each in ("lo", host.device):
                _run(*inside, "ip", "link", "set", each, "up")
            limit = ("rate", f"{mbit}mbit", "burst", "128kb", "latency", f"{queue_ms}ms")
            _run(*inside, "tc", "qdisc", "add", "dev", host.device, "root", "tbf", *limit)
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "delete", host.namespace], check=False, capture_output=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


@contextmanager
def processor_shares(shares: Sequence[float]) -> Iterator[list[Path]]:
    """A control group for each rank with its share of a processor; removed at the end.

    Raises:
        SystemExit: if the system has no such groups.
    """
    if not (GROUPS / "cpu.cfs_quota_us").exists():
        raise SystemExit(f"{GROUPS} has no quotas: this needs control groups of version 1, and root")
    paths = [GROUPS / f"meshwright-{os.getpid()}-{rank}" for rank in range(len(shares))]
    for path, share in zip(paths, shares):
        path.mkdir()
        (path / "cpu.cfs_period_us").write_text(str(round(PERIOD * 1e6)))
        (path / "cpu.cfs_quota_us").write_text(str(round(share * PERIOD * 1e6)))
    try:
        yield paths
    finally:
        for path in paths:
            path.rmdir()


@contextmanager
def divided_processors(num_ranks: int) -> Iterator[list[Path]]:
    """A control group for each rank with an equal part of one of this machine's processors, whatever the others do.

    The ranks of a processor have equal weights. What a rank leaves while it waits goes to an idle loop in its own
    group and not to another rank; a quota instead would let a rank that has waited run faster than its share.

    Raises:
        SystemExit: if the system has no such groups.
    """
    if not (GROUPS / "cpu.shares").exists():
        raise SystemExit(f"{GROUPS} has no weights: this needs control groups of version 1, and root")
    processors = sorted(os.sched_getaffinity(0))
    paths = [GROUPS / f"meshwright-{os.getpid()}-{rank}" for rank in range(num_ranks)]
    loops = []
    try:
        for rank, path in enumerate(paths):
            path.mkdir()
            loops.append(subprocess.Popen([sys.executable, "-c", _IDLE_LOOP, str(os.getpid())]))
            os.sched_setaffinity(loops[-1].pid, {processors[rank % len(processors)]})
            (path / "cgroup.procs").write_text(str(loops[-1].pid))
        yield paths
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
        for path in paths:
            path.rmdir()


#: Ends with the process that started it.
_IDLE_LOOP = """
import os, sys
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while os.getppid() == int(sys.argv[1]):
    for _ in range(1_000_000):
        pass
"""


def run_on_hosts(
    hosts: Sequence[ShapedHost], *module: str, per_host: int = 1, groups: Sequence[Path] | None = None
) -> None:
    """Run a module with its arguments on so many ranks of every host, each in its control group if there are any.

    Raises:
        RuntimeError: if a rank fails.
    """
    world_size = per_host * len(hosts)
    processes = []
    for rank in range(world_size):
        host = hosts[rank // per_host]
        environment = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank % per_host),
            "LOCAL_WORLD_SIZE": str(per_host), "MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": host.device, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        command = ["ip", "netns", "exec", host.namespace, sys.executable, "-m", *module]
        if groups is not None:
            processors = sorted(os.sched_getaffinity(0))
            pinned = ["taskset", "-c", str(processors[rank % len(processors)]), *command]
            command = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(groups[rank] / "cgroup.procs"), *pinned]
        processes.append(subprocess.Popen(command, env=environment, cwd=ROOT))
    codes = [process.wait() for process in processes]
    if any(codes):
        raise RuntimeError(f"the ranks of {module[0]} ended with {codes}")
