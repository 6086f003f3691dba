"""The ranks that replan together, and what those at work tell those that join."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from passes.plan import Plan
from runtime import ops
from runtime.agreement.ranks_together import Ranks, num_ranks, rank_in
from runtime.calls.frozen_prefix import AFTER, take_frozen_outputs
from runtime.calls.model_call import ModelCall
from runtime.execution.engine import Engine
from runtime.execution.rank_mapping import RankPlaces
from runtime.launch.groups import mesh_of_axes
from runtime.migration.state_entries import RankState

Told = TypeVar("Told")


@runtime_checkable
class Stateful(Protocol):
    """What is the same on all ranks and goes on: a schedule, a ``planner.DataLoader``, an object of yours."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


@dataclass(frozen=True)
class Meeting:
    """Ranks that replan together.

    Attributes:
        ranks: all of them.
        group: the same, for what moves; None for a rank alone.
        device: of what moves.
        chosen: numbers of those that the target is laid over; None where the present ones stay at work.
    """

    ranks: Ranks
    group: dist.ProcessGroup | None
    device: torch.device
    chosen: tuple[int, ...] | None = None

    @property
    def is_at_work(self) -> bool:
        """Whether this rank has a part in the new plan."""
        return self.chosen is None or rank_in() in self.chosen

    def told_by(self, teller: int, value: Told) -> Told:
        """``value`` as the rank at that place of the meeting has it, on all."""
        message: list[Any] = [value]
        if self.ranks.group is not None:
            dist.broadcast_object_list(message, group=self.ranks.group, group_src=teller)
        told: Told = message[0]
        return told


def chosen_ranks(target: Any, num_devices: int, ranks: Sequence[int] | None) -> tuple[int, ...]:
    """The ranks that a target is laid over.

    Args:
        num_devices: of ``target``.
        ranks: None: those of a device mesh, else the first of the job.

    Raises:
        ValueError: for ranks that are not among the job's, are not evenly spaced, or are not the device mesh's.
    """
    chosen = tuple(range(num_devices)) if ranks is None else tuple(ranks)
    if isinstance(target, DeviceMesh):
        of_mesh = tuple(target.mesh.flatten().tolist())
        if ranks is not None and chosen != of_mesh:
            raise ValueError(f"ranks={list(chosen)}, but the device mesh is of ranks {list(of_mesh)}: drop ranks")
        chosen = of_mesh
    world = num_ranks()
    if len(set(chosen)) != len(chosen) or not set(chosen) <= set(range(world)):
        raise ValueError(
            f"the target is for ranks {list(chosen)}, but the job has ranks 0 to {world - 1}, each of which may be "
            "named once: choose another target, or other ranks"
        )
    if ranks is not None and not _is_evenly_spaced(chosen):
        raise ValueError(f"ranks={list(chosen)}: name them in ascending order, each as far from the one before it")
    return chosen


def _is_evenly_spaced(numbers: Sequence[int]) -> bool:
    """What spmd_types takes for an axis."""
    distances = {second - first for first, second in itertools.pairwise(numbers)}
    return len(distances) <= 1 and all(distance > 0 for distance in distances)


def stays_at_work(engine: Engine, target: Any, chosen: Sequence[int]) -> bool:
    """Whether the ranks at work are those of the target, too, so that nobody else takes part."""
    places = engine.places
    assert isinstance(places, RankPlaces)
    in_order = isinstance(target, DeviceMesh) or list(chosen) == list(range(num_ranks()))
    return not engine.waits and in_order and sorted(chosen) == sorted(places.device_mesh.mesh.flatten().tolist())


def present_meeting(engine: Engine) -> Meeting:
    """Of the ranks at work, which stay so."""
    places = engine.places
    assert isinstance(places, RankPlaces)
    return Meeting(engine.ranks, places.everyone, places.layout.device)


def meeting_of_job(engine: Engine, chosen: tuple[int, ...]) -> Meeting:
    """Of all ranks of the job; ``chosen`` will be at work."""
    device = engine.places.layout.device
    everyone = mesh_of_axes(device.type, torch.arange(num_ranks(), device="cpu"), ("ranks",))
    return Meeting(Ranks.of(everyone), everyone.get_group() if num_ranks() > 1 else None, device, chosen)


@dataclass(frozen=True)
class Facts:
    """What a rank at work tells the others: all but tensors of the state of training.

    Attributes:
        plan: the present one.
        trains: whether each parameter is trained from now on.
        example: a call with a global batch, without data.
        buffers: whole, as programs were traced with them.
        modes: of all submodules, whether they are in training mode.
        random_state: of the programs.
        carried: the states of what the user hands over.
    """

    plan: Plan | None
    trains: Mapping[str, bool]
    example: ModelCall | None
    buffers: Mapping[str, torch.Tensor]
    modes: Mapping[str, bool]
    random_state: Any
    carried: tuple[Any, ...]

    @staticmethod
    def of(engine: Engine, trains: Mapping[str, bool], carried: Sequence[Stateful]) -> Facts:
        return Facts(
            engine.plan,
            dict(trains),
            engine.example,
            {name: buffer.cpu() for name, buffer in engine.buffer_values.items()},
            {path: module.training for path, module in engine.model.named_modules()},
            ops.get_random_state(),
            tuple(copy.deepcopy(one.state_dict()) for one in carried),
        )

    def take_up(self, engine: Engine, carried: Sequence[Stateful]) -> None:
        """Let a rank that was without work go on where the others are; ``engine`` is its old one."""
        for path, module in engine.model.named_modules():
            module.training = self.modes[path]
        if self.example is not None and AFTER in self.example.kwargs:
            take_frozen_outputs(engine.model)
        ops.set_random_state(self.random_state)
        for one, state in zip(carried, self.carried, strict=True):
            one.load_state_dict(state)


@dataclass(frozen=True)
class SavedState:
    """What a rank has of the state of training at a moment, and what it knows."""

    rank: RankState
    facts: Facts
