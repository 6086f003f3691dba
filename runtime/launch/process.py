"""``planner.init``: one line that joins a process to its peers."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from runtime.launch.place import LaunchError, ProcessPlace, find_place
from runtime.launch.rendezvous import Deadline, agree_on_meeting, check_in, open_store

#: How often this process has joined a group: each time its peers meet under other names at the store that rank 0 keeps.
_joined = 0


@dataclass(frozen=True)
class Process:
    """This process among its peers. ``device`` is where its tensors live; ``local_rank`` counts those of one host."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device


def init(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    address: str | None = None,
    port: int | None = None,
    local_rank: int | None = None,
    device: str | None = None,
    backend: str | None = None,
    timeout: float = 300.0,
    collective_timeout: float = 1800.0,
) -> Process:
    """Join the default process group, as the arguments say, else torchrun's environment, else SLURM's, else alone.

    Call it on every process. If the group is already there, it only says who this process is: on a GPU
    (its own, by local rank) if NCCL runs the group's collectives, else on the CPU. A group that it made is left when
    the script ends well.

    Args:
        rank: number of this process, 0 to ``world_size`` − 1.
        world_size: how many processes there are.
        address: host name of rank 0, at which the others reach it.
        port: where rank 0 listens; default 29500 (SLURM: by job number).
        local_rank: number of this process on its host: the GPU it takes.
        device: ``"cuda"`` or ``"cpu"``; default: a GPU if there is one.
        backend: of ``torch.distributed``; default ``nccl`` for cuda, ``gloo`` for cpu.
        timeout: seconds within which all must have come.
        collective_timeout: seconds that a collective waits for a peer later on.

    Raises:
        ValueError: if arguments or variables are missing or contradict each other, or there is no such GPU.
        LaunchError: if a peer is missing or cannot be reached within ``timeout``, the port is taken, ranks occur twice
            or world sizes differ; the message says which ranks.
    """
    for name, seconds in (("timeout", timeout), ("collective_timeout", collective_timeout)):
        if not 0 < seconds < float("inf"):
            raise ValueError(f"{name} must be a positive number of seconds, got {seconds!r}")
    if dist.is_initialized():
        return _present(rank, world_size, local_rank, device)
    place = find_place(os.environ, rank=rank, world_size=world_size, local_rank=local_rank, address=address, port=port)
    chosen = _choose_device(place, device)
    backend = backend or {"cuda": "nccl"}.get(chosen.type, "gloo")
    if place.world_size == 1:
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=_span(collective_timeout)
        )
    else:
        _join(place, chosen, backend, timeout, collective_timeout)
    leave_at_exit()
    return Process(place.rank, place.world_size, _local_rank(place), chosen)


def leave_at_exit() -> None:
    """Let this process leave its groups when it ends, whoever made them; once, however often it joins one."""
    atexit.unregister(_leave)
    atexit.register(_leave)


def _leave() -> None:
    """Leave the group before the interpreter is taken down, unless it is by an error: then a peer may never answer.

    Threads of the group keep the tensors of the last collectives for a moment longer. torch aborts the process when one
    of them lets go of such a tensor while the interpreter ends (pytorch/pytorch issue 190489).
    """
    if dist.is_initialized() and getattr(sys, "last_value", None) is None:
        with suppress(RuntimeError):  # peers may be gone
            dist.destroy_process_group()


