"""Ranks that fail together, and ranks that do the same: an error that one of them finds is raised on all.

A rank that raised alone would leave the others waiting in a collective; one that did something else would mix its
tensors with theirs.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from runtime.launch.groups import flattened_group, shared_group
from runtime.launch.rendezvous import ranks as listed
from runtime.torch_compat.dispatcher import without_dispatch_modes

Result = TypeVar("Result")


def num_ranks(group: dist.ProcessGroup | None = None) -> int:
    """Ranks of ``group`` (None: of all); 1 without a process group."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def rank_in(group: dist.ProcessGroup | None = None) -> int:
    """This rank's number in ``group`` (None: in all); 0 without a process group."""
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0


def gathered(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """``value`` of every rank, in their order, on every rank."""
    values: list[Any] = [value] * num_ranks(group)
    if len(values) > 1:
        with without_dispatch_modes():
            dist.all_gather_object(values, value, group=group)
    return values


def together(function: Callable[[], Result], group: dist.ProcessGroup | None = None) -> Result:
    """``function()`` on every rank; what it raises on one of them ends it on all.

    Raises:
        ValueError: on every rank, with the message of the first that failed; a rank that met another error than a
            ValueError or an OSError raises that.
    """
    result, error = None, None
    try:
        result = function()
    except Exception as problem:
        error = problem
    messages = gathered(None if error is None else str(error), group)
    if isinstance(error, OSError):
        raise ValueError(str(error)) from error
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise ValueError(f"rank {rank}: {message}")
    return result  # type: ignore[return-value]


class Ranks:
    """Ranks that must do the same.

    Args:
        group: of them, with a backend that sends from the CPU; None for a rank alone.
        run_ahead: whether a rank may begin what others have yet to agree to: where the model's collectives wait on a
            device, so that this process goes on to hear what the others say.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, run_ahead: bool = False) -> None:
        self.run_ahead = run_ahead
        self.group = group if num_ranks(group) > 1 and dist.get_backend(group) != "fake" else None
        #: Their numbers among all processes.
        self.numbers = tuple(dist.get_process_group_ranks(self.group)) if self.group is not None else (0,)

    @classmethod
    def of(cls, device_mesh: DeviceMesh) -> Ranks:
        """The ranks of a mesh, all of which must call this."""
        if device_mesh.mesh.numel() == 1 or dist.get_backend() == "fake":
            return cls(None)
        group = _everyone(device_mesh)
        if "gloo" not in str(dist.get_backend_config(group)):
            numbers = sorted(dist.get_process_group_ranks(group))
            group = shared_group("agreement", numbers, backend="gloo")
        return cls(group, run_ahead=device_mesh.device_type != "cpu")

    @property
    def is_alone(self) -> bool:
        return self.group is None

    def gathered(self, value: Any) -> list[Any]:
        """See ``gathered``."""
        return [value] if self.group is None else gathered(value, self.group)

    def together(self, function: Callable[[], Result]) -> Result:
        """See ``together``."""
        return function() if self.group is None else together(function, self.group)

    def check_alike(self, facts: Mapping[str, str]) -> None:
        """Compare texts over the ranks; ``facts`` are by what they say, with the same names on all ranks.

        Raises:
            ValueError: on every rank, if they differ: which ranks, in what, and the first line that is not the same.
        """
        if self.group is None:
            return
        digests = self.gathered({name: hashlib.sha256(text.encode()).hexdigest() for name, text in facts.items()})
        for name in facts:
            apart = [place for place, rank_digests in enumerate(digests) if rank_digests.get(name) != digests[0][name]]
            if apart:
                texts = self.gathered(facts[name])
                here, there = _first_difference(texts[0], texts[apart[0]])
                raise ValueError(
                    f"{self.names(apart)} and {self.names([0])} differ in {name}: {there} on {self.names(apart[:1])}, "
                    f"{here} on {self.names([0])}; every rank must run the same script with the same arguments"
                )

    def names(self, places: Sequence[int]) -> str:
        """``ranks 1-3`` for places in this group."""
        return listed(self.numbers[place] for place in places)


def _everyone(device_mesh: DeviceMesh) -> dist.ProcessGroup:
    if device_mesh.mesh.flatten().tolist() == list(range(dist.get_world_size())):
        world: dist.ProcessGroup = dist.group.WORLD  # type: ignore[assignment]
        return world
    return device_mesh.get_group() if device_mesh.mesh.ndim == 1 else flattened_group(device_mesh, "ranks")


def _first_difference(first: str, second: str) -> tuple[str, str]:
    """The first lines of two texts that are not the same."""
    for one, other in itertools.zip_longest(first.splitlines(), second.splitlines(), fillvalue="nothing"):
        if one != other:
            return _shortened(one), _shortened(other)
    return _shortened(first), _shortened(second)


def _shortened(line: str, *, length: int = 200) -> str:
    line = line.strip().rstrip(",")
    return line if len(line) <= length else f"{line[:length]}…"
