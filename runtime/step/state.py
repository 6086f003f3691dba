"""The parameters and buffers of a step: what this rank owns, under the original names, and the units that use them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from passes.ir.types import Placement, R, local_shape
from passes.plan import Plan
from passes.stages import StepPrograms
from passes.stages.build import DATA_AXES
from runtime.initialise import initialised_tensors, still_on_meta
from runtime.owned import Owned, is_first_holder, rectangle, torch_placements
from runtime.step.places import Places, Rectangle, RectangleOf, VirtualPlaces
from runtime.units.group import DataGroup, sum_over
from runtime.units.pieces import piece_dim, piece_of
from runtime.units.precision import Dtypes, Precision
from runtime.weights import Weights


@dataclass(frozen=True)
class StateInfo:
    """One tensor of the model as a step holds it.

    Attributes:
        names: its names in the model, the one that programs use first.
        dtype, owner_dtype, gradient_dtype: that it computes in, that this rank keeps, that gradients are added up in.
        placement: on the programs' mesh, whole on the data axes.
        used: whether any program uses it.
        sharded: whether each data rank owns a piece of it only (ZeRO 1 to 3; without dims there are no pieces).
        stages: pipeline ranks that have it, in order.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    owner_dtype: torch.dtype
    gradient_dtype: torch.dtype
    placement: Placement
    is_parameter: bool
    trainable: bool
    persistent: bool
    sharded: bool
    used: bool
    stages: tuple[int, ...]