def init_in_round(
    store: dist.Store, *, rank: int, world_size: int, local_rank: int, timeout: float, collective_timeout: float
) -> Process:
    """Join the group of those that have met at ``store``, in the place of ``init``, as often as they meet anew.

    Args:
        timeout: seconds within which all must connect, who are known to be there.

    Raises:
        RuntimeError: if one of them is gone.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    place = ProcessPlace(rank, world_size, local_rank, "", 1, "arguments")
    device = _choose_device(place, None)
    dist.init_process_group(
        {"cuda": "nccl"}.get(device.type, "gloo"), store=store, rank=rank, world_size=world_size, timeout=_span(timeout)
    )
    leave_at_exit()
    dist.all_reduce(torch.zeros(1, device=device))
    from runtime.torch_compat.process_groups import set_group_timeout

    set_group_timeout(_span(collective_timeout))
    return Process(rank, world_size, local_rank, device)


def _present(rank: int | None, world_size: int | None, local_rank: int | None, device: str | None) -> Process:
    """Who this process is in the group that it has joined before."""
    leave_at_exit()
    actual = dist.get_rank(), dist.get_world_size()
    for name, asked, present in (("rank", rank, actual[0]), ("world_size", world_size, actual[1])):
        if asked is not None and asked != present:
            raise ValueError(
                f"the process group is there already, with {name} {present}; {name}={asked} contradicts it"
            )
    place = ProcessPlace(*actual, local_rank, "", 1, "arguments")
    if local_rank is None and "LOCAL_RANK" in os.environ:
        place = ProcessPlace(*actual, int(os.environ["LOCAL_RANK"]), "", 1, "arguments")
    from runtime.torch_compat.process_groups import device_type_of_default_group

    kind = device or device_type_of_default_group()
    return Process(*actual, _local_rank(place), _own_gpu(place) if kind == "cuda" else torch.device(kind))


def _own_gpu(place: ProcessPlace) -> torch.device:
    """The GPU that this process was given by ``torch.cuda.set_device``, else that of its local rank."""
    index = torch.cuda.current_device()
    if index == 0 and _local_rank(place) < torch.cuda.device_count():
        # Nobody chose one, or the first: all of a host's processes would share it.
        index = _local_rank(place)
        torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _choose_device(place: ProcessPlace, device: str | None) -> torch.device:
    if device not in (None, "cuda", "cpu"):
        raise ValueError(f"device must be 'cuda' or 'cpu' (the GPU is chosen by local_rank), got {device!r}")
    count = torch.cuda.device_count() if device != "cpu" else 0
    if count == 0:
        if device == "cuda":
            raise ValueError("device='cuda', but this process sees no GPU")
        return torch.device("cpu")
    index = _local_rank(place)
    if count == 1 and place.source == "slurm":
        index = 0  # SLURM may show each task only its own GPU
    if index >= count:
        raise ValueError(
            f"local rank {index} has no GPU of its own: this host shows {count}; start at most {count} processes a "
            "host, or pass device='cpu'"
        )
    torch.cuda.set_device(index)
    from runtime.torch_compat.allocator import grow_segments

    grow_segments()
    return torch.device("cuda", index)


def _local_rank(place: ProcessPlace) -> int:
    if place.local_rank is not None:
        return place.local_rank
    return place.rank % max(1, torch.cuda.device_count())


def _join(place: ProcessPlace, device: torch.device, backend: str, timeout: float, collective_timeout: float) -> None:
    global _joined
    assert place.address is not None and place.port is not None
    deadline = Deadline.after(timeout)
    # torchrun's agent keeps the store itself, over restarts of its workers.
    by_agent = place.source == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = open_store(
        place.address,
        place.port,
        keeps=place.rank == 0 and not by_agent,
        waiting=f"rank {place.rank} of {place.world_size}",
        keeper="the launcher" if by_agent else "rank 0",
        deadline=deadline,
    )
    _joined += 1
    meeting = agree_on_meeting(store, place, deadline) if by_agent else f"meshwright/joined/{_joined}"
    check_in(dist.PrefixStore(f"{meeting}/check-in", store), place, deadline)
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"{meeting}/group", store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=_span(timeout),  # anew: a last rank that came late must not leave the others no time
        )
        # Connections are made by the first collective, if not before: better now than in the middle of training.
        dist.all_reduce(torch.zeros(1, device=device))
    except RuntimeError as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        raise LaunchError(
            f"rank {place.rank} of {place.world_size}: all ranks checked in at {place.address}:{place.port}, but could "
            f"not connect to one another by {backend} within {timeout:g} s; hosts must reach each other at any port "
            f"(GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME name the network interface): {error}"
        ) from error
    from runtime.torch_compat.process_groups import (
        set_group_timeout,  # takes seconds, which a start that fails does not need
    )

    set_group_timeout(_span(collective_timeout))


def _span(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)
