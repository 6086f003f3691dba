"""Where a process stands among all, as arguments, torchrun's environment or SLURM's say."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

DEFAULT_PORT = 29500
#: Ports of SLURM jobs, by job number: below the ones that systems give to outgoing connections.
_SLURM_PORTS = range(15000, 32000)

_SLURM_NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_SLURM_SIZES = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")


class LaunchError(RuntimeError):
    """Processes did not find each other in time; the message says who waited for whom, where, and what was seen."""


@dataclass(frozen=True)
class ProcessPlace:
    """One process among ``world_size``. ``address`` and ``port`` are rank 0's; None (of both) if it is alone.

    ``local_rank`` counts the processes of one host; None if nothing says it. ``source``: what said all this.
    """

    rank: int
    world_size: int
    local_rank: int | None
    address: str | None
    port: int | None
    source: Literal["arguments", "torchrun", "slurm", "alone"]

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank must be in 0..world_size-1, got rank {self.rank} of world size {self.world_size} "
                f"(from {self.source})"
            )
        if self.port is not None and not 0 < self.port < 2**16:
            raise ValueError(f"a port is in 1..65535, got {self.port}")
        if self.world_size > 1 and (self.address is None or self.port is None):
            raise ValueError(f"{self.world_size} processes need the address and port of rank 0 (from {self.source})")


def find_place(
    environment: Mapping[str, str],
    *,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    address: str | None = None,
    port: int | None = None,
) -> ProcessPlace:
    """This process's place: the arguments, else torchrun's environment, else SLURM's, else alone.

    ``local_rank``, ``address`` and ``port`` also replace what an environment says.

    Raises:
        ValueError: if an argument or variable is missing or is not a number, or they contradict each other.
    """
    if rank is not None or world_size is not None:
        return _from_arguments(rank, world_size, local_rank, address, port)
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return _from_torchrun(environment, local_rank, address, port)
    if "SLURM_PROCID" in environment and any(name in environment for name in _SLURM_SIZES):
        return _from_slurm(environment, local_rank, address, port)
    if address is not None:
        raise ValueError(
            f"address={address!r} is given, but neither arguments nor the environment say rank and world_size"
        )
    return ProcessPlace(0, 1, local_rank or 0, None, None, "alone")


def _from_arguments(
    rank: int | None, world_size: int | None, local_rank: int | None, address: str | None, port: int | None
) -> ProcessPlace:
    if rank is None or world_size is None:
        raise ValueError(f"rank and world_size belong together, got rank={rank}, world_size={world_size}")
    if world_size > 1 and address is None:
        raise ValueError(f"{world_size} processes need address=, the host name of rank 0 (on one host: '127.0.0.1')")
    return ProcessPlace(rank, world_size, local_rank, address, port or DEFAULT_PORT, "arguments")


def _from_torchrun(
    environment: Mapping[str, str], local_rank: int | None, address: str | None, port: int | None
) -> ProcessPlace:
    rank, world_size = (_number(environment, name) for name in ("RANK", "WORLD_SIZE"))
    address = address or environment.get("MASTER_ADDR")
    if port is None and "MASTER_PORT" in environment:
        port = _number(environment, "MASTER_PORT")
    missing = [name for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)) if value is None]
    if missing and world_size > 1:
        raise ValueError(
            f"RANK={rank} and WORLD_SIZE={world_size} are set, but not {' and '.join(missing)}: start with torchrun or "
            "'planner run', or pass address= and port="
        )
    if local_rank is None and "LOCAL_RANK" in environment:
        local_rank = _number(environment, "LOCAL_RANK")
    return ProcessPlace(rank, world_size, local_rank, address, port, "torchrun")


def _from_slurm(
    environment: Mapping[str, str], local_rank: int | None, address: str | None, port: int | None
) -> ProcessPlace:
    rank = _number(environment, "SLURM_PROCID")
    world_size = _number(environment, next(name for name in _SLURM_SIZES if name in environment))
    address = address or environment.get("MASTER_ADDR")
    nodes = next((environment[name] for name in _SLURM_NODES if environment.get(name)), None)
    if address is None and nodes is not None:
        address = expand_hosts(nodes)[0]
    if address is None and world_size > 1:
        raise ValueError(f"SLURM_PROCID is set, but none of {', '.join(_SLURM_NODES)}: pass address=")
    if port is None:
        port = _number(environment, "MASTER_PORT") if "MASTER_PORT" in environment else _slurm_port(environment)
    if local_rank is None and "SLURM_LOCALID" in environment:
        local_rank = _number(environment, "SLURM_LOCALID")
    return ProcessPlace(rank, world_size, local_rank, address, port, "slurm")


def _slurm_port(environment: Mapping[str, str]) -> int:
    """The same on all processes of a step, and another one for the job's other steps."""
    step = environment.get("SLURM_STEP_ID", "")
    number = _number(environment, "SLURM_JOB_ID") if "SLURM_JOB_ID" in environment else 0
    return _SLURM_PORTS[(number + (int(step) if step.isdecimal() else 0)) % len(_SLURM_PORTS)]


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name)
    if text is None:
        raise ValueError(f"the environment variable {name} is not set, though those beside it are")
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"the environment variable {name} must be a whole number, got {text!r}") from None


def expand_hosts(text: str) -> list[str]:
    """Host names of a list as SLURM writes it: ``"node[01-03,07],gpu5"`` is node01, node02, node03, node07, gpu5.

    Raises:
        ValueError: if it is no such list.
    """
    if not re.fullmatch(r"(?:[^\[\],\s]|\[[^\[\]\s]*\])+(?:,(?:[^\[\],\s]|\[[^\[\]\s]*\])+)*", text):
        raise ValueError(f"a list of hosts looks like node[01-03,07],gpu5, got {text!r}")
    hosts: list[str] = []
    for name in re.findall(r"(?:[^\[\],]|\[[^\]]*\])+", text):
        pieces = re.findall(r"\[[^\]]*\]|[^\[\]]+", name)
        choices = [_numbers(piece[1:-1], text) if piece.startswith("[") else [piece] for piece in pieces]
        hosts += ["".join(chosen) for chosen in itertools.product(*choices)]
    return hosts


def _numbers(ranges: str, text: str) -> list[str]:
    """``"01-03,07"`` as 01, 02, 03, 07: as wide as they are written."""
    names: list[str] = []
    for piece in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", piece)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(last) < int(first):
            raise ValueError(f"{piece!r} is no range of numbers (01-03) in the list of hosts {text!r}")
        names += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return names