class StepState:
    """Everything that a rank owns in a step.

    Attributes:
        weights: the tree of what this rank owns, under the original names.
        infos: of every tensor of the model, by each of its names.
        version: counts how often tensors were replaced.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        programs: StepPrograms,
        places: Places,
        *,
        precision: Precision,
    ) -> None:
        self.places = places
        self.version = 0
        self.state_names = list(model.state_dict().keys())
        self.infos: dict[str, StateInfo] = {}
        self.weights = Weights()
        self.weights.train(model.training)
        stages = stages_of(plan, programs)
        sharded = sharded_paths(programs)
        distinct = _distinct(model)
        for (names, tensor), whole in zip(distinct.items(), places.from_first(distinct.values())):
            info = self._info(names, tensor, plan, stages, sharded, precision)
            self.infos.update(dict.fromkeys(info.names, info))
            if places.stage is None or places.stage in info.stages:
                self._put(info, self._cut(info, whole.detach()))

    def _info(
        self,
        names: tuple[str, ...],
        tensor: torch.Tensor,
        plan: Plan,
        stages: Mapping[str, tuple[int, ...]],
        sharded: frozenset[str],
        precision: Precision,
    ) -> StateInfo:
        known = next((name for name in names if name in plan.states), names[0])
        planned = plan.states.get(known)
        placement = tuple(planned.placement) if planned is not None else (R,) * len(plan.mesh.names)
        dtypes = precision.of(tensor.dtype)
        if planned is not None and tensor.is_floating_point() and isinstance(tensor, nn.Parameter):
            # A plan that computes in another dtype than the model's: the model's own is the master.
            compute = getattr(torch, planned.dtype)
            if compute != tensor.dtype:
                dtypes = Dtypes(compute, tensor.dtype, precision.of(compute).gradient)
        trains = isinstance(tensor, nn.Parameter) and tensor.requires_grad
        return StateInfo(
            names=(known, *(name for name in names if name != known)),
            shape=tuple(tensor.shape),
            dtype=dtypes.compute if isinstance(tensor, nn.Parameter) else tensor.dtype,
            owner_dtype=dtypes.master if trains else dtypes.compute,
            gradient_dtype=dtypes.gradient,
            placement=tuple(R if axis in DATA_AXES else where for axis, where in zip(plan.mesh.names, placement)),
            is_parameter=isinstance(tensor, nn.Parameter),
            trainable=trains,
            persistent=any(name in self.state_names for name in names),
            sharded=trains and known in sharded and self.places.data_size > 1 and tensor.dim() > 0,
            used=known in stages,
            # What no program uses is kept by the first stage, so that it is not lost from checkpoints.
            stages=stages.get(known, (0,)),
        )

    def rectangle(self, info: StateInfo) -> RectangleOf:
        """Which part of a tensor the rank at a coordinate owns."""
        mesh = self.places.layout.mesh

        def part(coordinate: tuple[int, ...]) -> Rectangle:
            offsets, sizes = rectangle(info.shape, info.placement, mesh, coordinate)
            primary = is_first_holder(info.placement, coordinate)
            if not info.sharded:
                return Rectangle(offsets, sizes, primary)
            dim, offset, length = piece_of(sizes, self.places.data_size, self._data_rank(coordinate))
            moved = tuple(o + offset if d == dim else o for d, o in enumerate(offsets))
            cut = tuple(length if d == dim else size for d, size in enumerate(sizes))
            others = tuple(0 if axis in DATA_AXES else index for axis, index in zip(mesh.names, coordinate))
            return Rectangle(moved, cut, is_first_holder(info.placement, others))

        return part

    def _is_primary(self, info: StateInfo) -> Callable[[tuple[int, ...]], bool]:
        part = self.rectangle(info)
        return lambda coordinate: part(coordinate).primary

    def _torch_placements(self, info: StateInfo) -> tuple[TorchPlacement, ...]:
        """On the axes of ``places.parameter_mesh``."""
        names = self.places.layout.mesh.names
        types = [info.placement[names.index(axis)] for axis in self.places.parameter_axes]
        placements = torch_placements(types)
        if self.places.data_size == 1:
            return placements
        dim = piece_dim(self.unsharded_shape(info), self.places.data_size)
        return (*placements, Shard(dim) if info.sharded and info.shape else Replicate())

    def _data_rank(self, coordinate: tuple[int, ...]) -> int:
        mesh, rank = self.places.layout.mesh, 0
        for name, size, index in zip(mesh.names, mesh.sizes, coordinate):
            if name in DATA_AXES:
                rank = rank * size + index
        return rank

    def unsharded_shape(self, info: StateInfo) -> tuple[int, ...]:
        """Shape of a tensor as programs use it on this rank."""
        return local_shape(info.shape, info.placement, self.places.layout.mesh)

    def _cut(self, info: StateInfo, whole: torch.Tensor) -> torch.Tensor:
        return self.places.cut(whole.to(info.owner_dtype), self.rectangle(info))

    def _put(self, info: StateInfo, local: torch.Tensor) -> None:
        self.version += 1
        tensor = nn.Parameter(local, requires_grad=info.trainable) if info.is_parameter else local
        for name in info.names:
            self.weights.put(name, tensor, persistent=name in self.state_names)

    @contextlib.contextmanager
    def tied_gradients_summed(self) -> Iterator[None]:
        """Run a step: what it adds to gradients of parameters that several pipeline ranks copy is summed over them.

        Gradients of earlier steps that were not zeroed hold the other ranks' parts already, so they are set aside.
        """
        tied = self._tied_across_stages()
        earlier = [(owner, owner.grad) for owners, _ in tied for owner in owners]
        for owner, _ in earlier:
            owner.grad = None
        try:
            yield
            for owners, group in tied:
                sum_over(owners, group)
        finally:
            for owner, gradient in earlier:
                if gradient is not None:
                    owner.grad = gradient if owner.grad is None else gradient.add_(owner.grad)

    def _tied_across_stages(self) -> list[tuple[list[nn.Parameter], DataGroup]]:
        """This rank's parameters that other pipeline ranks have copies of, with the group of those ranks."""
        tied = []
        for stages in dict.fromkeys(info.stages for info in self.everything() if info.trainable):
            if len(stages) == 1 or self.places.stage is None:
                continue
            group = self.places.stage_group(stages)
            if self.places.stage in stages and group is not None:
                infos = [info for info in self.everything() if info.trainable and info.stages == stages]
                owners = [self.find(info.names[0]) for info in infos]
                tied.append(([owner for owner in owners if isinstance(owner, nn.Parameter)], DataGroup.of(group)))
        return tied

    # -- what a parallel module asks ------------------------------------------------------------------------------

    def find(self, name: str) -> torch.Tensor:
        """What this rank owns of ``name``."""
        found: torch.Tensor = self.weights.find(name)
        return found

    def here(self) -> Iterator[StateInfo]:
        """Every tensor that this rank has something of, each once."""
        done: set[int] = set()
        for info in self.infos.values():
            if id(info) not in done and (self.places.stage is None or self.places.stage in info.stages):
                done.add(id(info))
                yield info

    def everything(self) -> Iterator[StateInfo]:
        """Every tensor of the model, each once, in the same order on all ranks."""
        yield from {id(info): info for info in self.infos.values()}.values()

    def owned(self) -> tuple[Owned, ...]:
        """What this rank holds of every tensor, each once."""
        found = []
        for info in self.here():
            part = self.places.rectangle(self.rectangle(info))
            first_stage = self.places.stage is None or self.places.stage == info.stages[0]
            found.append(
                Owned(
                    name=info.names[0],
                    aliases=info.names[1:],
                    tensor=self.find(info.names[0]),
                    shape=info.shape,
                    offsets=part.offsets,
                    kind="parameter" if info.is_parameter else "buffer",
                    trainable=info.trainable,
                    persistent=info.persistent,
                    primary=part.primary and first_stage,
                    virtual_primary=self.places.layout.marks(self._is_primary(info)),
                    device_mesh=self.places.parameter_mesh,
                    placements=self._torch_placements(info),
                )
            )
        return tuple(found)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Whole tensors under the names of the original's state dict, on every rank."""
        self.check()
        found = {}
        for info in self.everything():
            if info.persistent:
                whole = self._assembled(info, lambda tensor: tensor)
                found.update(dict.fromkeys(info.names, whole))
        return {name: found[name] for name in self.state_names}

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """Whole gradients by parameter name, on every rank; zeros where a parameter that is used has none."""
        return {
            info.names[0]: self._assembled(info, lambda tensor: tensor.grad)
            for info in self.everything()
            if info.trainable and info.used
        }

    def _assembled(self, info: StateInfo, part_of: Callable[[torch.Tensor], torch.Tensor | None]) -> torch.Tensor:
        place = self.places.stage
        mine = part_of(self.find(info.names[0])) if place is None or place == info.stages[0] else None
        whole: torch.Tensor = self.places.assemble(mine, self.rectangle(info), info.shape, info.owner_dtype)
        return whole

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor], *, strict: bool = True) -> None:
        """See ``ParallelModule.load_full_state_dict``."""
        unknown = [name for name in state if name not in self.infos]
        given = {id(self.infos[name]) for name in state if name in self.infos}
        missing = [name for name in self.state_names if id(self.infos[name]) not in given]
        if strict and (unknown or missing):
            raise ValueError(
                f"the state dict does not fit the model: missing {_few(missing)}, unknown {_few(unknown)}; "
                "strict=False takes what fits"
            )
        for name, whole in state.items():
            if name in self.infos:
                self.load(name, whole)

    def load(self, name: str, whole: torch.Tensor) -> None:
        """Take this rank's part of one whole tensor.

        Raises:
            ValueError: if it has another shape.
        """
        info = self.infos[name]
        if tuple(whole.shape) != info.shape:
            raise ValueError(f"{name!r} has shape {list(whole.shape)}, the model's has {list(info.shape)}")
        if self.places.stage is not None and self.places.stage not in info.stages:
            return
        tensor, local = self.find(info.names[0]), self._cut(info, whole.detach())
        if not tensor.is_meta:
            with torch.no_grad():
                tensor.copy_(local)
        elif info.is_parameter:
            torch.utils.swap_tensors(tensor, nn.Parameter(local, requires_grad=info.trainable))
        else:
            self._put(info, local)

    def initialise(self, model: nn.Module, *, seed: int, outside_of_state: bool = False) -> None:
        """See ``ParallelModule.initialise``; ``model`` is the original on meta.

        With ``outside_of_state`` only buffers that no state dict holds.
        """
        tensors = [info for info in self.here() if self.find(info.names[0]).is_meta]
        names = {name for info in tensors for name in info.names if not (outside_of_state and info.persistent)}
        for name, whole in initialised_tensors(model, seed=seed, names=names):
            if self.find(name).is_meta:
                self.load(name, whole)

    def disagreement(self) -> float:
        """Of virtual ranks: the largest difference between those that should hold the same."""
        assert isinstance(self.places, VirtualPlaces)
        found = (self.places.disagreement(self.find(i.names[0]), self.rectangle(i)) for i in self.everything())
        return max(found, default=0.0)

    def check(self) -> None:
        """Raise ValueError if a tensor has no data yet."""
        meta = [info.names[0] for info in self.here() if self.find(info.names[0]).is_meta]
        if meta:
            raise ValueError(still_on_meta(meta, self.state_names))


