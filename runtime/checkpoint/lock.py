"""One job at a time writes into a directory of checkpoints: two would remove each other's.

The lock is the kernel's own (``fcntl``), on the file ``.lock``: it ends with the process that has it, whatever ends
that, and holds between hosts on file systems that share locks (NFS, CephFS, GPFS, Lustre mounted with ``flock``). What
stands in the file says whose it is, and decides where the file system has no locks or keeps them to each host.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import json
import os
import secrets
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from cost_models.text import printable

NAME = ".lock"
#: Error numbers of file systems without locks.
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
#: File systems whose locks may hold on one host alone.
_LOCAL_LOCKS = ("fuse", "9p", "virtiofs", "lustre")
#: Environment variables that name a job, the same when it is started again on other hosts.
_JOB = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "TORCHELASTIC_RUN_ID")

#: Locks of this process, by the directory's real path: (process, descriptor, token). The kernel's locks are a
#: process's, whatever opened the file, and end when it closes the file even once: so each is opened once.
_locks: dict[str, tuple[int, int, str]] = {}


def lock(directory: Path) -> None:
    """Make this process the one that writes into ``directory``, until it ends; doing so again changes nothing.

    Raises:
        ValueError: if another process has it, saying which, and what to do if it is gone.
    """
    path = os.path.realpath(directory)
    file = directory / NAME
    lock_of_path = _locks.get(path)
    if lock_of_path is not None and lock_of_path[0] == os.getpid():
        if _is_still_ours(file, lock_of_path[1], lock_of_path[2]):
            return
        os.close(_locks.pop(path)[1])
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        _take(file, descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise


def _take(file: Path, descriptor: int, path: str) -> None:
    owner = _read(descriptor)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        reliable = not _is_local(path) or _same_host(owner)
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise _in_use(file, _read(descriptor)) from error
        reliable = False
    if not reliable and _may_be_alive(owner):
        raise _in_use(file, owner)
    token = secrets.token_hex(8)
    process = {"host": socket.gethostname(), "pid": os.getpid(), "started": _started(os.getpid()), "job": _job()}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps({**process, "token": token}).encode(), 0)
    os.fsync(descriptor)
    _locks[path] = (os.getpid(), descriptor, token)


def _in_use(file: Path, owner: Mapping[str, Any]) -> ValueError:
    who = f"process {owner.get('pid', '?')} on {printable(str(owner.get('host', 'another host')))[:80]}"
    return ValueError(
        f"{file.parent} is in use: {who} saves its checkpoints there. Give each job a directory of its own; if that "
        f"process is gone for certain, remove {file}"
    )


def _is_still_ours(file: Path, descriptor: int, token: str) -> bool:
    """Whether nobody has removed the file, or taken it over. It is not opened again: closing it would end the lock."""
    try:
        return os.path.samestat(os.stat(file), os.fstat(descriptor)) and _read(descriptor).get("token") == token
    except OSError:
        return False


def _read(descriptor: int) -> dict[str, Any]:
    """The file's content; an empty dict if it is empty or damaged."""
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0))
        return owner if isinstance(owner, dict) else {}
    except (ValueError, RecursionError):
        return {}


def _may_be_alive(owner: Mapping[str, Any]) -> bool:
    """Whether the process that a file names may still run: known on its own host alone, or if it was this job's."""
    if not owner or (owner.get("job") and owner["job"] == _job()):
        return False
    if not _same_host(owner):
        return True
    pid = owner.get("pid")
    return isinstance(pid, int) and pid > 0 and pid != os.getpid() and _started(pid) == owner.get("started") != ""


def _same_host(owner: Mapping[str, Any]) -> bool:
    return not owner or owner.get("host") == socket.gethostname()


def _started(pid: int) -> str:
    """When a process started, in ticks: tells it from a later one of the same number. Empty: it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _job() -> str:
    return next((f"{name}={os.environ[name]}" for name in _JOB if os.environ.get(name) not in (None, "", "none")), "")


def _is_local(path: str) -> bool:
    """Whether locks of the file system of ``path`` may hold on this host alone."""
    best, kind, options = "", "", ""
    with suppress(OSError), open("/proc/self/mounts", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            _, place, name, choices, *_ = line.split(" ")
            inside = place == "/" or path == place or path.startswith(f"{place}/")
            if inside and len(place) >= len(best):
                best, kind, options = place, name, choices
    if kind == "lustre":
        return "flock" not in options.split(",")
    return kind.startswith(_LOCAL_LOCKS)


@atexit.register
def _release() -> None:
    """Empty the files of this process, so that other hosts see that it is gone, too."""
    for pid, descriptor, _ in _locks.values():
        if pid == os.getpid():
            with suppress(OSError):
                os.ftruncate(descriptor, 0)
