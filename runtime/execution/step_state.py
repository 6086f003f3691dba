"""The parameters and buffers of a step: what this rank owns, under the original names, and the units that use them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import nn

from cost_models.schedules import SCHEDULES
from passes.ir.types import I, MeshShape, R, shard_dim
from passes.pipeline_cut import Deferral
from passes.torch_compat.module_tables import convert_tensors
from runtime.execution.rank_mapping import Places, VirtualPlaces
from runtime.execution.state_info import Placing, StateInfo, unplanned
from runtime.state.exchange import exchange
from runtime.state.initialise import initialised_tensors, still_on_meta
from runtime.state.owned import Owned
from runtime.state.weight_tree import WeightTree
from runtime.zero.group import StateGroup, sum_over


class StepState:
    """Everything that a rank owns in a step.

    Attributes:
        weights: the tree of what this rank owns, under the original names.
        infos: of every tensor of the model, by each of its names.
        version: counts how often tensors were replaced.
    """

    def __init__(self, model: nn.Module, places: Places) -> None:
        self.places = places
        self.version = 0
        self.state_names = [name for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)]
        self.infos: dict[str, StateInfo] = {}
        self.weights = WeightTree()
        self._is_training = model.training
        self.weights.train(self._is_training)
        self.deferral: Deferral = {}
        self.placing: Placing | None = None
        #: Axes over which ZeRO cuts parameters into pieces, and over how many of their ranks (0: all).
        self._pieces: tuple[tuple[str, ...], int] = ((), 0)
        self._frozen: list[nn.Parameter] = []
        #: The versions that were looked through, and what was there: nothing on meta, copies on other pipeline ranks.
        self._version_with_data = self._version_of_tied = -1
        self._tied: list[tuple[list[nn.Parameter], StateGroup]] = []
        for names, tensor in _distinct(model).items():
            persistent = any(name in self.state_names for name in names)
            info = unplanned(names, tensor, self._mesh, persistent=persistent)
            self.infos.update(dict.fromkeys(names, info))
            self._put(info, tensor.detach())

    @property
    def _mesh(self) -> MeshShape:
        return self.places.layout.mesh

    def place(self, placing: Placing) -> None:
        """Cut every tensor of the first rank as a plan says; those that it does not name stay whole."""
        before, self.placing, self.deferral = list(self.everything()), placing, placing.deferral
        infos = [self._placed(info, placing) for info in before]
        for axes in dict.fromkeys(info.data_axes for info in infos):
            self.places.group_over(axes)  # Made by all ranks, also by those that have no parameter of these.
        self._pieces = next(((info.data_axes, info.zero_ranks) for info in infos if info.sharded), ((), 0))
        for pieces in dict.fromkeys((info.data_axes, info.zero_ranks) for info in infos if info.sharded):
            self.places.parameter_mesh(*pieces)
        owners = [self.find(info.names[0]) for info in before]
        self.weights = WeightTree()
        self.weights.train(self._is_training)
        for info, owner, whole in zip(infos, owners, self.places.from_first(owners)):
            self.infos.update(dict.fromkeys(info.names, info))
            if self._is_here(info):
                self._put(info, self._cut(info, whole.detach()), owner)
        self._note_frozen()

    def _placed(self, info: StateInfo, placing: Placing) -> StateInfo:
        new = placing.placed(info)
        return dataclasses.replace(new, data_axes=self.places.in_rank_order(new.data_axes))

    def adopt(self, placing: Placing) -> None:
        """Take up another plan's placements of tensors that the plans so far did not use.

        Raises:
            ValueError: if it places one that they did use in another way.
        """
        assert self.placing is not None
        planned_states = self.placing.plan.states
        for info in list(self.everything()):
            new = self._placed(info, placing)
            if new == info or not any(name in placing.plan.states for name in info.names):
                continue
            if any(name in planned_states for name in info.names):
                if not _lie_alike(info, new, self._mesh):
                    raise ValueError(
                        f"the new plan places {info.names[0]!r} as {new.placement}, but it is held as {info.placement}"
                    )
                continue
            owner = self.find(info.names[0])
            whole = torch.empty(info.shape, dtype=info.owner_dtype, device="meta")
            if not owner.is_meta:
                whole = self._assembled(info, lambda tensor: tensor)
            self.places.group_over(new.data_axes)
            self.infos.update(dict.fromkeys(new.names, new))
            self._put(new, self._cut(new, whole), owner)
            self.deferral = {**self.deferral, **{n: placing.deferral[n] for n in new.names if n in placing.deferral}}
        self._note_frozen()

    def _note_frozen(self) -> None:
        frozen = (self.find(info.names[0]) for info in self.here() if info.is_parameter and not info.trainable)
        self._frozen = [parameter for parameter in frozen if isinstance(parameter, nn.Parameter)]

    def _is_here(self, info: StateInfo) -> bool:
        return self.places.stage is None or self.places.stage in info.stages

    def _cut(self, info: StateInfo, whole: torch.Tensor) -> torch.Tensor:
        return self.places.cut(whole.to(info.owner_dtype), info.rectangle(self._mesh))

    def _put(self, info: StateInfo, local: torch.Tensor, owner: torch.Tensor | None = None) -> None:
        """Hold ``local`` under a tensor's names; ``owner`` stays the same object, for optimizers and programs."""
        self.version += 1
        tensor = nn.Parameter(local, requires_grad=info.trainable) if info.is_parameter else local
        if owner is not None and type(local) is torch.Tensor:
            if info.is_parameter and local.is_meta == owner.is_meta and local.dtype == owner.dtype:
                owner.data = local
            else:
                exchange(owner, tensor)
            tensor = owner
        for name in info.names:
            self.weights.put(name, tensor, persistent=name in self.state_names)

    @contextlib.contextmanager
    def tied_gradients_summed(self) -> Iterator[None]:
        """Run a step: what it adds to gradients of parameters that several pipeline ranks copy is summed over them.

        Gradients of earlier steps that were not zeroed hold the other ranks' parts already, so they are set aside.
        """
        if self._version_of_tied != self.version:
            self._tied, self._version_of_tied = self._tied_across_stages(), self.version
        tied = self._tied
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

    def _tied_across_stages(self) -> list[tuple[list[nn.Parameter], StateGroup]]:
        """This rank's parameters that other pipeline ranks have copies of, with the group of those ranks."""
        tied = []
        for stages in dict.fromkeys(info.stages for info in self.everything() if info.trainable):
            if len(stages) == 1 or self.places.stage is None:
                continue
            group = self.places.stage_group(stages)
            if self.places.stage in stages and group is not None:
                infos = [info for info in self.everything() if info.trainable and info.stages == stages]
                owners = [self.find(info.names[0]) for info in infos]
                tied.append(([owner for owner in owners if isinstance(owner, nn.Parameter)], StateGroup.of(group)))
        return tied

    def apply(self, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool) -> None:
        """``nn.Module._apply`` of all tensors, which may replace them."""
        convert_tensors(self.weights, function, recurse)
        self.version += 1

    # -- what a parallel module asks ------------------------------------------------------------------------------

    def find(self, name: str) -> torch.Tensor:
        """What this rank owns of ``name``."""
        tensor: torch.Tensor = self.weights.find(name)
        return tensor

    def is_here(self, name: str) -> bool:
        """Whether this rank has anything of ``name``."""
        return self._is_here(self.infos[name])

    def stages_of(self, name: str) -> tuple[int, ...]:
        """Pipeline stages that have ``name``, counted from 0."""
        return self.infos[name].stages

    def lie_alike(self, infos: Sequence[StateInfo]) -> bool:
        """Whether every rank owns the same rectangle of each of these tensors."""
        first = infos[0]
        pieces = {(info.sharded, info.data_axes if info.sharded else (), info.zero_ranks) for info in infos}
        wholes = {(info.shape, info.stages, info.owner_dtype) for info in infos}
        return len(pieces) == len(wholes) == 1 and all(_lie_alike(first, info, self._mesh) for info in infos)

    @property
    def splits_backward(self) -> bool:
        """Whether backward passes come in two halves: gradients of activations, and later of weights."""
        schedule = None if self.placing is None else SCHEDULES.get(self.placing.plan.step.schedule)
        return schedule is not None and schedule.splits_backward

    def trains(self, name: str) -> bool:
        """Whether a parameter is trained: it may have been frozen since the plan was made."""
        info = self.infos[name]
        return self.find(name).requires_grad if self._is_here(info) else info.trainable

    def here(self) -> Iterator[StateInfo]:
        """Every tensor that this rank has something of, each once."""
        yielded: set[int] = set()
        for info in self.infos.values():
            if id(info) not in yielded and self._is_here(info):
                yielded.add(id(info))
                yield info

    def everything(self) -> Iterator[StateInfo]:
        """Every tensor of the model, each once, in the same order on all ranks."""
        yield from {id(info): info for info in self.infos.values()}.values()

    def owned(self) -> tuple[Owned, ...]:
        """What this rank holds of every tensor, each once."""
        pieces = []
        for info in self.here():
            part = self.places.rectangle(info.rectangle(self._mesh))
            first_stage = self.places.stage is None or self.places.stage == info.stages[0]
            pieces.append(
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
                    virtual_primary=self.places.layout.marks(info.is_primary(self._mesh)),
                    device_mesh=self.places.parameter_mesh(*self._pieces_beside(info)),
                    placements=info.torch_placements(self._mesh, *self._pieces_beside(info)),
                    state_on_host=self.placing is not None and self.placing.plan.step.optimizer_on_host,
                )
            )
        return tuple(pieces)

    def _pieces_beside(self, info: StateInfo) -> tuple[tuple[str, ...], int]:
        """The data axes of the mesh that a tensor lies on, and over how many of their ranks pieces are divided: of its
        own or, if whole there, of others."""
        if info.sharded:
            return info.data_axes, info.zero_ranks
        places = (self._mesh.names.index(axis) for axis in self._pieces[0])
        is_cut = any(shard_dim(info.placement[place]) is not None for place in places)
        return ((), 0) if is_cut else self._pieces  # experts, one rank's alone

    def full_state_dict(self, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        """Whole tensors under the names of the original's state dict (None: all of them), on every rank."""
        self.check()
        tensors = {}
        requested = set(self.state_names if names is None else names)
        for info in self.everything():
            if info.persistent and requested.intersection(info.names):
                whole = self._assembled(info, lambda tensor: tensor)
                tensors.update(dict.fromkeys(info.names, whole))
        return {name: tensors[name] for name in self.state_names if name in requested}

    def whole(self, name: str) -> torch.Tensor:
        """A whole tensor on the CPU; every rank must call this."""
        return self._assembled(self.infos[name], lambda tensor: tensor).detach().cpu()

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """Whole gradients by parameter name, on every rank; zeros where a parameter that is used has none."""
        return {
            info.names[0]: self._assembled(info, lambda tensor: tensor.grad)
            for info in self.everything()
            if info.trainable and (info.used or self._is_used_by_calls(info))
        }

    def _is_used_by_calls(self, info: StateInfo) -> bool:
        """Whether outputs beside the loss were differentiated; behind a pipeline they are not."""
        return self.places.num_stages == 1 and self.find(info.names[0]).grad is not None

    def _assembled(self, info: StateInfo, part_of: Callable[[torch.Tensor], torch.Tensor | None]) -> torch.Tensor:
        if self.placing is None:
            (first,) = self.places.from_first([self.find(info.names[0])])
            return first.detach().clone()
        place = self.places.stage
        own_part = part_of(self.find(info.names[0])) if place is None or place == info.stages[0] else None
        whole: torch.Tensor = self.places.assemble(own_part, info.rectangle(self._mesh), info.shape, info.owner_dtype)
        return whole

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor], *, strict: bool = True) -> None:
        """See ``ParallelModule.load_full_state_dict``."""
        unknown = [name for name in state if name not in self.infos]
        passed = {id(self.infos[name]) for name in state if name in self.infos}
        missing = [name for name in self.state_names if id(self.infos[name]) not in passed]
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
        if not self._is_here(info):
            return
        tensor = self.find(info.names[0])
        local = whole.detach().to(info.owner_dtype, copy=True)
        if self.placing is not None:
            local = self._cut(info, whole.detach())
        if tensor.is_meta:
            self._put(info, local, tensor)
        else:
            with torch.no_grad():
                tensor.copy_(local)

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
        """The largest difference between virtual ranks that should hold the same values."""
        assert isinstance(self.places, VirtualPlaces)
        differences = (
            self.places.disagreement(self.find(i.names[0]), i.rectangle(self._mesh)) for i in self.everything()
        )
        return max(differences, default=0.0)

    def check(self) -> None:
        """Raise ValueError if a tensor has no data yet, or a frozen one is to be trained."""
        if self._version_with_data != self.version:
            meta = [info.names[0] for info in self.here() if self.find(info.names[0]).is_meta]
            if meta:
                raise ValueError(still_on_meta(meta, self.state_names))
            self._version_with_data = self.version
        if any(parameter.requires_grad for parameter in self._frozen):
            raise ValueError(
                "a parameter that was frozen when the model was planned now requires a gradient: "
                "set requires_grad before planner.compile"
            )


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
    return {tuple(paths): tensors[key] for key, paths in names.items()}


def _lie_alike(first: StateInfo, second: StateInfo, mesh: MeshShape) -> bool:
    """Whether a rank holds the same of both: R and I differ in the gradient only."""
    pairs = zip(mesh.sizes, first.placement, second.placement)
    return all(size == 1 or a == b or {a, b} <= {R, I} for size, a, b in pairs)


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown or "none"