def _distinct(model: nn.Module) -> dict[tuple[str, ...], torch.Tensor]:
    """Every parameter and buffer of a model under all its names."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    return {tuple(found): tensors[key] for key, found in names.items()}


def stages_of(plan: Plan, programs: StepPrograms) -> dict[str, tuple[int, ...]]:
    """State path → pipeline ranks whose programs use it."""
    assert plan.step is not None
    found: dict[str, set[int]] = {}
    for stage, chunk in zip(programs.stages, plan.step.chunks):
        for state in stage.sharded.graph.states:
            found.setdefault(state.path, set()).add(chunk.rank)
    return {path: tuple(sorted(ranks)) for path, ranks in found.items()}


def sharded_paths(programs: StepPrograms) -> frozenset[str]:
    """Paths of the states that some unit shards over its data ranks, with all others of their units.

    A unit gathers all of its parameters or none, so one that is sharded for another unit's sake takes the rest along.
    """
    units = [
        (unit.policy.zero, frozenset(path for _, _, path in unit.states))
        for stage in programs.stages
        for unit in stage.all_units
    ]
    found: set[str] = set()
    for _ in units:
        before = len(found)
        for zero, paths in units:
            if zero or paths & found:
                found |= paths
        if len(found) == before:
            break
    return frozenset(found)


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown or "none"
